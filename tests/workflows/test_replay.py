"""`vitral replay`: the very batch of training, from the run folder alone."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import vitral
from running import TINY, as_json, mostly_slow, printed, train
from vitral.errors import DataError, RunError, UsageError
from vitral.training import run_folder
from vitral.weights import native
from vitral.workflows.planning.run_data import load_run_data
from vitral.workflows.replay import replay
from vitral.workflows.running import execute

VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {"mixup": 0.5, "cutmix": 0.5, "label_smoothing": 0.1, "erase": 0.5, "dropout": 0.2},
    "accumulated": {"accumulate": 2, "augment": "trivialaugment", "flip": True, "ema": 0.9, "sampling": "balanced"},
    "streamed": {"residency": "stream", "workers": 0, "crop": "random-resized"},
    "stem": {"model": "C+mu/4", "crop": "shift", "class_weights": "balanced"},
}


class Seen:
    """Inputs and losses of every batch of a training, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.batches: list[tuple[torch.Tensor, torch.Tensor, float]] = []
        original = execute.objective_of

        def objective_of(*args: Any, **more: Any) -> Any:
            objective = original(*args, **more)

            def kept(model: Any, batch: Any) -> Any:
                images, labels, teacher = objective.prepare(batch)
                loss, metrics = objective.loss(model, images, labels, teacher)
                self.batches.append((images.clone(), labels.clone(), float(loss.detach())))
                return loss, metrics

            return kept

        monkeypatch.setattr(execute, "objective_of", objective_of)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_batch_and_its_losses_are_those_of_training(name, photos, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        seen = Seen(patch)
        run = train(photos, tmp_path / "run", **VARIANTS[name])
    per_epoch = len(seen.batches) // TINY["epochs"]
    accumulate = VARIANTS[name].get("accumulate", 1)
    steps = -(-per_epoch // accumulate)
    for step in (1, steps + 2):
        number = (step - 1) // steps * per_epoch + (step - 1) % steps * accumulate
        images, labels, loss = seen.batches[number]
        found = replay(run.folder, step=step, exact=True)
        assert torch.equal(found.images, images), "bit by bit"
        assert torch.equal(found.targets.argmax(1), labels if labels.ndim == 1 else labels.argmax(1))
        assert float(found.losses.mean()) == pytest.approx(loss, rel=1e-6)
        assert (found.epoch, found.step) == ((step - 1) // steps + 1, step)


def test_losses_are_by_the_best_weights_unless_exact(photos, tmp_path):
    run = train(photos, tmp_path / "run", label_smoothing=0.0)
    found = replay(run.folder, step=1)
    logits = vitral.load(run.folder, precision="fp32", device="cpu").model(found.images)
    expected = torch.nn.functional.cross_entropy(logits, found.targets.argmax(1), reduction="none")
    torch.testing.assert_close(found.losses, expected)
    assert not torch.equal(found.losses, replay(run.folder, step=1, exact=True).losses)


def test_an_image_is_found_in_every_epoch_that_shows_it(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    name = replay(run.folder, step=1).names[2]
    for epoch in (1, 2, 3):
        found = replay(run.folder, epoch=epoch, image=name)
        assert name in found.names
        assert found.epoch == epoch
    short = "/".join(Path(name).parts[-2:])
    assert replay(run.folder, epoch=1, image=short).step == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "--step 1, or --epoch"),
        ({"step": 1, "epoch": 1}, "select a batch by its step"),
        ({"epoch": 1}, "select a batch by its step"),
        ({"step": 0}, "the run has no step 0"),
        ({"step": 13}, "3 epochs of 4"),
        ({"epoch": 4, "image": "cat/1.png"}, "the run has no epoch 4"),
        ({"epoch": 1, "image": "hen/1.png"}, "no such training image"),
        ({"epoch": 1, "image": "1.png"}, "several images have this name"),
    ],
)
def test_what_the_run_does_not_have_is_refused(asked, message, make_images, tmp_path):
    run = train(make_images({"train/cat": 10, "train/dog": 6, "val/cat": 2, "val/dog": 2}), tmp_path / "run")
    with pytest.raises(UsageError) as raised:
        replay(run.folder, **asked)
    assert message in str(raised.value)


def test_changed_data_and_closed_forms_are_refused(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    probe = vitral.train(
        str(photos),
        recipe="linear-probe",
        model="mu/4",
        image_size=8,
        out=tmp_path / "probe",
        val_fraction=0.2,
        quiet=True,
    )
    with pytest.raises(UsageError, match="trains in no steps"):
        replay(probe.folder, step=1)
    shutil.copy(photos / "cat/0.png", photos / "cat/new.png")
    with pytest.raises(DataError, match="have changed"):
        replay(run.folder, step=1)


@pytest.mark.parametrize(
    ("option", "kind"), mostly_slow([("init", "run"), ("init", "foreign"), ("teacher", "run"), ("init", "file")], 3)
)
def test_exact_losses_need_the_weights_that_the_run_started_from(option, kind, photos, tmp_path, capsys):
    def place(seed: int) -> Path:
        """Put weights of a seed where the run looks for them."""
        made = train(photos, tmp_path / f"seed{seed}", seed=seed, split_seed=0, epochs=1, overwrite=True).folder
        there = {"run": tmp_path / "first", "file": tmp_path / "first.safetensors", "foreign": tmp_path / "first"}[kind]
        shutil.rmtree(there, ignore_errors=True)
        if kind == "run":
            return Path(shutil.copytree(made, there))
        if kind == "file":
            return Path(shutil.copy(made / "model.safetensors", there))
        vitral.convert(made, there, "timm")
        return there

    options = {option: str(place(0)), **({"model": None} if option == "init" else {})}
    run = train(photos, tmp_path / "run", split_seed=0, epochs=2, **options).folder
    loss = replay(run, step=2, exact=True).to_json()["loss"]
    place(0)
    assert replay(run, step=2, exact=True).to_json()["loss"] == loss
    place(1)
    what = {"init": "the initial weights have changed", "teacher": "the teacher has changed"}[option]
    with pytest.raises(RunError, match=what):
        replay(run, step=2, exact=True)
    _, err = printed(capsys, "replay", str(run), "--step", "2", "--out", str(tmp_path / "sheet.png"))
    assert what in err


def test_a_threshold_saved_with_the_initial_weights_changes_none(photos, tmp_path):
    first = train(photos, tmp_path / "first", split_seed=0).folder
    run = train(photos, tmp_path / "run", split_seed=0, init=str(first)).folder
    weights = native.read(first / "model.safetensors")
    native.save(first / "model.safetensors", dataclasses.replace(weights, trained={**weights.trained, "note": 1}))
    assert replay(run, step=1, exact=True).exact


def test_an_image_is_found_by_any_path_to_it(photos, tmp_path, monkeypatch):
    run = train(photos, tmp_path / "run")
    name = load_run_data(run_folder.RunFolder(run.folder).read_plan()).dataset["train"].names[0]
    (tmp_path / "link").symlink_to(photos)
    inside = Path(name).relative_to(photos)
    monkeypatch.chdir(tmp_path)
    for typed in (inside, f"photos/../link/{inside}", f"./photos/{inside}", tmp_path / "link" / inside):
        assert name in replay(run.folder, epoch=1, image=str(typed)).names


def test_the_sheet_and_the_command(photos, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = train(photos, tmp_path / "run", mixup=0.5)
    found = replay(run.folder, step=1)
    _, err = printed(capsys, "replay", str(run.folder), "--step", "1", "--out", "sheet.pdf", code=2)
    assert "written as .png" in err
    out, err = printed(capsys, "replay", str(run.folder), "--step", "1")
    assert f"{float(found.losses[0]):.4f}" in out
    assert found.label(0) in out
    assert "replay-1-1.png" in err
    first = Image.fromarray(found.pixels[0]).resize((200, 200), Image.Resampling.NEAREST)
    with Image.open(tmp_path / "replay-1-1.png") as sheet:
        assert sheet.crop((12, 12, 212, 212)).tobytes() == first.tobytes()
    assert found.caption(0).splitlines()[0] == found.label(0)
    for index in range(len(found.names)):
        right = found.probabilities[index].argmax() == found.targets[index].argmax()
        assert found.caption(index).splitlines()[1].startswith("predicted " if right else "wrong: ")
    answer = as_json(capsys, "replay", str(run.folder), "--epoch", "1", "--image", found.names[0], "--out", "b.png")
    assert answer["images"][0] == {
        "image": found.names[0],
        "label": found.label(0),
        "loss": pytest.approx(float(found.losses[0])),
        "predicted": found.predicted(0)[0],
        "probability": pytest.approx(found.predicted(0)[1]),
    }
