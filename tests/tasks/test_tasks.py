"""Several labels and numbers from the table to predictions, reports and explanations."""

from __future__ import annotations

import csv
import json
import shlex

import numpy as np
import pytest
import torch
from sklearn import metrics as sk

import vitral
from running import as_json, call_at_batch, printed, recorded, same_bits, train, weights_of
from tasks.conftest import write
from vitral.data import load
from vitral.errors import Interrupted, UsageError
from vitral.inference.outputs import OUTPUTS, output_of
from vitral.inference.outputs.labels import Labels
from vitral.training.options import Run
from vitral.weights import native
from vitral.workflows.tasks import TASKS

ALL = ("class", "labels", "numbers")


def test_every_task_has_its_output_and_its_option():
    assert tuple(TASKS) == tuple(OUTPUTS)
    for name in TASKS:
        assert Run(task=name).task == name


def test_labels_are_learned_and_thresholds_saved(labels_run):
    result = json.loads((labels_run / "result.json").read_text())
    assert result["val_map"] > 0.6
    assert result["test"]["task"] == "labels"
    weights = native.read(labels_run / "model.safetensors")
    assert weights.output["task"] == "labels"
    assert len(weights.output["thresholds"]) == 3
    assert weights.output["thresholds"] != [0.5] * 3
    assert [one["threshold"] for one in result["test"]["per_label"]] == weights.output["thresholds"]
    page = (labels_run / "report.html").read_text()
    for part in ("Labels together", "thresholds", "mAP", "the column labels has the labels of an image"):
        assert part in page


def test_thresholds_are_the_best_on_validation(labels_run, tables):
    predictor = vitral.load(labels_run, device="cpu", precision="fp32")
    own = json.loads((labels_run / "result.json").read_text())["val"]
    assert own["macro_f1"] >= own["micro_f1"] * 0.5
    assert isinstance(predictor.output, Labels)
    for score in own["per_label"]:
        assert score["f1"] > 0 or not score["images"]


def test_predicted_labels_reach_their_thresholds(labels_run, tables, capsys, monkeypatch):
    monkeypatch.chdir(tables)
    predictor = vitral.load(labels_run, device="cpu", precision="fp32")
    one = predictor("p/1.png")
    expected = {n for n, p, t in zip(one.classes, one.probabilities, one.thresholds, strict=True) if p >= t}
    assert set(one.labels) == expected
    assert one.probabilities == pytest.approx(
        torch.sigmoid(predictor.logits(predictor.prepare("p/1.png")[None]))[0].numpy()
    )
    plain = as_json(capsys, "predict", str(labels_run), "p/1.png", "--device", "cpu", "--precision", "fp32")
    assert {row["label"] for row in plain["predictions"][0]["labels"]} == expected
    out, _ = printed(capsys, "predict", str(labels_run), "p/1.png")
    assert out.startswith("p/1.png\t")
    printed(
        capsys, "predict", str(labels_run), "p", "--out", "labels-out.csv", "--top", "1", "--all", "--precision", "fp32"
    )
    with open("labels-out.csv") as file:
        rows = {row["path"]: row for row in csv.DictReader(file)}
    assert list(rows["p/1.png"]) == ["path", "labels", "p_blue", "p_green", "p_red", "error"]
    assert set(filter(None, rows["p/1.png"]["labels"].split("|"))) == expected


def test_evaluating_again_gives_the_figures_of_the_run(labels_run, numbers_run, capsys):
    for run in (labels_run, numbers_run):
        own = json.loads((run / "result.json").read_text())["test"]
        again = as_json(capsys, "evaluate", str(run), "--device", "cpu", "--precision", "fp32")
        assert {k: again[k] for k in own} == own
        printed(capsys, "evaluate", str(run), "--device", "cpu")


def test_other_tables_are_read_in_the_order_of_the_network(labels_run, numbers_run, tables, capsys):
    bits = as_json(
        capsys, "evaluate", str(labels_run), str(tables / "bits.csv"), "--split", "test", "--precision", "fp32"
    )
    own = json.loads((labels_run / "result.json").read_text())["test"]
    assert bits["mean_average_precision"] == pytest.approx(own["mean_average_precision"])
    with open(tables / "numbers.csv") as file:
        rows = [{"area": row["area"], "width": row["width"], "file": row["file"]} for row in csv.DictReader(file)]
    with open(tables / "turned.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ["area", "width", "file"])
        writer.writeheader()
        writer.writerows(rows)
    found = as_json(capsys, "evaluate", str(numbers_run), str(tables / "turned.csv"))
    assert [one["name"] for one in found["per_number"]] == ["width", "area"]
    assert found["r2"] > 0.5
    _, err = printed(capsys, "evaluate", str(numbers_run), str(tables / "labels.csv"), code=2)
    assert "--task numbers" in err or "finite numbers" in err


def test_numbers_are_learned_in_their_own_units(numbers_run, tables, capsys, monkeypatch):
    monkeypatch.chdir(tables)
    result = json.loads((numbers_run / "result.json").read_text())
    assert result["test_r2"] > 0.5
    dataset = load("numbers.csv", tasks=ALL)
    assert dataset.classes == ("width", "area")
    predictor = vitral.load(numbers_run, device="cpu", precision="fp32")
    test = dataset["test"]
    predicted = np.stack([predictor(test.image(i, 3)).values for i in range(len(test))])
    assert sk.r2_score(test.labels, predicted) == pytest.approx(result["test_r2"], abs=1e-4)
    weights = native.read(numbers_run / "model.safetensors")
    assert 2000 < weights.output["mean"][1] < 6000
    plain = as_json(capsys, "predict", str(numbers_run), "p/1.png")
    assert list(plain["predictions"][0]["numbers"]) == ["width", "area"]
    printed(capsys, "predict", str(numbers_run), "p", "--out", "numbers-out.csv")
    with open("numbers-out.csv") as file:
        assert list(next(csv.DictReader(file))) == ["path", "width", "area", "error"]
    page = (numbers_run / "report.html").read_text()
    for part in ("residuals", "Largest errors", "R²", "the columns width, area hold numbers"):
        assert part in page


def test_a_label_and_a_number_are_explained_by_name(labels_run, numbers_run, tables, capsys, monkeypatch):
    monkeypatch.chdir(tables)
    both = as_json(capsys, "explain", str(labels_run), "p/1.png", "--target", "red", "blue", "--out", "one.png")
    assert [one["label"] for one in both["explanations"]][:2] == ["red", "blue"]
    out, _ = printed(capsys, "explain", str(numbers_run), "p/1.png", "--target", "area", "--out", "two.png")
    assert "%" not in out
    _, err = printed(capsys, "explain", str(numbers_run), "p/1.png", "--out", "three.png", code=2)
    assert "--target width" in err


@pytest.mark.parametrize(("table", "task"), [("labels", "labels"), ("numbers", "numbers")])
def test_a_stopped_run_resumes_to_the_same_bits(table, task, tables, tmp_path, monkeypatch):
    options = {"epochs": 3, "mixup": 0.2 if task == "labels" else 0.0, "crop": "shift", "ema": 0.9}
    whole = train(tables / f"{table}.csv", tmp_path / "whole", **options).folder
    with monkeypatch.context() as patch:
        call_at_batch(patch, 13, stop)
        with pytest.raises(Interrupted):
            train(tables / f"{table}.csv", tmp_path / "stopped", **options)
    stopped = vitral.train(out=str(tmp_path / "stopped"), resume=True, quiet=True).folder
    assert same_bits(weights_of(whole), weights_of(stopped))
    assert recorded(whole) == recorded(stopped)
    saved = [native.read(run / "model.safetensors").output for run in (whole, stopped)]
    assert saved[0] == saved[1]
    assert saved[0]["task"] == task


def stop() -> None:
    raise KeyboardInterrupt


REFUSED = {
    "train numbers.csv --mixup 0.1": "--task numbers does not support --mixup",
    "train numbers.csv --label-smoothing 0.1": "--task numbers does not support --label-smoothing",
    "train labels.csv --sampling balanced": "--task labels does not support --sampling",
    "train labels.csv --loss huber": "--task labels does not support --loss",
    "train labels.csv --recipe linear-probe": "--recipe linear-probe does not support --task labels",
    "train digits --task labels": "--task labels needs a table",
    "train digits --loss huber": "--task class does not support --loss",
    "pretrain labels.csv --task labels": "unknown option",
    "study data labels.csv --models S/16": "a study needs one class per image",
    "data check labels.csv": "data of --task labels",
    "convert RUN out --to timm": "cannot be written for timm",
    "evaluate RUN --tta mirror": "averaging views supports networks of one class",
    "evaluate RUN --knn 3": "evaluate --knn supports networks of one class",
    "export RUN --to web": "a web page supports networks of one class",
    "export RUN --to onnx --precision int8": "a proof of int8 supports networks of one class",
    "export RUN --to onnx --with-preprocessing": "preprocessing in the graph supports networks of one class",
    "quantize RUN": "vitral quantize supports networks of one class",
    "compare RUN OTHER": "vitral compare supports networks of one class",
    "explain RUN p/1.png --check": "a check of faithfulness supports",
    "replay RUN --step 1": "only runs of one class per image can be replayed",
    "push RUN me/x --license mit --dry-run --out pushed": "vitral push supports networks of one class",
}
"""Command → what its error names."""


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_task_cannot_do_is_refused_by_name(words, labels_run, numbers_run, tables, capsys, monkeypatch):
    monkeypatch.chdir(tables)
    typed = shlex.split(words.replace("RUN", str(labels_run)).replace("OTHER", str(numbers_run)))
    _, err = printed(capsys, *typed, *(["--out", "new"] if typed[0] == "train" else []), code=2)
    assert REFUSED[words] in err
    assert "try: " in err


def test_a_constant_number_is_refused(tables, tmp_path):
    path = write(tmp_path / "t.csv", ["file", "age", "same"], [(f"{tables}/p/{n}.png", n + 0.5, 7.5) for n in range(9)])
    with pytest.raises(vitral.VitralError, match="nothing to learn in same"):
        train(path, tmp_path / "run")


def test_weights_start_other_tasks_with_a_new_head(labels_run, tables, tmp_path):
    kept = train(tables / "labels.csv", tmp_path / "kept", init=str(labels_run), epochs=1, **UNSET)
    assert "left out" not in (kept.folder / "config.json").read_text().split('"init"')[0]
    new = train(tables / "numbers.csv", tmp_path / "new", init=str(labels_run), epochs=1, **UNSET)
    assert native.read(new.folder / "model.safetensors").output["task"] == "numbers"


UNSET = dict.fromkeys(("model", "dim", "depth", "heads", "mlp_dim", "image_size", "drop_path"))


def test_an_unknown_task_of_weights_is_refused(labels_run, tmp_path):
    with pytest.raises(UsageError, match="unknown task 'captions'"):
        output_of(("a",), {"task": "captions"})
    weights = native.read(labels_run / "model.safetensors")
    broken = {"task": "labels", "thresholds": [0.5]}
    native.save(tmp_path / "m.safetensors", native.Weights(**{**vars(weights), "output": broken}))
    with pytest.raises(vitral.VitralError, match="damaged header"):
        vitral.load(tmp_path / "m.safetensors")


def test_forced_tasks_are_kept_by_the_run(tables, tmp_path, capsys):
    rows = [(f"{tables}/p/{n}.png", ("red|blue", "red")[n % 2]) for n in range(20)]
    path = write(tmp_path / "pairs.csv", ["file", "labels"], rows)
    run = train(path, tmp_path / "run", task="class", epochs=1)
    assert (run.result["classes"], "val_accuracy" in run.result) == (2, True)
    printed(capsys, "evaluate", str(run.folder), "--device", "cpu")
    assert train(path, tmp_path / "several", epochs=1).result["val"]["task"] == "labels"
