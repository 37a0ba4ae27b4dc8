"""Test the memory estimates, and the error if memory runs out."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import vitral
from images import MakeImages
from running import TINY
from vitral.cli.main import main
from vitral.device import choose
from vitral.errors import TrainingError, UsageError
from vitral.model import config, network
from vitral.training.options import Run
from vitral.workflows.planning import memory as room
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.memory import eval_batch_size, needs, out_of_memory_reported, training_bytes
from vitral.workflows.planning.plan import plan_run

CPU = torch.device("cpu")
MIB = 2**20


@pytest.fixture
def memory(monkeypatch):
    """Return a function that sets the available memory in bytes."""
    return lambda count: monkeypatch.setattr(room, "total_bytes", lambda device: count)


def reported(job: Job) -> dict[str, tuple[str, str]]:
    return {choice.name: (choice.value, choice.reason) for choice in job.plan.choices}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mu/4", {"image_size": 32, "depth": 6}),
        ("Ti/16", {"image_size": 64}),
        ("Ti/16", {"image_size": 64, "pool": "mean"}),
        ("C+Femto/4", {"image_size": 32}),
        ("R26+S/32", {"image_size": 64}),
        ("BiT-R50x1", {"image_size": 64}),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activations_are_estimated_from_the_layers(name, changes, checkpointing):
    """Compared with the tensors that torch saves for backward, counted rather than measured."""
    of = config(name, classes=5, **changes)
    model = network(of).train()
    model.checkpointing = checkpointing

    def saved(count: int) -> int:
        found: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _answers = model(torch.zeros(count, of.channels, *of.image))  # kept, and with it what it was made from
        return sum(found.values())

    an_image = saved(3) - saved(2)  # what is saved of weights is the same for any number
    estimated = training_bytes(Run(checkpointing=checkpointing), of, choose("cpu", "fp32"))[1]
    assert an_image < estimated
    if not checkpointing:
        assert an_image > estimated / 3, "a reckoning of far too much would split batches that fit"


def test_a_batch_that_does_not_fit_is_split(memory, make_images: MakeImages):
    photos = str(make_images({"a": 200, "b": 200}))
    options = {"data": photos, "model": "Ti/16", "image_size": 64, "device": "cpu", "precision": "fp32"}
    memory(2**40)
    whole = plan_run(options)
    assert (whole.run.accumulate, "batch" in reported(whole)) == (1, True)
    memory(200 * MIB)
    parts = plan_run(options)
    assert parts.run.accumulate > 1
    assert parts.run.step_batch == whole.run.step_batch
    assert parts.run.peak_lr == whole.run.peak_lr
    value, why = reported(parts)["batch"]
    assert value == f"{parts.run.accumulate} × {parts.run.batch_size}"
    assert f"{whole.run.batch_size} images need about" in why
    assert "and 200 MiB are available" in why
    assert f"{whole.run.step_batch} images per step, in micro-batches" in why
    assert "norms" not in why
    same = {"batch_size", "accumulate"}
    assert {f.name for f in dataclasses.fields(Run) if getattr(whole.run, f.name) != getattr(parts.run, f.name)} == same


def test_micro_batches_keep_the_given_accumulation(memory):
    options: dict[str, Any] = {"data": "digits", "recipe": "paper", "model": "Ti/2", "image_size": 16, "device": "cpu"}
    memory(2**40)
    whole = plan_run(options)
    memory(400 * MIB)
    parts = plan_run(options)
    assert parts.run.accumulate > whole.run.accumulate > 1
    assert parts.run.step_batch == whole.run.step_batch


def test_a_given_batch_is_kept_with_a_warning(memory):
    memory(150 * MIB)
    job = plan_run({"data": "digits", "model": "Ti/2", "batch_size": 96, "device": "cpu", "precision": "fp32"})
    assert (job.run.batch_size, job.run.accumulate) == (96, 1)
    value, why = reported(job)["memory"]
    assert value == "may not suffice"
    size, count = (int(why.split(f"{word} ")[1].split()[0]) for word in ("--batch-size", "--accumulate"))
    assert size * count == 96
    again = {"batch_size": size, "accumulate": count}
    assert "memory" not in reported(plan_run({"data": "digits", "model": "Ti/2", **again, "device": "cpu"}))


@pytest.mark.parametrize("given", [{"accumulate": 2}, {"batch_size": 97}])
def test_given_options_are_kept(given, memory):
    """So that the same command with --resume is the same run."""
    memory(150 * MIB)
    options = {"data": "digits", "model": "Ti/2", "device": "cpu", "precision": "fp32"}
    job = plan_run({**options, **given})
    assert {name: getattr(job.run, name) for name in given} == given
    assert "memory" in reported(job)


def test_norms_over_micro_batches_are_reported(memory, make_images: MakeImages):
    options = {"data": str(make_images({"a": 40, "b": 40})), "model": "C+Femto/4", "device": "cpu"}
    whole = plan_run(options)
    held, image = training_bytes(whole.run, whole.config, whole.machine)
    memory(round((held + 4 * image) / 0.7))
    job = plan_run(options)
    assert job.run.accumulate > 1
    assert "the batch norms of the stem see" in reported(job)["batch"][1]


def test_frozen_layers_and_simpler_optimizers_need_less(memory, make_images: MakeImages):
    memory(500 * MIB)
    photos = str(make_images({"a": 8, "b": 8}))
    options = {"data": photos, "model": "S/16", "image_size": 64, "device": "cpu", "precision": "fp32", "ema": 0.0}
    changes: list[dict[str, Any]] = [{}, {"optimizer": "sgd"}, {"freeze": ("blocks.*",)}]
    parts = [plan_run({**options, **more}).run.accumulate for more in changes]
    assert parts[0] >= parts[1] >= parts[2] == 1


@pytest.mark.slow
def test_a_network_that_cannot_fit_is_refused_with_a_size_that_does(memory):
    memory(2**30)
    options = {"data": "digits", "model": "S/16", "device": "cpu", "precision": "fp32"}
    with pytest.raises(UsageError, match="10000×10000 pixels does not fit") as refused:
        plan_run({**options, "image_size": 10_000})
    hint = refused.value.hint
    assert hint is not None
    side = int(hint.split("--image-size ")[1].split(",")[0])
    assert plan_run({**options, "image_size": side}).run.size == (side, side)


def test_checkpointing_is_suggested_if_it_helps(memory):
    memory(4 * 2**30)
    options = {"data": "digits", "model": "S/16", "image_size": 2048, "device": "cpu", "precision": "fp32"}
    with pytest.raises(UsageError, match="does not fit") as refused:
        plan_run(options)
    assert refused.value.hint == "use --checkpointing, or --image-size 1024, or choose a smaller --model"
    assert plan_run({**options, "checkpointing": True}).run.checkpointing


def test_a_network_larger_than_memory_suggests_a_smaller_one(memory):
    memory(2**30)
    with pytest.raises(UsageError, match="does not fit") as refused:
        plan_run({"data": "digits", "model": "H/14", "device": "cpu"})
    assert refused.value.hint == "choose a smaller --model"


def test_large_images_are_evaluated_in_small_batches(memory):
    memory(16 * 2**30)
    small, large = (config("S/16", image_size=side) for side in (224, 2048))
    assert eval_batch_size(small, CPU) == room.EVAL_BATCH
    assert 1 <= eval_batch_size(large, CPU) < 32
    assert eval_batch_size(large, CPU) * needs(large).inference <= 4 * 2**30
    memory(MIB)
    assert eval_batch_size(large, CPU) == 1


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("mu/4", {"image_size": 32}),
        ("Ti/2", {"image_size": 32}),
        ("L/16", {}),
        ("S/16", {"registers": 4}),
        ("C+Femto/4", {"image_size": 32}),
        ("C+Micro/16", {"image_size": 128}),
        ("C+S/16", {}),
    ],
)
def test_the_upper_bound_holds(name, changes):
    of = config(name, **changes)
    assert needs(of).inference <= room._upper_bound(of) < 12 * needs(of).inference


def test_evaluation_takes_what_fits(memory, make_images: MakeImages, tmp_path):
    photos = make_images({"a": 6, "b": 6})
    run = vitral.train(str(photos), out=str(tmp_path / "run"), quiet=True, **TINY)
    whole = vitral.evaluate(run.folder, split="train")
    memory(4 * needs(run.predictor.model.config).inference * 3)
    seen: list[int] = []
    logits = vitral.Predictor.logits

    def watched(self: vitral.Predictor, images: Tensor) -> Tensor:
        seen.append(len(images))
        return logits(self, images)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vitral.Predictor, "logits", watched)
        parts = vitral.evaluate(run.folder, split="train")
    assert max(seen) == 3
    assert parts.accuracy == whole.accuracy


# ---- memory that runs out all the same


def test_other_errors_are_left_alone():
    with (
        pytest.raises(RuntimeError, match="something else"),
        out_of_memory_reported(Run(), config("mu/4"), by_steps=True),
    ):
        raise RuntimeError("something else")


@pytest.mark.slow
@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        MemoryError(),
        RuntimeError("MPS backend out of memory (MPS allocated: 2 GB)"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_out_of_memory_in_a_run_suggests_what_needs_less(error, make_images: MakeImages, tmp_path, monkeypatch):
    photos, out = str(make_images({"a": 6, "b": 6})), tmp_path / "run"

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("vitral.workflows.running.execute.fit", fails)
    with pytest.raises(TrainingError, match="not enough memory") as reported:
        vitral.train(photos, out=str(out), quiet=True, **TINY)
    assert reported.value.hint is not None
    ways = "--batch-size 2 --accumulate 2, or --checkpointing, or a smaller --image-size, or a smaller --model"
    assert reported.value.hint == f"start a new run (--overwrite, or choose another --out) with {ways}"
    monkeypatch.undo()
    assert vitral.train(photos, out=str(out), quiet=True, resume=True).result["epochs"] == TINY["epochs"]


def test_out_of_memory_in_a_command_is_not_a_bug(capsys, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB")

    monkeypatch.setattr("vitral.model.summarize", fails)
    assert main(["summary", "Ti/16"]) == 2
    message = capsys.readouterr().err
    assert "not enough memory" in message
    assert "--device cpu" in message
    assert "bug" not in message
