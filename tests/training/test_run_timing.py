"""`--minutes` is kept by planning the epochs again, with a clock of the tests' own."""

from __future__ import annotations

import itertools
import json
import signal
import types
from pathlib import Path
from typing import Any

import pytest

import vitral
from images import MakeImages
from running import TINY, same_bits, weights_of
from vitral.errors import Interrupted, UsageError
from vitral.training import loop
from vitral.training.callbacks import Callback
from vitral.training.options import Run
from vitral.training.schedule import as_planned, planned_epochs
from vitral.training.timing import plan_again
from vitral.workflows.planning import throughput as pace
from vitral.workflows.replay import replay
from vitral.workflows.running import execute

TIMED = {name: value for name, value in TINY.items() if name != "epochs"}


def simulated(planned: int, minutes: float, seconds: Any, most: int | None = 10_000) -> list[dict[str, Any]]:
    """Return the lines of a run whose epoch n, from 1, takes `seconds(n)`."""
    run, history = Run(epochs=planned, minutes=minutes), list[dict[str, Any]]()
    while len(history) < planned_epochs(run, history):
        history.append({"epoch": len(history) + 1, "seconds": seconds(len(history) + 1)})
        if (epochs := plan_again(run, history, most)) is not None:
            history[-1]["epochs"] = epochs
    return history


@pytest.mark.parametrize("planned", [1, 3, 13, 41, 90, 1000])
@pytest.mark.parametrize("epoch", [0.44, 2.0, 7.0])
def test_within_a_tenth_whatever_the_trial_foresaw(planned, epoch):
    """18 s: 41, 9 or 2 epochs, of which the first takes half a second longer."""
    history = simulated(planned, 0.3, lambda n: epoch + 0.5 * (n == 1))
    spent = sum(line["seconds"] for line in history)
    assert spent <= 18 * 1.1
    assert spent >= 18 * 0.9 or spent + epoch > 18 * 1.1, "no other number of epochs is within a tenth"


def test_a_trial_that_foresaw_far_too_much_time():
    """The observed run: one epoch of 68 s planned for four minutes."""
    assert [line["epoch"] for line in simulated(1, 4.0, lambda n: 68.0)] == [1, 2, 3]
    assert len(simulated(1, 4.0, lambda n: 20.0)) == 12


def test_planned_again_only_while_little_time_is_over():
    quiet = simulated(13, 1.0, lambda n: 1.0 + 0.05 * (n % 2))
    assert all(line["epoch"] <= 21 for line in quiet if "epochs" in line)
    assert [line["epochs"] for line in simulated(13, 1.0, lambda n: 1.0) if "epochs" in line] == [60]
    faster = simulated(60, 1.0, lambda n: 1.0 if n < 25 else 0.5)
    assert len(faster) == 60, "later it is not lengthened"


def test_a_machine_that_becomes_busy_is_never_late_by_more_than_an_epoch():
    for slower, at in itertools.product((1.5, 2.0, 5.0), (8, 20, 50)):
        history = simulated(60, 1.0, lambda n, slower=slower, at=at: 1.0 if n < at else slower)
        assert sum(line["seconds"] for line in history) <= 60 + 2 * slower
        assert len(history) == planned_epochs(Run(epochs=60, minutes=1.0), history)


def test_the_recipes_limit_holds():
    assert len(simulated(20, 10.0, lambda n: 1.0, most=25)) == 25
    assert len(simulated(20, 10.0, lambda n: 1.0, most=None)) == 20


# A run, with an injected clock


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    return make_images({"cat": 12, "dog": 8})


class Clock:
    """Seconds that pass with each batch."""

    def __init__(self, batch: float):
        self.now, self.batch = 0.0, batch

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A trial that foresees 10 ms an image, and batches that take 10 ms: a quarter of it, in batches of four."""
    own = Clock(0.01)
    monkeypatch.setattr(pace, "seconds_per_image", lambda job, at_most=None: (0.01, 0.0))
    monkeypatch.setattr(loop, "time", types.SimpleNamespace(perf_counter=own.perf_counter))
    original = execute.objective_of

    def objective_of(*args: Any, **more: Any) -> Any:
        objective = original(*args, **more)

        def timed(model: Any, batch: Any) -> Any:
            own.now += own.batch
            return objective(model, batch)

        return timed

    monkeypatch.setattr(execute, "objective_of", objective_of)
    return own


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]


def timed(photos: Path, out: Path, **more: Any) -> vitral.TrainedRun:
    return vitral.train(str(photos), out=str(out), quiet=True, val_fraction=0.2, minutes=0.012, **TIMED, **more)


def test_a_run_takes_the_time_that_was_asked_for(photos, tmp_path, clock):
    run = timed(photos, tmp_path / "run")
    lines = lines_of(run.folder)
    again = [line["epochs"] for line in lines if "epochs" in line]
    assert again[-1] == len(lines) == run.result["epochs"]
    planned = json.loads((run.folder / "config.json").read_text("utf-8"))["run"]["epochs"]
    assert len(lines) > 2 * planned
    assert 0.72 * 0.9 <= sum(line["seconds"] for line in lines) <= 0.72 * 1.1
    assert lines[-1]["lr"] < 0.05 * max(line["lr"] for line in lines), "the schedule ends where the run does"


def test_resumed_it_has_the_same_bits(photos, tmp_path, clock, monkeypatch):
    """Stopped in the middle of the epoch after the one that planned again, on a machine that is slower afterwards."""
    whole = timed(photos, tmp_path / "whole")
    at = next(line["epoch"] for line in lines_of(whole.folder) if "epochs" in line)
    assert len(lines_of(whole.folder)) > at + 1
    stopping = _StopIn(at)
    with pytest.raises(Interrupted):
        timed(photos, tmp_path / "stopped", callbacks=[stopping])
    assert len(lines_of(tmp_path / "stopped")) == at
    clock.batch *= 1.05
    vitral.train(out=str(tmp_path / "stopped"), resume=True, quiet=True)
    assert same_bits(weights_of(whole.folder), weights_of(tmp_path / "stopped"))
    for one, other in zip(lines_of(whole.folder), lines_of(tmp_path / "stopped"), strict=True):
        assert [one.get(name) for name in ("lr", "train_loss", "val_loss", "epochs")] == [
            other.get(name) for name in ("lr", "train_loss", "val_loss", "epochs")
        ]


class _StopIn(Callback):
    """Ask to stop after the second batch of an epoch, counted from 0."""

    def __init__(self, epoch: int):
        self.epoch, self.batches, self.here = epoch, 0, False

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        self.here, self.batches = epoch == self.epoch, 0

    def on_batch(self, loss: Any) -> None:
        self.batches += 1
        if self.here and self.batches == 2:
            signal.raise_signal(signal.SIGINT)


def test_replay_follows_the_schedule_that_the_run_had(photos, tmp_path, clock):
    run = timed(photos, tmp_path / "run")
    lines = lines_of(run.folder)
    last = lines[-1]["step"]
    found = replay(run.folder, step=last, exact=True)
    assert found.epoch == len(lines)
    with pytest.raises(UsageError, match="no step"):
        replay(run.folder, step=last + 1)


def test_a_run_without_a_second_plan_is_itself():
    run = Run(epochs=3)
    assert as_planned(run, [{"epoch": 1}]) is run
    assert as_planned(run, [{"epoch": 1, "epochs": 5}, {"epoch": 2}]).epochs == 5
