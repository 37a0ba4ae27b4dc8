"""Test what Python reads back from finished runs, and modules that it saves."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from vitral.errors import RunError, UsageError


@pytest.fixture
def runs(trained: vitral.TrainedRun, tmp_path: Path) -> Path:
    """Two copies of a run, one without its result, and a folder that is not a run."""
    for name in ("b10", "b9", "stopped"):
        shutil.copytree(trained.folder, tmp_path / "runs" / name)
    (tmp_path / "runs" / "stopped" / "result.json").unlink()
    (tmp_path / "runs" / "other").mkdir()
    return tmp_path / "runs"


def test_a_run_is_read_back(trained: vitral.TrainedRun) -> None:
    run = vitral.TrainedRun.read(trained.folder)
    assert run.result == trained.result
    assert [line["epoch"] for line in run.history] == list(range(1, run.result["epochs"] + 1))
    assert run.config["run"]["epochs"] == len(run.history)
    assert run.best is not None
    assert run.best["val_accuracy"] == max(line["val_accuracy"] for line in run.history)
    page = run.report()._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert page.count("<") == 2, "the page is text inside the frame"


def test_finished_runs_are_a_table(runs: Path) -> None:
    found = vitral.runs(runs)
    assert [run.folder.name for run in found] == ["b9", "b10"]
    assert found["b10"].folder == runs / "b10"
    assert len(found[1:]) == 1
    (first, _) = found.table()
    assert first["run"] == "b9"
    assert first["val_accuracy"] == found[0].result["val_accuracy"]
    assert repr(found).count("TrainedRun(") == 2
    assert found._repr_html_().count("<tr>") == 2
    with pytest.raises(KeyError, match="'b11'; there are b9, b10"):
        found["b11"]
    with pytest.raises(RunError, match="no such folder"):
        vitral.runs(runs / "missing")


def test_a_run_that_cannot_be_read_says_why(runs: Path) -> None:
    with pytest.raises(RunError, match="not finished"):
        vitral.TrainedRun.read(runs / "stopped")
    with pytest.raises(RunError, match="not a run folder"):
        vitral.TrainedRun.read(runs / "other")
    (runs / "b9" / "report.html").unlink()
    with pytest.raises(RunError, match="no report"):
        vitral.TrainedRun.read(runs / "b9").report()


def test_a_run_is_explained_by_its_path(trained: vitral.TrainedRun) -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    (by_path,) = vitral.explain(str(trained.folder), image)
    (by_predictor,) = vitral.explain(trained.predictor, image)
    assert by_path.label == by_predictor.label
    assert np.array_equal(by_path.values, by_predictor.values)


def test_two_runs_are_compared(runs: Path) -> None:
    found = vitral.compare([runs / "b9", runs / "b10"])
    assert [one.evaluation.accuracy for one in found.contenders] == [vitral.evaluate(runs / "b9").accuracy] * 2


def test_a_module_is_saved_with_its_classes(tmp_path: Path) -> None:
    model = vitral.create("mu/4", classes=2, image_size=8).eval()
    preparation = vitral.Preprocessing((8, 8), mean=(0.1, 0.2, 0.3), std=(0.5, 0.5, 0.5))
    file = vitral.save(model, tmp_path / "pets.safetensors", classes=["cat", "dog"], preprocessing=preparation)
    predictor = vitral.load(file, precision="fp32", device="cpu")
    assert predictor.classes == ("cat", "dog")
    assert predictor.preprocessing == preparation
    pixels = torch.zeros(1, 3, 8, 8)
    assert torch.equal(predictor.model(pixels), model(pixels))
    with pytest.raises(UsageError, match="exists already"):
        vitral.save(model, file)
    with pytest.raises(UsageError, match="3"):
        vitral.save(model, tmp_path / "other.safetensors", classes=["a", "b", "c"])
