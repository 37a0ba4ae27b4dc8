"""Whatever a figure, a page or a drawing raises, a run that is trained has its result.json, and its report later."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vitral
from images import noise
from running import mostly_slow, printed, train
from vitral.errors import Interrupted
from vitral.evaluation import figures, report
from vitral.pretraining import monitor
from vitral.workflows.running import execute, pretraining, pretraining_page
from vitral.workflows.running import figures as network_figures

pytestmark = pytest.mark.report

DRAWN = [(network_figures, one) for one in ("explain", "patch_filters", "attention_distance", "position_similarity")]
"""Figures of the network: the report is written without one that fails, and says so."""
WRITTEN = [
    (execute, "_report"),
    (execute, "summarize"),
    (report, "render"),
    (figures, "curves"),
    (figures, "reliability"),
    (figures, "embedded"),
    (network_figures, "draw_figures"),
    (network_figures, "confident_mistakes"),
]
"""Parts without which there is no report."""


def fail(*given: Any, **more: Any) -> None:
    raise TypeError("Cannot convert a MPS Tensor to float64 dtype")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its report."""
    root = tmp_path_factory.mktemp("reported")
    for number in range(24):
        folder = root / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(number, (8, 8))).save(folder / f"{number}.png")
    return train(root / "photos", root / "run", position="learned", epochs=1).folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run as it is before its report, which `--resume` writes."""
    data = tmp_path / "photos"
    data.symlink_to(finished.parent / "photos")
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    (copy / "report.html").unlink()
    return copy


@pytest.mark.parametrize(("module", "name"), mostly_slow([*DRAWN, *WRITTEN], 3))
def test_a_figure_that_fails_does_not_end_the_run(run, capsys, monkeypatch, module, name):
    before = json.loads((run / "result.json").read_text("utf-8"))
    resume = ("train", "--out", str(run), "--resume")
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        _, err = printed(capsys, *resume)
    assert json.loads((run / "result.json").read_text("utf-8"))["val_accuracy"] == before["val_accuracy"]
    if (module, name) in DRAWN:
        assert "Cannot convert a MPS Tensor" in (run / "report.html").read_text("utf-8")
        return
    (line,) = [line for line in err.splitlines() if "the report could not be written" in line]
    assert "TypeError: Cannot convert a MPS Tensor" in line
    assert line.endswith(f"to write it: vitral {' '.join(resume)}")
    assert not (run / "report.html").exists()
    printed(capsys, *resume)
    assert "Cannot convert" not in (run / "report.html").read_text("utf-8")
    _, err = printed(capsys, *resume)
    assert "already finished" in err


def test_a_new_run_has_its_result_before_its_report(make_images, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(execute, "_report", fail)
    done = train(make_images({"a": 8, "b": 8}), tmp_path / "run", epochs=1)
    assert json.loads((done.folder / "result.json").read_text("utf-8")) == done.result


def test_ctrl_c_in_the_report_leaves_it_to_be_written(run, monkeypatch):
    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(execute, "_report", stop)
        with pytest.raises(Interrupted, match="--resume"):
            vitral.train(out=run, resume=True, quiet=True)
    vitral.train(out=run, resume=True, quiet=True)
    assert (run / "report.html").is_file()


@pytest.mark.parametrize(
    ("module", "name"),
    mostly_slow([(pretraining_page, "write_report"), (pretraining, "draw_samples"), (pretraining, "contact_sheet")], 2),
)
def test_pretraining_likewise(make_images, tmp_path, monkeypatch, capsys, module, name):
    for least in ("LEAST_SPREAD", "LEAST_RANK"):
        monkeypatch.setattr(monitor, least, 0.0)
    monkeypatch.setattr(pretraining, "_EVERY", 0.0)  # samples are drawn after each epoch, too
    options = ("--model", "mu/4", "--image-size", "8", "--epochs", "2", "--decoder-dim", "8", "--decoder-depth", "1")
    out = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(module, name, fail)
        _, err = printed(capsys, "pretrain", str(make_images({"a": 8})), "--out", str(out), *options)
    assert f"to write it: vitral pretrain --out {out} --resume" in err
    assert (out / "result.json").is_file()
    printed(capsys, "pretrain", "--out", str(out), "--resume")
    assert (out / "report.html").is_file()
    assert (out / pretraining.SHEET).is_file()
