"""Measurements, read back in Python: predictions as rows, drawings as figures of matplotlib."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import vitral
from running import TINY
from vitral.errors import MissingExtraError, RunError
from vitral.frames import Rows

pytestmark = pytest.mark.python


def saved(run: vitral.TrainedRun, folder: Path) -> Path:
    """Write the weights of a run as a file, which is another network for `vitral.compare`."""
    used = run.predictor
    return vitral.save(used.model, folder / "copy.safetensors", classes=used.classes, preprocessing=used.preprocessing)


def test_predictions_are_rows_with_labels(trained):
    found = vitral.evaluate(trained.folder)
    rows = found.predictions
    assert len(rows) == found.images == 12
    right = [row["true"] == row["class"] for row in rows]
    assert sum(right) / len(right) == found.accuracy
    assert rows[0]["image"].endswith("day/0.png")
    assert rows[0]["true"] == "day"
    one = trained.predictor(rows[0]["image"])
    assert rows[0]["probability"] == pytest.approx(one.confidence, abs=1e-5)
    assert rows[-1] == rows[10:][1]
    assert [*vitral.Evaluation.from_json(found.to_json()).predictions] == []
    assert "predictions" not in found.to_json()


def test_predictions_are_a_table(trained):
    pandas = pytest.importorskip("pandas")
    rows = vitral.evaluate(trained.folder).predictions
    assert isinstance(rows, Rows)
    frame = rows.to_frame()
    assert list(frame.columns)[:2] == ["image", "true"]
    pandas.testing.assert_frame_equal(frame, pandas.DataFrame(rows))
    assert repr(rows).startswith("[{'image': ")
    assert repr(rows).endswith("}, and 2 more]")
    page = rows._repr_html_()
    assert page.count("<tr>") == 11
    assert "<caption>10 of 12 rows</caption>" in page
    assert page.index("<th>true</th>") < page.index("<td>day</td>")
    (by_file,) = trained.predictor([rows[0]["image"]]).to_frame().to_dict("records")
    assert by_file["class"] == rows[0]["class"]


def test_a_run_is_accepted_in_place_of_its_folder(trained, tmp_path):
    image = np.zeros((8, 12, 1), np.uint8)
    folder = trained.folder
    assert vitral.evaluate(trained).accuracy == vitral.evaluate(folder).accuracy
    assert vitral.load(trained)(image) == vitral.load(folder)(image)
    assert vitral.explain(trained, image)[0].label == vitral.explain(folder, image)[0].label
    assert vitral.inspect(trained).facts == vitral.inspect(folder).facts
    assert not vitral.verify(trained).damaged
    vitral.convert(trained, tmp_path / "weights.safetensors", "native")
    compared = vitral.compare([trained, saved(trained, tmp_path)], trained.result["data"], split="test")
    assert compared.contenders[0].name == folder.name
    options = {"epochs": 1, "probe": False, "device": "cpu", "quiet": True}
    again = vitral.train(trained.result["data"], init=trained, out=tmp_path / "again", **options)
    assert again.config["run"]["init"] == str(folder)


def test_epochs_and_runs_are_tables(trained, monkeypatch):
    pandas = pytest.importorskip("pandas")
    frame = trained.history.to_frame()
    assert list(frame["epoch"]) == [1, 2, 3, 4, 5, 6]
    assert list(frame["train_loss"]) == [epoch["train_loss"] for epoch in trained.history]
    assert json.loads(json.dumps(trained.history)) == trained.history
    assert trained.history[5:].to_frame()["epoch"].item() == 6
    assert "<th>train_loss</th>" in trained.history._repr_html_()
    runs = vitral.runs(trained.folder.parent)
    pandas.testing.assert_frame_equal(runs.to_frame(), pandas.DataFrame(runs.table()))
    predictions = vitral.evaluate(trained.folder).predictions
    monkeypatch.setitem(sys.modules, "pandas", None)
    for rows in (runs, trained.history, predictions):
        with pytest.raises(MissingExtraError, match="pandas is not installed"):
            rows.to_frame()


def test_predicted_numbers_have_a_column_for_the_true_ones(make_images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = make_images({"a": 12}, size=(8, 8))
    files = sorted(folder.rglob("*.png"))
    lines = [f"{file},{number}.5" for number, file in enumerate(files)]
    (tmp_path / "ages.csv").write_text("\n".join(["file,age", *lines]) + "\n")
    options = {**TINY, "label_smoothing": 0.0, "mixup": 0.0, "val_fraction": 0.5, "quiet": True}
    run = vitral.train("ages.csv", task="numbers", out="run", **options)
    found = vitral.evaluate(run.folder)
    errors = [abs(row["age"] - row["true_age"]) for row in found.predictions]
    assert np.mean(errors) == pytest.approx(found.per_number[0].mae, rel=1e-5)


def test_drawings_are_figures_of_matplotlib(trained):
    evaluation = vitral.evaluate(trained.folder)
    (heatmap,) = vitral.explain(trained.folder, [np.zeros((8, 12, 1), np.uint8)])
    drawn = {**trained.figures(), **evaluation.figures(), "map": heatmap.figure()}
    drawn |= vitral.inspect(trained.folder).figures()
    assert {"Loss", "Accuracy", "Confusion", "Reliability", "map", "distance"} <= drawn.keys()
    assert all(isinstance(one, Figure) for one in drawn.values())
    lines = drawn["Loss"].axes[0].lines
    assert [one["train_loss"] for one in trained.history] in [list(line.get_ydata()) for line in lines]
    texts = [text.get_text() for text in drawn["Confusion"].axes[0].texts]
    assert sorted(map(int, texts)) == sorted(int(n) for n in evaluation.confusion.ravel() if n)


def test_other_results_are_a_line_and_a_table(trained, tmp_path):
    data = vitral.load_data(trained.result["data"])
    checked, verified = vitral.check_data(data, lambda *_: None), vitral.verify(trained.folder)
    compared = vitral.compare([trained.folder, saved(trained, tmp_path)], trained.result["data"], split="test")
    for one, facts in [
        (checked, ["DataCheck(sky", "44 images"]),
        (verified, ["Verification(", "none damaged"]),
        (compared, ["Comparison(12 images", compared.conclusion()]),
    ]:
        assert all(fact in repr(one) for fact in facts), repr(one)
        assert len(repr(one)) < 1000
        assert one._repr_html_().startswith("<table>")


def test_a_comparison_takes_data_in_memory(trained, tmp_path):
    images = np.stack([np.full((8, 12, 3), level, np.uint8) for level in (200, 30, 210)])
    found = vitral.compare([trained.folder, saved(trained, tmp_path)], (images, ["day", "night", "day"]))
    assert len(found.images) == 3
    assert [one.evaluation.accuracy for one in found.contenders] == [1.0, 1.0]


def test_runs_of_a_folder_are_a_table(trained, tmp_path):
    runs = vitral.runs(trained.folder.parent)
    run = runs["sky"]
    assert [len(runs), runs[0].folder, next(iter(runs)).folder] == [1, trained.folder, trained.folder]
    assert run.history == trained.history
    assert run.best == run.history[run.result["best_epoch"] - 1]
    assert run.config["run"]["optimizer"] == "adamw"
    assert {"epochs", "lr"} <= {one["name"] for one in run.config["plan"]}
    (row,) = runs.table()
    assert row["run"] == "sky"
    assert row["val_accuracy"] == run.result["val_accuracy"]
    assert f"{run.result['test']['accuracy']:.2%}" in runs._repr_html_()
    (tmp_path / "no-run").mkdir()
    assert len(vitral.runs(tmp_path)) == 0
    with pytest.raises(KeyError, match="there are sky"):
        runs["sea"]
    with pytest.raises(RunError, match="no such folder"):
        vitral.runs(tmp_path / "none")


@pytest.mark.report
def test_a_report_shows_itself(make_images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = vitral.train(make_images({"a": 6, "b": 6}, size=(8, 8)), out="run", quiet=True, **{**TINY, "epochs": 2})
    report = run.report()
    assert report.path == run.folder / "report.html"
    page = report._repr_html_()
    assert page.startswith("<iframe srcdoc=")
    assert "&lt;svg" in page
