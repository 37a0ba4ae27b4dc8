"""Test `--minutes`: as many epochs as fit, by a short trial."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from typing import Any

import pytest
import torch

import vitral
from running import TINY
from vitral.errors import UsageError
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning import throughput as pace
from vitral.workflows.planning.plan import plan_run, reopen

TIMED = {name: value for name, value in TINY.items() if name != "epochs"}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake a trial of 10 ms per training image and 2 ms per validation image."""
    monkeypatch.setattr(pace, "seconds_per_image", lambda job, at_most=None: (0.01, 0.002))


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("minutes", "epochs", "why"), [(0.01, 3, "an epoch takes 0.168 s"), (1e-4, 1, "even one epoch takes")]
)
def test_as_many_epochs_as_fit_with_a_reason(photos, minutes, epochs, why):
    job = plan_run({**TIMED, "data": str(photos), "val_fraction": 0.2, "minutes": minutes})
    assert (job.run.epochs, job.run.minutes) == (epochs, minutes)
    (reported,) = [choice for choice in job.plan.choices if choice.name == "epochs"]
    assert reported.value == str(epochs)
    assert why in reported.reason


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("ago", "left"), [(20.0, 35.0), (50.0, 30.0)])
def test_the_time_since_the_command_began_and_the_report_are_part_of_it(photos, tmp_path, monkeypatch, ago, left):
    """At least half of it is for training."""
    monkeypatch.setattr(pace.time, "monotonic", lambda: 1000.0 + ago)
    job = plan_run({**TIMED, "data": str(photos), "val_fraction": 0.2, "minutes": 1.0}, began=1000.0)
    assert job.plan.training_seconds == pytest.approx(left, abs=0.1)  # a report takes five
    assert job.run.epochs == int(job.plan.training_seconds * 0.95 / 0.168)
    (reported,) = [choice for choice in job.plan.choices if choice.name == "epochs"]
    assert f"; {60 - left:.0f} s of 1 min are reserved for planning, evaluation, and the report" in reported.reason


def test_the_seconds_for_training_are_kept(photos, tmp_path, monkeypatch):
    given: list[Any] = []
    monkeypatch.setattr(pace, "plan_again", lambda *those: given.append(those[2:]))
    options = {**TIMED, "val_fraction": 0.2, "minutes": 0.01}
    run = vitral.train(str(photos), out=str(tmp_path / "run"), quiet=True, began=time.monotonic() - 60, **options)
    assert RunFolder(run.folder).read_plan().training_seconds == 0.3
    assert set(given) == {(200, 0.3)}


@pytest.mark.usefixtures("slow")
def test_the_recipe_limits_the_epochs(photos):
    job = plan_run({**TIMED, "data": str(photos), "val_fraction": 0.2, "minutes": 10_000.0})
    assert job.run.epochs == 200
    assert "allows at most 200 epochs" in {choice.name: choice.reason for choice in job.plan.choices}["epochs"]
    paper = plan_run({**TIMED, "data": str(photos), "val_fraction": 0.2, "minutes": 1.0, "recipe": "paper"})
    assert paper.run.epochs == 300
    shorter = plan_run({**TIMED, "data": str(photos), "val_fraction": 0.2, "minutes": 0.5, "recipe": "paper"})
    assert shorter.run.epochs == int(30 * 0.95 / 0.168)


@pytest.mark.usefixtures("slow")
def test_the_epochs_determine_other_choices(photos):
    free = {name: value for name, value in TIMED.items() if name != "augment"}
    by_time = {
        minutes: plan_run({**free, "data": str(photos), "val_fraction": 0.2, "minutes": minutes}).run.augment
        for minutes in (0.01, 10.0)
    }
    assert by_time == {0.01: "none", 10.0: "trivialaugment"}


def test_choices_are_kept(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(pace, "seconds_per_image", lambda job: (0.01, 0.002))
    monkeypatch.setattr(pace, "plan_again", lambda *given: None)  # of which tests/training/test_timing.py is
    run = vitral.train(str(photos), out=str(tmp_path / "run"), quiet=True, val_fraction=0.2, minutes=0.01, **TIMED)
    assert len((run.folder / "metrics.jsonl").read_text("utf-8").splitlines()) == 3
    kept = json.loads((run.folder / "config.json").read_text("utf-8"))["run"]
    assert (kept["epochs"], kept["minutes"]) == (3, 0.01)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stem": {"model": "C+mu/4", "optimizer": "muon", "precision": "bf16"},
    "fewer patches": {"patch_dropout": 0.2},
    "mixed": {"mixup": 0.5, "augment": "trivialaugment", "class_weights": "balanced"},
    "frozen": {"freeze": ("patch_embed",)},
    "a large batch": {"batch_size": 512},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_a_trial_uses_the_steps_of_the_run_and_has_no_side_effects(photos, options):
    job = plan_run({**TINY, "data": str(photos), "val_fraction": 0.2, **options})
    torch.manual_seed(3)
    before = torch.get_rng_state()
    seconds = pace.seconds_per_image(job)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(0 < one < math.inf for one in seconds)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 5.0, "epochs": 3}, "--minutes and --epochs are mutually exclusive"),
        ({"minutes": 0.0}, "--minutes must be above 0 and at most 1,000,000"),
        ({"epochs": 5, "recipe": "linear-probe"}, "does not support --epochs"),
    ],
)
def test_invalid_options_are_refused(photos, options, message):
    with pytest.raises(UsageError, match=message):
        plan_run({"data": str(photos), **options})


def test_a_run_that_is_reopened_is_not_timed(photos, monkeypatch):
    monkeypatch.setattr(pace, "seconds_per_image", lambda job: (0.01, 0.002))
    job = plan_run({**TIMED, "data": str(photos), "val_fraction": 0.2, "minutes": 0.01})
    monkeypatch.setattr(pace, "seconds_per_image", lambda job: pytest.fail("decided anew"))
    assert reopen(job.plan).run.epochs == 3


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("device", "rate", "enough", "expected"),
    [
        ("cpu", 2000.0, True, "training reaches 100 images/s, measured over a few steps: decoding is fast enough"),
        ("cpu", 1000.0, False, "decoding limits it to 91% of that"),  # 1 / (1 / 100 + 1 / 1000): the same cores
        ("cuda", 96.0, True, "decoding is fast enough"),
        ("cuda", 40.0, False, "decoding limits it to 40% of that"),
    ],
)
def test_decoding_speed_is_compared_with_training(photos, device, rate, enough, expected):
    job = plan_run({**TINY, "data": str(photos), "val_fraction": 0.2})
    job = dataclasses.replace(job, machine=dataclasses.replace(job.machine, device=torch.device(device)))
    found, reported = pace.decoding_suffices(job, rate)
    assert found == enough
    assert reported.endswith(expected)


def test_a_streaming_run_reports_if_decoding_is_fast_enough(photos, tmp_path, capsys, monkeypatch):
    reported = []
    for learning in (1e-9, 10.0):  # seconds an image: no cores decode that fast, and any do
        monkeypatch.setattr(
            pace, "seconds_per_image", lambda job, at_most=None, learning=learning: (learning, learning)
        )
        vitral.train(
            photos, out=tmp_path / "run", overwrite=True, residency="stream", workers=0, **{**TINY, "epochs": 1}
        )
        reported.append(" ".join(capsys.readouterr().err.split()))
    assert "decoding limits it to 0% of that. --residency memory or cache keeps them decoded" in reported[0]
    assert "decoding is fast enough" in reported[1]
    vitral.train(photos, out=tmp_path / "run", overwrite=True, **{**TINY, "epochs": 1})
    assert "decoding" not in capsys.readouterr().err


def test_the_trial_of_a_large_network_on_a_cpu_uses_few_images(photos, monkeypatch):
    asked = []
    monkeypatch.setattr(pace, "seconds_per_image", lambda job, at_most: asked.append(at_most) or (0.01, 0.002))
    for options in (TINY, {"model": "L/16", "image_size": 224, "epochs": 1}):
        pace.decoding_suffices(plan_run({**options, "data": str(photos), "val_fraction": 0.2}), 100.0)
    assert asked[0] > 1000
    assert asked[1] == 2
