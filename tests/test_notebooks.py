"""The notebooks: what they show is what they do."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch
from rich.console import Console

from vitral.training.progress import WidgetBar, widget_bar

FOLDER = Path(__file__).parents[1] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def printed(notebook: nbformat.NotebookNode) -> str:
    """All text that the cells printed."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "\n".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_was_saved_after_it_ran(path: Path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]
    assert not re.search(r"/(home|root|tmp|Users)/", printed(notebook)), "paths of a machine"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    (accuracy,) = re.findall(r"^Accuracy ([\d.]+)%", printed(notebook), re.MULTILINE)
    assert float(accuracy) > 85
    assert "100.00% agreement" in printed(notebook)


CELLS = """
import signal, threading, os
import vitral
import numpy as np
draw = np.random.default_rng(0)
data = (draw.integers(0, 256, (16, 8, 8, 3), dtype=np.uint8), ["cat", "dog"] * 8)
options = dict(model="mu/4", image_size=8, batch_size=2, init="none", probe=False, device="cpu", threads=1, quiet=True)
# ---
from vitral.training.callbacks import Callback
class Press(Callback):
    def on_epoch_end(self, line, best):
        if line["epoch"] == 3:
            os.kill(os.getpid(), signal.SIGINT)
handler = signal.getsignal(signal.SIGINT)
vitral.train(data, **options, epochs=30, out="run", callbacks=[Press()])
# ---
assert signal.getsignal(signal.SIGINT) is handler
print("threads", [one.name for one in threading.enumerate() if "worker" in one.name.lower()])
run = vitral.train(out="run", resume=True, quiet=True)
print("epochs", run.result["epochs"])
# ---
run.predictor(list(data[0][:2]))
# ---
vitral.explain(run.predictor, data[0][0])
# ---
run.report()
"""


@pytest.mark.slow
def test_an_interrupt_is_one_line_and_the_kernel_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    cells = [nbformat.v4.new_code_cell(code.strip()) for code in CELLS.split("# ---")]
    notebook = nbformat.v4.new_notebook(cells=cells)
    client = nbclient.NotebookClient(
        notebook, timeout=200, allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    errors = [[one for one in cell.outputs if one.output_type == "error"] for cell in notebook.cells]
    assert [len(found) for found in errors] == [0, 1, 0, 0, 0, 0], errors
    ((stopped,),) = (found for found in errors if found)
    assert stopped.ename == "Interrupted"
    assert len(stopped.traceback) == 1
    assert stopped.traceback[0].startswith("stopped and saved; to go on: ")
    assert "epochs 30" in printed(notebook)
    assert "threads []" in printed(notebook)
    shown = [cell.outputs[-1].data["text/html"] for cell in notebook.cells[-3:]]
    assert shown[0].count("<table>") == 2
    assert "data:image/png;base64," in shown[1]
    assert shown[2].startswith("<iframe")


@pytest.mark.slow
def test_the_bar_of_a_notebook_is_a_widget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipywidgets")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    train = 'run = vitral.train(data, **{**options, "quiet": False}, epochs=2, out="run")'
    cells = [nbformat.v4.new_code_cell(code) for code in (CELLS.split("# ---")[0].strip(), train)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [kind for output in notebook.cells[1].outputs for kind in output.get("data", ())]
    assert "application/vnd.jupyter.widget-view+json" in kinds
    assert "epoch 2/2" in printed(notebook)
    assert "\x1b[?25l" not in printed(notebook), "a bar of the terminal"


class Widget:
    """Stands for a widget of ipywidgets: attributes, and `close`."""

    def __init__(self, children: object = (), **fields: object):
        self.children, self.closed, self.value = children, False, fields.get("value")

    def close(self) -> None:
        self.closed = True


def test_a_bar_of_a_notebook_follows_the_epoch():
    kinds = SimpleNamespace(IntProgress=Widget, Label=Widget, HBox=Widget)
    shown: list[Widget] = []
    with WidgetBar(kinds, shown.append, 3) as bar:
        bar.on_epoch_start(1, 10, 4)
        assert bar.label.value == "epoch 2/3"
        assert (bar.bar.value, bar.bar.max) == (4, 10)
        for _ in range(6):
            bar.on_batch(torch.zeros(()))
        assert bar.bar.value == 10
    assert shown == [bar.box]
    assert bar.box.closed


def test_there_is_no_bar_outside_of_a_notebook():
    assert widget_bar(Console(), 3) is None
