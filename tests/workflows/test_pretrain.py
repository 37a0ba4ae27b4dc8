"""Pretraining from images to weights: runs, resuming, use of the weights, refusals."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import MakeImages
from running import TINY, call_at_batch, in_child, mostly_slow, printed, recorded, same_bits, weights_of, write_teacher
from vitral.data.sources.unlabeled import NOT_HELD_OUT, UNLABELED, load_images
from vitral.errors import DataError, Interrupted, TrainingError, UsageError
from vitral.evaluation.intervals import wilson_interval
from vitral.pretraining import monitor
from vitral.pretraining.methods import METHODS, needs_teacher
from vitral.recipes.pretrain import UNSUPPORTED_BY
from vitral.recipes.table import RECIPES
from vitral.weights import native
from vitral.weights.files import read_tensors
from vitral.workflows.running import pretraining, pretraining_page
from vitral.workflows.running.pretraining_samples import DRAWINGS

OPTIONS: dict[str, Any] = {k: v for k, v in TINY.items() if k != "ema"} | {"pool": "mean", "position": "learned"}
SHAPE = ("model", "dim", "depth", "heads", "mlp_dim")
SMALL: dict[str, dict[str, Any]] = {
    "mae": {"decoder_dim": 8, "decoder_depth": 1},
    "dino": {"prototypes": 16, "local_crops": 2, "pool": "cls", "ibot": 0.5, "koleo": 0.1},
    "distill": {"teacher_views": 2},
}
"""Options of a method that make it small."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random images have no features to learn, and a report takes longer than a run."""
    ignore_collapse(monkeypatch)


def ignore_collapse(monkeypatch: pytest.MonkeyPatch, page: bool = False) -> None:
    monkeypatch.setattr(monitor, "LEAST_SPREAD", 0.0)
    monkeypatch.setattr(monitor, "LEAST_RANK", 0.0)
    monkeypatch.setattr(pretraining_page, "write_report", write_report if page else lambda running, result, cells: None)


write_report = pretraining_page.write_report


def pretrain(data: object, out: Path, method: str = "mae", **options: Any) -> vitral.TrainedRun:
    taught = {"teacher": str(write_teacher(out.parent))} if needs_teacher(method) else {}
    given = {**OPTIONS, **SMALL.get(method, {}), **taught, **options}
    given = {name: value for name, value in given.items() if name not in UNSUPPORTED_BY[method]}
    return vitral.pretrain(str(data), method, out=str(out), quiet=True, **given)


@pytest.mark.parametrize("method", list(METHODS))
def test_a_run_learns_and_reports(photos, tmp_path, method):
    run = pretrain(photos, tmp_path / "run", method, epochs=12, val_fraction=0.2, lr=1e-2)
    history = recorded(run.folder)
    assert history[-1]["train_loss"] < history[0]["train_loss"]
    assert {"feature_rank", "feature_spread", "knn_accuracy", "probe_accuracy"} <= history[0].keys()
    assert run.result["method"] == method
    assert run.result["knn_accuracy"] == history[-1]["knn_accuracy"]
    assert run.result["images"] == {"train": 16, "val": 4}
    assert (run.folder / "samples.png").is_file()
    assert not any(name.startswith(("decoder", "encoder", "colors", "project")) for name in weights_of(run.folder))


@pytest.mark.parametrize("method", mostly_slow(reversed(METHODS), 3))
def test_stopped_and_resumed_exactly(photos, tmp_path, monkeypatch, method):
    options = {"drop_path": 0.2, "crop": "shift", "flip": True}
    whole = pretrain(photos, tmp_path / "whole", method, **options)
    call_at_batch(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted) as stopped:
        pretrain(photos, tmp_path / "cut", method, **options)
    assert shlex.split(stopped.value.command) == ["vitral", "pretrain", "--out", str(tmp_path / "cut"), "--resume"]
    monkeypatch.undo()
    ignore_collapse(monkeypatch)
    again = vitral.pretrain(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert_same(whole, again)


def test_a_stem_is_continued_without_masks(photos, tmp_path, monkeypatch):
    """Statistics of its batch norms are those of the teacher, which is kept, and are resumed."""
    first = pretrain(photos, tmp_path / "first", "dino", model="C+mu/4", ibot=0.0)
    options = {"ibot": 0.0, "init": str(first.folder), **dict.fromkeys(SHAPE)}
    whole = pretrain(photos, tmp_path / "whole", "dino", **options)
    before, after = (weights_of(run.folder) for run in (first, whole))
    statistics = [name for name in after if name.endswith(("running_mean", "running_var"))]
    assert statistics
    assert not any(torch.equal(before[name], after[name]) for name in statistics)
    call_at_batch(monkeypatch, 6, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        pretrain(photos, tmp_path / "cut", "dino", **options)
    monkeypatch.undo()
    ignore_collapse(monkeypatch)
    assert_same(whole, vitral.pretrain(out=str(tmp_path / "cut"), resume=True, quiet=True))


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("method", list(METHODS))
def test_killed_and_resumed_exactly(photos, tmp_path, monkeypatch, method):
    whole = pretrain(photos, tmp_path / "whole", method, accumulate=2, batch_size=2)
    call_at_batch(monkeypatch, 13, lambda: os.kill(os.getpid(), signal.SIGKILL))
    out = tmp_path / "cut"
    assert in_child(lambda: pretrain(photos, out, method, accumulate=2, batch_size=2) and 0) == -signal.SIGKILL
    monkeypatch.undo()
    ignore_collapse(monkeypatch)
    assert_same(whole, vitral.pretrain(out=str(out), resume=True, quiet=True))


def assert_same(whole: vitral.TrainedRun, again: vitral.TrainedRun) -> None:
    """Weights, optimizer, all parts of the method, and metrics are the same, bit by bit."""
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))
    last = [read_tensors(run.folder / "checkpoints/last.safetensors")[0] for run in (whole, again)]
    assert same_bits(*last)
    assert recorded(whole.folder) == recorded(again.folder)


@pytest.mark.report
@pytest.mark.parametrize("archive", [False, True])
def test_images_without_class_folders(make_images: MakeImages, tmp_path, monkeypatch, archive):
    ignore_collapse(monkeypatch, page=True)
    folder = make_images({".": 6, "more/inside": 6})
    (folder / "notes.txt").write_text("x")
    data = folder
    if archive:
        data = tmp_path / "images.tar"
        with tarfile.open(data, "w") as file:
            file.add(folder, "images")
    dataset = load_images(data)
    assert dataset.classes == (UNLABELED,)
    assert len(dataset["train"]) == 12
    run = pretrain(data, tmp_path / "run")
    assert run.result["images"] == {"train": 12}
    assert "knn_accuracy" not in run.result
    assert "There are no labels" in (run.folder / "report.html").read_text("utf-8")


@pytest.mark.parametrize("options", [{}, {"val_fraction": 0.2}])
def test_file_names_read_as_classes_of_one_image_are_no_labels(make_images: MakeImages, tmp_path, options):
    folder = make_images({".": 10})
    for number, path in enumerate(sorted(folder.glob("*.png"))):
        path.rename(folder / f"n{number:08}_thing_{'abcdefghij'[number]}.png")
    run = pretrain(folder, tmp_path / "run", **options)
    assert run.result["images"] == ({"train": 8, "val": 2} if options else {"train": 10})
    assert "knn_accuracy" not in run.result
    plan = {row["name"]: row for row in json.loads((run.folder / "config.json").read_text())["plan"]}
    assert NOT_HELD_OUT in plan["data"]["reason"]
    assert vitral.pretrain(out=str(run.folder), resume=True, quiet=True).result == run.result


def test_labels_do_not_change_the_weights(photos, make_images, tmp_path):
    """The same images in one folder, in the same order."""
    flat = tmp_path / "flat"
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        flat.mkdir(exist_ok=True)
        shutil.copy(path, flat / f"{number:02}.png")
    a = pretrain(photos, tmp_path / "a", val_fraction=0.0)
    b = pretrain(flat, tmp_path / "b")
    assert same_bits(weights_of(a.folder), weights_of(b.folder))


@pytest.mark.parametrize("method", mostly_slow(METHODS, 3))
def test_the_weights_are_ordinary(photos, tmp_path, capsys, method):
    run = pretrain(photos, tmp_path / "run", method)
    weights = native.read(run.folder / "model.safetensors")
    assert weights.classes == ()
    assert weights.config.classes == 0
    image = str(next(photos.rglob("*.png")))
    tuned = {**TINY, "val_fraction": 0.2, "out": str(tmp_path / "tuned"), "quiet": True, "epochs": 1}
    for name in SHAPE:
        del tuned[name]
    fine = vitral.train(str(photos), init=str(run.folder), recipe="finetune", **tuned)
    assert fine.result["classes"] == 2
    printed(capsys, "embed", str(run.folder), image, "--out", str(tmp_path / "f.npz"))
    assert np.load(tmp_path / "f.npz")["features"].shape == (1, 8)
    printed(capsys, "summary", str(run.folder))
    printed(capsys, "inspect", str(run.folder), "--out", str(tmp_path / "page"))
    printed(capsys, "convert", str(run.folder), str(tmp_path / "timm.safetensors"), "--to", "timm")
    back = vitral.load(str(tmp_path / "timm.safetensors"), image_size=8, device="cpu", precision="fp32")
    own = vitral.load(str(run.folder), device="cpu", precision="fp32")
    assert np.allclose(back.embed([image]), own.embed([image]), atol=1e-5)


def test_pretraining_goes_on_from_weights(photos, trained, tmp_path):
    first = pretrain(photos, tmp_path / "first")
    given = {
        k: v for k, v in OPTIONS.items() if k not in ("model", "dim", "depth", "heads", "mlp_dim", "pool", "position")
    }
    again = vitral.pretrain(str(photos), "mpp", init=str(first.folder), out=str(tmp_path / "b"), quiet=True, **given)
    assert again.result["method"] == "mpp"
    head_gone = vitral.pretrain(
        str(photos),
        init=str(trained.folder),
        out=str(tmp_path / "c"),
        quiet=True,
        **{**given, "channels": 1, "image_size": (8, 12)},
    )
    assert native.read(head_gone.folder / "model.safetensors").classes == ()


def test_minutes_are_planned(photos, tmp_path):
    given = {k: v for k, v in OPTIONS.items() if k != "epochs"}
    run = vitral.pretrain(str(photos), "mae", out=str(tmp_path / "run"), quiet=True, minutes=0.01, **given)
    plan = {row["name"]: row for row in json.loads((run.folder / "config.json").read_text())["plan"]}
    assert "measured over a few steps" in plan["epochs"]["reason"]
    assert run.result["epochs"] == int(plan["epochs"]["value"])


def test_collapse_stops_the_run_with_advice(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(monitor, "LEAST_RANK", 1e9)
    with pytest.raises(TrainingError, match="collapsed") as refused:
        pretrain(photos, tmp_path / "run")
    assert "--lr" in str(refused.value.hint)


@pytest.mark.report
@pytest.mark.parametrize("method", list(METHODS))
@pytest.mark.parametrize("channels", [1, 3])
def test_samples_show_each_image_three_times(photos, tmp_path, monkeypatch, method, channels):
    ignore_collapse(monkeypatch, page=True)
    run = pretrain(photos, tmp_path / "run", method, val_fraction=0.2, channels=channels, epochs=2)
    with Image.open(run.folder / pretraining.SHEET) as sheet:
        size = sheet.size
    assert size == (6 * 212 + 12, 2 * (200 + 12 + 16) + 12)
    page = (run.folder / "report.html").read_text("utf-8")
    assert page.count("<li><figure>") == 12
    assert pretraining_page.EXPLAINED[method].split(".")[0] in page
    assert f"vitral pretrain {photos} --method {method}" in page
    assert "linear probe" in page
    assert not vitral.verify(run.folder).damaged


def test_samples_are_drawn_during_a_run(photos, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pretraining, "_EVERY", -1.0)
    monkeypatch.setattr(pretraining, "contact_sheet", lambda cells, path: drawn.append(len(cells)))
    pretrain(photos, tmp_path / "run", epochs=3)
    assert drawn == [6] * 4


def test_drawing_changes_nothing(photos, tmp_path, monkeypatch):
    a = pretrain(photos, tmp_path / "a", dropout=0.1)
    monkeypatch.setattr(pretraining, "_EVERY", -1.0)
    b = pretrain(photos, tmp_path / "b", dropout=0.1)
    assert same_bits(weights_of(a.folder), weights_of(b.folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "moco"}, "unknown method"),
        ({"model": "C+mu/4"}, "cannot be pretrained by mae"),
        ({"model": "C+mu/4", "method": "mpp"}, "cannot be pretrained by mpp"),
        ({"model": "C+mu/4", "method": "dino", "ibot": 1.0}, "cannot be pretrained by iBOT"),
        ({"model": "BiT-R50x1", "pool": None, "position": None}, "cannot be pretrained"),
        ({"pool": "map"}, "cannot be pretrained"),
        ({"image_size": 4}, "too few patches"),
        ({"mixup": 0.2}, "--mixup"),
        ({"method": "distill"}, "--method distill needs a --teacher"),
        ({"method": "distill", "teacher": "backbone", "mask": 0.5}, "--method distill does not support --mask"),
        ({"teacher": "backbone"}, "--method mae does not support --teacher"),
        ({"mask": 1.0}, "--mask must be"),
        ({"recipe": "mae"}, "unknown option 'recipe'(.|\n)*method"),
    ],
)
def test_refusals(photos, tmp_path, options, message):
    unsupported = UNSUPPORTED_BY.get(options.get("method", "mae"), ())
    given = {**{name: value for name, value in OPTIONS.items() if name not in unsupported}, **options}
    if options.get("model", "").startswith("BiT"):
        given = {k: v for k, v in given.items() if k == "model" or k not in (*SHAPE, "drop_path")}
    with pytest.raises(UsageError, match=message):
        vitral.pretrain(str(photos), out=str(tmp_path / "run"), quiet=True, **given)
    assert not (tmp_path / "run").exists()


def test_options_of_pretraining_are_refused_in_training(photos, tmp_path):
    with pytest.raises(UsageError, match="--mask is for vitral pretrain"):
        vitral.train(str(photos), mask=0.5, out=str(tmp_path / "run"))


def test_the_default_folder_is_not_that_of_training(photos, tmp_path, monkeypatch):
    """It is found again to resume, without the method, and for images without labels."""
    flat = tmp_path / "flat"
    flat.mkdir()
    for image in sorted(photos.rglob("*.png")):
        shutil.copy(image, flat / f"{image.parent.name}-{image.name}")
    monkeypatch.chdir(tmp_path)
    given = {**OPTIONS, **SMALL["mae"], "epochs": 1}
    run = vitral.pretrain(str(flat), quiet=True, **given)
    assert run.folder == Path("runs/flat-pretrain")
    assert vitral.pretrain(str(flat), resume=True, quiet=True).result == run.result


def test_a_folder_without_images_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no files"):
        pretrain(tmp_path / "empty", tmp_path / "run")


def test_every_method_has_a_recipe_and_advice():
    assert set(METHODS) <= set(RECIPES)
    assert set(METHODS) == set(pretraining.ADVICE) == set(pretraining_page.EXPLAINED) == set(DRAWINGS)


@pytest.mark.report
def test_the_command(photos, tmp_path, capsys, monkeypatch):
    ignore_collapse(monkeypatch, page=True)
    words = ["--model", "mu/4", "--image-size", "8", "--epochs", "1", "--device", "cpu", "--precision", "fp32"]
    _, message = printed(capsys, "pretrain", str(photos), "--method", "mpp", *words, "--out", str(tmp_path / "run"))
    assert "predict the mean color" in message
    assert "k nearest neighbors: accuracy " in message
    shown = [line.split(": ")[1] for line in message.splitlines() if line.startswith(("k nearest", "linear probe:"))]
    result = json.loads((tmp_path / "run/result.json").read_text())
    for line, name in zip(shown, ("knn_accuracy", "probe_accuracy"), strict=True):
        low, high = wilson_interval(round(2 * result[name]), 2)
        interval = f"(95% interval {low:.1%} to {high:.1%})"
        assert line == f"accuracy {result[name]:.2%} {interval} on 2 validation images, not used in training"
    assert f"Report   {tmp_path / 'run/report.html'}" in message
    assert not [line for line in message.splitlines() if line.startswith("epoch") and "best" in line]
    assert "vitral train LABELED --init" in message
    shown, _ = printed(capsys, "pretrain", "--help-all")
    assert "--method" in shown
    assert "--mask" in shown
    assert not {"--recipe", "--mixup"} & set(shown.split())
