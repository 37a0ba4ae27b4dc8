"""Test training: the run folder, the saved weights, and the state after failures."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vitral
from images import MakeImages, noise
from running import TINY, same_bits, weights_of
from vitral.data import load
from vitral.data.options import OWN_DATA
from vitral.errors import DataError, Interrupted, RunError, TrainingError, UsageError, WeightsError, WriteError
from vitral.inference.options import InferenceOptions
from vitral.training.callbacks import Callback
from vitral.training.options import Run
from vitral.training.run_folder import RunFolder
from vitral.weights import files, native
from vitral.workflows.evaluate import evaluate_images
from vitral.workflows.planning import network as plan_network
from vitral.workflows.planning import plan as planning
from vitral.workflows.running import execute, saving


def train(data: object, out: Path, **options: Any) -> vitral.TrainedRun:
    return vitral.train(str(data), out=str(out), quiet=True, **{**TINY, **options})


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def test_the_run_folder(trained):
    folder = trained.folder
    assert sorted(os.listdir(folder)) == [
        "checkpoints",
        "config.json",
        "held-out.jsonl",
        "manifest.json",
        "metrics.jsonl",
        "model.safetensors",
        "report.html",
        "result.json",
    ]
    assert os.listdir(folder / "checkpoints") == ["last.safetensors"]
    history = lines(folder)
    assert [line["epoch"] for line in history] == [1, 2, 3, 4, 5, 6]
    for line in history:
        assert set(line) == {
            "epoch",
            "step",
            "images_seen",
            "train_loss",
            "train_accuracy",
            "val_loss",
            "val_accuracy",
            "lr",
            "gradient_norm",
            "images_per_second",
            "waited",
            "seconds",
        }
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert set(config) == {"command", "run", "plan", "paths", "versions", "data"}
    assert vitral.Run.from_json(config["run"]).epochs == 6
    assert all(choice["reason"] for choice in config["plan"])


def test_the_result(trained):
    result = json.loads((trained.folder / "result.json").read_text("utf-8"))
    assert result == json.loads(json.dumps(dict(trained.result)))
    assert set(result) == {
        "model",
        "data",
        "parameters",
        "classes",
        "images",
        "best_epoch",
        "keep",
        "epochs",
        "seconds",
        "images_per_second",
        "device",
        "precision",
        "seed",
        "command",
        "versions",
        "val_accuracy",
        "val",
        "test_accuracy",
        "test",
    }
    assert {"vitral", "torch", "torchvision", "python"} <= set(result["versions"])
    assert result["images"] == {"train": 24, "val": 8, "test": 12}
    assert result["val_accuracy"] == max(line["val_accuracy"] for line in lines(trained.folder))
    assert result["best_epoch"] in (1, 2, 3, 4, 5, 6)
    assert result["test_accuracy"] == result["test"]["accuracy"] > 0.8  # day and night are reported apart
    assert result["parameters"] == sum(w.numel() for w in weights_of(trained.folder).values())
    assert result["command"].startswith("vitral train ")


def test_the_command_repeats_the_run(trained, tmp_path):
    from shlex import split

    from vitral.cli.main import main

    words = split(trained.result["command"])[1:]
    words[words.index("--out") + 1] = str(tmp_path / "again")
    assert main([*words, "--quiet"]) == 0
    assert same_bits(weights_of(trained.folder), weights_of(tmp_path / "again"))


def test_best_weights_are_kept_and_last_ones_too(make_images: MakeImages, tmp_path, monkeypatch):
    """With fixed accuracies the second epoch is best; its weights are kept while the state has those of the third."""
    scores = iter([0.4, 0.9, 0.1])
    monkeypatch.setattr(execute, "_validate", lambda model, running: {"val_loss": 1.0, "val_accuracy": next(scores)})
    seen = {}
    original = saving.Saving.__call__

    def save(saving: Any, state: Any, best: bool, must: bool) -> None:
        original(saving, state, best, must)
        seen[state.epoch] = {k: v.clone() for k, v in state.model.state_dict().items()}

    monkeypatch.setattr(saving.Saving, "__call__", save)
    run = train(make_images({"a": 10, "b": 10}), tmp_path / "run")
    assert run.result["best_epoch"] == 2
    assert same_bits(weights_of(run.folder), seen[2])
    last = files.read_tensors(run.folder / "checkpoints/last.safetensors")[0]
    assert same_bits({k.removeprefix("model."): v for k, v in last.items() if k.startswith("model.")}, seen[3])
    trained = native.read(run.folder / "model.safetensors").trained
    assert (trained["epoch"], trained["val_accuracy"], trained["model"]) == (2, 0.9, "mu/4")


@pytest.mark.parametrize(("share", "times"), [(1e9, 6), (1e-9, 2)])
def test_saving_takes_a_share_of_the_time(make_images: MakeImages, tmp_path, monkeypatch, share, times):
    """Short epochs are not all saved, but the final files are the same: the fourth epoch was best."""
    scores = iter([0.4, 0.9, 0.1, 0.95, 0.2, 0.3])
    monkeypatch.setattr(execute, "_validate", lambda model, running: {"val_loss": 1.0, "val_accuracy": next(scores)})
    monkeypatch.setattr(saving, "SAVING_SHARE", share)
    saved, seen, fitted = [], {}, saving.Saving.__call__
    original = execute.State.save

    def save(state: Any, *about: Any) -> None:
        saved.append(state.epoch)
        original(state, *about)

    def looked(saving: Any, state: Any, best: bool, must: bool) -> None:
        fitted(saving, state, best, must)
        seen[state.epoch] = {k: v.clone() for k, v in state.model.state_dict().items()}

    monkeypatch.setattr(execute.State, "save", save)
    monkeypatch.setattr(saving.Saving, "__call__", looked)
    run = train(make_images({"a": 10, "b": 10}), tmp_path / "run", epochs=6)
    assert len(saved) == times
    assert saved[-1] == 6
    assert same_bits(weights_of(run.folder), seen[4])
    assert native.read(run.folder / "model.safetensors").trained["epoch"] == 4
    assert (run.folder / "metrics.jsonl").read_text().count("\n") == 6


def test_the_best_weights_survive_a_failing_epoch(make_images, tmp_path, monkeypatch):
    """They were kept in memory, and the state is no longer worth saving."""
    monkeypatch.setattr(saving, "SAVING_SHARE", 1e-9)
    scores = iter([0.4, 0.9])

    def validate(model: Any, running: Any) -> dict[str, float]:
        if running.state.epoch == 2:
            raise TrainingError("weights are no longer finite")
        return {"val_loss": 1.0, "val_accuracy": next(scores)}

    monkeypatch.setattr(execute, "_validate", validate)
    with pytest.raises(TrainingError):
        train(make_images({"a": 10, "b": 10}), tmp_path / "run")
    assert native.read(tmp_path / "run/model.safetensors").trained["val_accuracy"] == 0.9


def test_averaged_weights_are_saved(make_images, tmp_path):
    run = train(make_images({"a": 10, "b": 10}), tmp_path / "run", ema=0.9, val_fraction=0.0)
    last = files.read_tensors(run.folder / "checkpoints/last.safetensors")[0]
    average = {k.removeprefix("averaged.module."): v for k, v in last.items() if k.startswith("averaged.module.")}
    assert same_bits(weights_of(run.folder), average)


@pytest.mark.report
def test_without_validation_and_test(make_images, tmp_path):
    run = train(make_images({"a": 4, "b": 4}), tmp_path / "run", val_fraction=0.0)
    assert not {"val", "val_accuracy", "test"} & run.result.keys()
    assert set(lines(run.folder)[0]) & {"val_loss", "val_accuracy"} == set()
    assert run.result["best_epoch"] == 3
    assert "Augmented training images" in (run.folder / "report.html").read_text("utf-8")


@pytest.mark.report
@pytest.mark.parametrize(
    ("options", "keep"),
    [({}, "last"), ({"ema": 0.0}, "best"), ({"keep": "best"}, "best"), ({"early_stop": 5}, "best")],
)
def test_few_validation_images_choose_no_epoch(make_images, tmp_path, monkeypatch, options, keep):
    """The averaged weights of the last one are kept, unless the user says otherwise."""
    monkeypatch.setattr(
        execute,
        "_validate",
        lambda model, running: (
            {"val_loss": 1.0, "val_accuracy": 0.0} if running.state.epoch else {"val_loss": 0.5, "val_accuracy": 0.5}
        ),
    )
    run = train(make_images({"a": 8, "b": 8}), tmp_path / "run", **{"ema": 0.5, **options})
    assert run.result["keep"] == keep
    assert run.result["best_epoch"] == (3 if keep == "last" else 1)
    reasons = {one.name: one.reason for one in RunFolder(run.folder).read_plan().choices}
    assert ("too few to choose the best epoch" in reasons.get("keep", "")) == (keep == "last")
    page = (run.folder / "report.html").read_text("utf-8")
    for text, there in (
        ("The weights of the last epoch were kept", keep == "last"),
        ("The best epoch is in bold", keep == "best"),
        ("The weights were selected on these images", keep == "best"),
    ):
        assert (text in page) == there
    notes = evaluate_images(run.folder, OWN_DATA, InferenceOptions("cpu", "fp32")).notes
    assert any("were selected on these" in note for note in notes) == (keep == "best")


def test_many_validation_images_choose_the_epoch(make_images, tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "TO_CHOOSE_AN_EPOCH", 2)
    run = train(make_images({"a": 8, "b": 8}), tmp_path / "run", ema=0.5)
    assert run.result["keep"] == "best"


def test_early_stopping_ends_the_run(make_images, tmp_path, monkeypatch):
    monkeypatch.setattr(
        execute,
        "_validate",
        lambda model, running: (
            {"val_loss": 1.0, "val_accuracy": 0.0} if running.state.epoch else {"val_loss": 0.5, "val_accuracy": 0.5}
        ),
    )
    run = train(make_images({"a": 4, "b": 4}), tmp_path / "run", epochs=9, early_stop=2)
    assert (run.result["epochs"], run.result["best_epoch"]) == (3, 1)
    assert len(lines(run.folder)) == 3


def test_frozen_norms_keep_their_statistics(make_images, tmp_path):
    """A frozen stem computes by its running statistics, and they do not move."""
    photos = make_images({"a": 8, "b": 8})
    first = train(photos, tmp_path / "first", model="C+mu/4", whiten=False)
    options = {"init": str(first.folder), "model": "C+mu/4", "freeze": ("patch_embed",), "epochs": 2}
    frozen = train(photos, tmp_path / "frozen", **options)
    before, after = weights_of(first.folder), weights_of(frozen.folder)
    stem = [name for name in before if name.startswith("patch_embed.")]
    assert any(name.endswith("running_var") for name in stem)
    assert same_bits({name: before[name] for name in stem}, {name: after[name] for name in stem})
    assert not torch.equal(before["blocks.0.attn.qkv.weight"], after["blocks.0.attn.qkv.weight"])


def test_balanced_class_weights_with_label_smoothing_learn_both_classes(tmp_path):
    """30 times as many images of one class: torch's own weighting of smoothed labels predicts the rare one only."""
    from PIL import Image

    for label, count, level in (("common", 300, 60), ("rare", 10, 190)):
        for split, images in (("train", count), ("val", 20)):
            (tmp_path / "photos" / split / label).mkdir(parents=True)
            for number in range(images):
                pixels = (level + noise(number, (8, 8), 1) // 8).astype("uint8")
                Image.fromarray(pixels).save(tmp_path / "photos" / split / label / f"{number}.png")
    run = train(tmp_path / "photos", tmp_path / "run", class_weights="balanced", label_smoothing=0.1, batch_size=32)
    assert run.result["val"]["accuracy"] == 1.0


def test_classes_without_training_images_are_in_the_plan(make_images):
    data = make_images({"a": 60, "b": 2, "c": 2})
    options = {"data": str(data), "model": "mu/4", "image_size": 8, "train_share": 0.05}
    (line,) = [one for one in planning.plan_run(options).plan.choices if one.name == "classes"]
    assert line.value == "WARNING: 2 of 3 without images"
    assert line.reason == "no training image of b, c: use a larger --train-share, or add --stratified"
    whole = planning.plan_run({**options, "train_share": 1.0}).plan.choices
    assert "classes" not in {one.name for one in whole}


def test_torch_generators_are_left_as_they_were(make_images, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    train(make_images({"a": 4, "b": 4}), tmp_path / "run", epochs=1)
    assert torch.equal(torch.rand(4), expected)


def test_two_trainings_in_threads_of_one_process_are_refused(make_images, tmp_path):
    photos, errors = make_images({"a": 4, "b": 4}), []

    class Second(Callback):
        def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
            thread = threading.Thread(target=self.other)
            thread.start()
            thread.join()

        def other(self) -> None:
            with pytest.raises(UsageError, match="another training runs in this process") as caught:
                train(photos, tmp_path / "second", epochs=1)
            errors.append(caught.value)

    train(photos, tmp_path / "first", epochs=1, callbacks=[Second()])
    assert len(errors) == 1
    train(photos, tmp_path / "second", epochs=1)


@pytest.mark.parametrize("file", ["model.safetensors", "last.safetensors"])
def test_a_full_disk_leaves_the_last_good_state(make_images, tmp_path, monkeypatch, file):
    photos, out = make_images({"a": 10, "b": 10}), tmp_path / "run"
    original, count = files.save_file, iter(range(99))

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if file in path.name and next(count) == 1:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(tensors, path, metadata)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(WriteError, match="No space left on device") as caught:
        train(photos, out, val_fraction=0.0)
    message = str(caught.value)
    assert file in message
    assert len(message.splitlines()) <= 5
    assert caught.value.exit_code == 2
    monkeypatch.undo()
    assert not list(out.rglob("*.tmp"))
    assert files.read_tensors(out / "checkpoints/last.safetensors")[1]["epoch"] == 1
    native.read(out / "model.safetensors")
    resumed = vitral.train(out=str(out), resume=True, quiet=True)
    whole = train(photos, tmp_path / "whole", val_fraction=0.0)
    assert same_bits(weights_of(resumed.folder), weights_of(whole.folder))


def test_cpu_contention_is_reported_for_new_runs_only(make_images, tmp_path, monkeypatch, capsys):
    """A resumed run is bit-identical only with the same number of threads."""
    photos, out = make_images({"a": 10, "b": 10}), tmp_path / "run"
    monkeypatch.setattr(execute, "cpu_contention", lambda others: "others are busy")
    options = {**TINY, "epochs": 2, "device": "cpu"}
    save = saving.Saving.__call__

    def interrupted(saving: Any, *about: Any) -> None:
        save(saving, *about)
        raise KeyboardInterrupt

    monkeypatch.setattr(saving.Saving, "__call__", interrupted)

    with pytest.raises(Interrupted):
        vitral.train(str(photos), out=str(out), **options)
    assert capsys.readouterr().err.count("others are busy") == 1
    monkeypatch.setattr(saving.Saving, "__call__", save)
    vitral.train(out=str(out), resume=True)
    assert "others are busy" not in capsys.readouterr().err


def test_a_rate_far_too_high_stops_with_finite_weights(make_images, tmp_path):
    out = tmp_path / "run"
    with pytest.raises(TrainingError) as caught:
        train(make_images({"a": 10, "b": 10}), out, lr=1000.0, clip=0.0, optimizer="sgd", warmup=0.0)
    assert len(str(caught.value).splitlines()) <= 5
    for path in out.rglob("*.safetensors"):
        assert all(t.isfinite().all() for t in files.read_tensors(path)[0].values())
    assert not (out / "result.json").exists()


def test_bad_images_stop_or_are_left_out(make_images, tmp_path, capsys):
    photos = make_images({"a": 10, "b": 10})
    (photos / "a/3.png").write_bytes(b"no image")
    (photos / "b/7.png").write_bytes((photos / "b/7.png").read_bytes()[:-40])
    with pytest.raises(DataError, match="2 unreadable images") as caught:
        train(photos, tmp_path / "run")
    for part in ("a/3.png", "b/7.png", "--bad-images skip"):
        assert part in str(caught.value)
    with pytest.raises(DataError, match="2 unreadable images, more than --max-bad 1") as caught:
        train(photos, tmp_path / "run", bad_images="skip", max_bad=1)
    assert "b/7.png" in str(caught.value)
    with pytest.raises(UsageError, match="--max-bad goes with --bad-images skip"):
        train(photos, tmp_path / "run", max_bad=1)
    assert not (tmp_path / "run").exists()
    run = vitral.train(str(photos), out=str(tmp_path / "run"), **{**TINY, "bad_images": "skip", "max_bad": 2})
    reported = " ".join(capsys.readouterr().err.split())
    assert "left out 2 unreadable images" in reported
    assert sum(run.result["images"].values()) == 18


def test_names_are_not_markup(make_images, tmp_path, capsys):
    photos = make_images({"[red]a": 5, "[/b]": 5}, name="[bold]photos :cat:")
    (photos / "[/b]/0.png").write_bytes(b"no image")
    run = vitral.train(str(photos), out=str(tmp_path / "[/x]"), **{**TINY, "bad_images": "skip", "epochs": 1})
    assert vitral.train(out=str(run.folder), resume=True).folder == run.folder
    reported = "".join(capsys.readouterr().err.split())
    assert "[/b]/0.png" in reported
    assert f"{tmp_path}/[/x]isalreadyfinished" in reported


def test_frozen_parts_keep_their_bits(trained, tmp_path):
    options = {
        "init": str(trained.folder),
        "freeze": ("patch_embed", "blocks.0.*", "pos_embed"),
        "epochs": 1,
        "probe": False,
    }
    data = trained.result["data"]
    run = vitral.train(data, out=str(tmp_path / "run"), quiet=True, lr=0.01, batch_size=4, device="cpu", **options)
    before, after = weights_of(trained.folder), weights_of(run.folder)
    same = {name for name in before if torch.equal(before[name], after[name])}
    frozen = {n for n in before if n.startswith(("patch_embed", "blocks.0.", "pos_embed"))}
    assert frozen <= same
    assert {"head.weight", "norm.weight", "blocks.1.mlp.fc1.weight"}.isdisjoint(same)


def test_init_takes_the_head_only_for_the_same_classes(trained, make_images, tmp_path):
    data = {"data": trained.result["data"], "init": str(trained.folder)}
    kept = planning.plan_run(data).init.weights
    assert same_bits(kept.state, weights_of(trained.folder))
    for classes in (("night", "day"), ("dawn", "Night", "day"), ("night",)):
        dataset = dataclasses.replace(load(data["data"]), classes=classes)
        turned = plan_network.read_initial(data, dataset, Run())
        for name in ("head.weight", "head.bias"):
            by_class = dict(zip(("day", "night"), kept.state[name], strict=True))
            for row, label in zip(turned.weights.state[name], classes, strict=True):
                assert torch.equal(row, by_class.get(label.lower(), torch.zeros_like(row)))
        known = len(set(classes) - {"dawn"})
        assert f"the head already knows {known} of your {len(classes)} classes" in turned.account.notes[-1]
        assert ("the others start from zero: dawn" in turned.account.notes[-1]) == ("dawn" in classes)
    dataset = dataclasses.replace(load(data["data"]), classes=("x", "y"))
    other = plan_network.read_initial(data, dataset, Run())
    assert not other.weights.state["head.weight"].any()
    assert set(other.account.fresh) == {"head.weight", "head.bias"}
    others = make_images({"x": 4, "y": 4, "z": 4})
    run = vitral.train(str(others), init=str(trained.folder), epochs=1, out=str(tmp_path / "run"), quiet=True)
    assert weights_of(run.folder)["head.weight"].shape == (3, 8)


def test_a_run_folder_that_exists(trained, tmp_path, make_images):
    photos = make_images({"a": 4, "b": 4})
    with pytest.raises(RunError, match="already exists") as caught:
        train(photos, trained.folder)
    for part in ("--overwrite", f"{trained.folder}-2"):
        assert part in str(caught.value)
    assert "--resume" not in str(caught.value), "it is finished"
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(RunError, match="refusing to overwrite"):
        train(photos, mine, overwrite=True)
    assert (mine / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert train(photos, tmp_path / "empty", epochs=1).folder == tmp_path / "empty"


def test_inputs_of_a_run_are_not_overwritten(trained, tmp_path, make_images):
    for needed in ({"init": str(trained.folder)}, {"teacher": str(trained.folder / "model.safetensors")}):
        others = trained.predictor.classes  # a teacher knows the classes that are taught
        with pytest.raises(RunError, match=rf"it contains --{next(iter(needed))}, "):
            train(make_images(dict.fromkeys(others, 4), name="same"), trained.folder, overwrite=True, **needed)
    assert trained.folder.joinpath("model.safetensors").is_file()
    photos = make_images({"a": 4, "b": 4})
    run = train(photos, tmp_path / "run", epochs=1)
    shutil.move(photos, run.folder / "photos")
    with pytest.raises(RunError, match=r"it contains the training data, .*photos"):
        train(run.folder / "photos", run.folder, overwrite=True)
    assert (run.folder / "photos").is_dir()


def test_classes_missing_in_validation(make_images, tmp_path):
    photos = make_images({"train/a": 6, "train/b": 6, "train/c": 6, "val/a": 2, "val/b": 2})
    assert 0 <= train(photos, tmp_path / "run", epochs=1).result["val_accuracy"] <= 1


def test_the_python_calls_of_the_design_page(make_images, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_images({"cat": 8, "dog": 8})
    run = vitral.train(data="photos/", quiet=True, **TINY)
    assert run.folder == Path("runs/photos")
    predictor = vitral.load("runs/photos")
    assert predictor.classes == ("cat", "dog")
    top = predictor("photos/cat/0.png").top(5)
    assert {name for name, _ in top} == {"cat", "dog"}
    assert sum(p for _, p in top) == pytest.approx(1.0)
    assert isinstance(predictor.model, torch.nn.Module)
    assert run.predictor.classes == predictor.classes
    evaluation = vitral.evaluate("runs/photos")
    assert evaluation.accuracy == pytest.approx(run.result["val_accuracy"])


def test_a_run_finds_its_data_from_another_folder(make_images, tmp_path, monkeypatch):
    """Also after run and data were moved together."""
    home = tmp_path / "home"
    (home / "work").mkdir(parents=True)
    make_images({"cat": 8, "dog": 8}, name="home/photos")
    monkeypatch.chdir(home / "work")
    wanted = vitral.train(data="../photos", out="../runs/one", quiet=True, **TINY).result["val_accuracy"]
    monkeypatch.chdir(tmp_path)
    assert vitral.evaluate("home/runs/one").accuracy == wanted
    home.rename(tmp_path / "moved")
    assert vitral.evaluate("moved/runs/one").accuracy == wanted
    shutil.copytree("moved/runs/one", tmp_path / "far/away/from/home")
    with pytest.raises(DataError, match=r"the run's own images are missing\n(?s:.*)far/away/photos"):
        vitral.evaluate("far/away/from/home")
    (tmp_path / "here").mkdir()
    make_images({"cat": 2, "dog": 1}, name="photos")
    monkeypatch.chdir(tmp_path / "here")
    assert vitral.evaluate("../moved/runs/one").accuracy == wanted, "others of the same name are not the run's own"
    config = Path("../moved/runs/one/config.json")
    record = json.loads(config.read_text())
    del record["paths"], record["data"]
    RunFolder(config.parent).write(config, json.dumps(record))
    assert vitral.evaluate("../moved/runs/one", split="val").images == 1, "a run from before is read from here"


def test_a_run_resumes_from_another_folder(make_images, tmp_path, monkeypatch):
    """With its data, initial weights and teacher in their original places."""
    make_images({"cat": 8, "dog": 8})
    monkeypatch.chdir(tmp_path)
    vitral.train(data="photos", out="first", quiet=True, **TINY)
    run = vitral.train(data="photos", out="runs/two", init="first", teacher="first", quiet=True, epochs=1)
    for name in ("result.json", "metrics.jsonl"):
        (run.folder / name).unlink()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = vitral.train(data=str(tmp_path / "photos"), out="../runs/two", resume=True, quiet=True)
    assert again.result["val_accuracy"] == run.result["val_accuracy"]


def test_options_may_be_paths_and_lists(make_images, tmp_path):
    run = vitral.train(
        make_images({"cat": 4, "dog": 4}),
        out=tmp_path / "run",
        quiet=True,
        **{**TINY, "epochs": 1, "mean": [0.4, 0.4, 0.4]},
    )
    assert json.loads((run.folder / "config.json").read_text())["run"]["mean"] == [0.4, 0.4, 0.4]


def test_truncated_weights(trained, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((trained.folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(WeightsError, match="damaged safetensors file") as caught:
        vitral.load(path)
    assert str(path) in str(caught.value)


def test_gray_and_oblong_digits_train(tmp_path):
    run = vitral.train("digits", out=str(tmp_path / "run"), quiet=True, **{**TINY, "epochs": 1, "batch_size": 128})
    assert run.result["images"]["test"] == 360
    assert run.predictor(noise(0, (8, 8), 1)).label in "0123456789"
    assert isinstance(run.predictor.probabilities([noise(0, (8, 8), 1)]), np.ndarray)
