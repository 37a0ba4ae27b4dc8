"""Test options that reduce computation: plans, run folders, refusals, resuming."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest

import vitral
from running import TINY, same_bits, train, weights_of
from vitral.errors import RunError, UsageError
from vitral.kernels import REFERENCE
from vitral.model.vit import MLP
from vitral.weights import native
from vitral.weights.load import read
from vitral.workflows.evaluate import evaluate
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.plan import plan_run
from vitral.workflows.running import execute
from vitral.workflows.running.build import objective_of


def lines(run: vitral.TrainedRun) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def reported(job: Job) -> dict[str, tuple[str, str]]:
    return {choice.name: (choice.value, choice.reason) for choice in job.plan.choices}


def test_defaults_do_not_change_the_run(photos, tmp_path):
    plain = train(photos, tmp_path / "plain")
    off = train(photos, tmp_path / "off", patch_dropout=0.0)
    assert same_bits(weights_of(plain.folder), weights_of(off.folder))
    assert not {"distill_loss"} & set(lines(plain)[0])
    assert "teacher" not in json.loads((plain.folder / "config.json").read_text("utf-8"))


def test_the_plan_reports_the_computed_share():
    job = plan_run({"data": "digits", "model": "mu/2", "patch_dropout": 0.5, "device": "cpu"})
    found = reported(job)
    assert found["patch dropout"] == ("0.5", "training computes 8 of 16 patches, evaluation all of them")
    assert job.config.patch_dropout == 0.5


def test_initial_weights_can_be_trained_with_fewer_patches(trained, tmp_path):
    options = {"init": str(trained.folder), "epochs": 1, "patch_dropout": 0.5, "device": "cpu"}
    run = vitral.train(trained.result["data"], out=str(tmp_path / "run"), quiet=True, **options)
    assert native.read(run.folder / "model.safetensors").config.patch_dropout == 0.5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"patch_dropout": 1.0}, "--patch-dropout must be from 0 to below 1, not 1.0"),
        ({"distill_weight": 0.3}, "--distill-weight requires a teacher"),
        ({"distill_weight": 1.5}, "--distill-weight must be from 0 to 1"),
        ({"distill_temperature": 0.0}, "--distill-temperature must be above 0 and at most 1,000"),
        ({"teacher": "no/such"}, "no such run or weights"),
    ],
)
def test_refusals(photos, options, expected):
    with pytest.raises(vitral.VitralError, match=f"(?s){expected}") as caught:
        plan_run({"data": str(photos), **TINY, **options})
    assert len(str(caught.value).splitlines()) <= 5


def test_a_resnet_has_no_patches(photos):
    with pytest.raises(UsageError, match="has no patch_dropout"):
        plan_run({"data": str(photos), "model": "BiT-R50x1", "image_size": 32, "patch_dropout": 0.5})


def test_a_linear_probe_takes_no_steps_that_could_be_saved(photos):
    for name, value in (("patch_dropout", 0.5), ("teacher", "runs/x")):
        with pytest.raises(UsageError, match="--recipe linear-probe does not support"):
            plan_run({"data": str(photos), "recipe": "linear-probe", name: value})


def test_a_teacher_of_other_classes_is_refused(photos, trained):
    with pytest.raises(UsageError, match="the teacher's classes are not the data's") as caught:
        plan_run({"data": str(photos), **TINY, "teacher": str(trained.folder)})
    assert "cat, dog" in str(caught.value)
    assert "day, night" in str(caught.value)


def test_distillation_from_a_run(photos, tmp_path):
    teacher = train(photos, tmp_path / "teacher", image_size=16, channels=1, seed=4)
    options = {"teacher": str(teacher.folder), "distill_weight": 0.9, "distill_temperature": 2.0}
    found = reported(plan_run({"data": str(photos), **TINY, **options}))["teacher"]
    assert found[0].startswith("mu/4, ")
    assert "0.9 of the loss at temperature 2; it adds" in found[1]
    run = train(photos, tmp_path / "run", **options)
    assert all(line["distill_loss"] >= 0 for line in lines(run))
    config = json.loads((run.folder / "config.json").read_text("utf-8"))
    assert config["run"]["teacher"] == str(teacher.folder)
    assert config["teacher"]["digest"] == native.digest(read(teacher.folder, channels=3).weights.state)
    assert "teacher" not in " ".join(weights_of(run.folder))
    shutil.rmtree(teacher.folder)  # what is trained needs no teacher
    assert evaluate(run.folder).images == 4


@pytest.mark.parametrize("plain", [True, False])
def test_a_plain_run_has_a_plain_teacher(photos, trained, plain):
    job = plan_run({"data": trained.result["data"], **TINY, "teacher": str(trained.folder), "plain": plain})
    layers = [layer for layer in objective_of(job).teacher.network.modules() if hasattr(layer, "backend")]
    assert {layer.backend in REFERENCE for layer in layers if not isinstance(layer, MLP)} == {not plain}


@pytest.mark.slow
def test_resuming_needs_the_same_teacher(photos, tmp_path, monkeypatch):
    teacher = train(photos, tmp_path / "teacher", seed=4)
    options = {"teacher": str(teacher.folder), "ema": 0.9, "patch_dropout": 0.3, "flip": True}
    whole = train(photos, tmp_path / "whole", **options)
    with monkeypatch.context() as patched:
        patched.setattr(execute, "_validate", fails_in_second_epoch(execute._validate))
        with pytest.raises(InterruptedError):
            train(photos, tmp_path / "cut", **options)
    train(photos, teacher.folder, seed=5, overwrite=True)
    with pytest.raises(RunError, match="the teacher has changed") as caught:
        vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert str(teacher.folder) in str(caught.value)
    train(photos, teacher.folder, seed=4, overwrite=True)
    again = vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))


def fails_in_second_epoch(validate: Any) -> Any:
    """Make validation fail in the second epoch."""

    def failing(model: Any, running: Any) -> dict[str, float]:
        if running.state.epoch == 1:
            raise InterruptedError
        return validate(model, running)

    return failing
