"""CPU threads as a planned choice: tried, saved with the run, and honored by its resumption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import vitral
from running import TINY, train
from vitral.errors import Interrupted, UsageError
from vitral.training.callbacks import Callback
from vitral.workflows.planning import threads as plan_threads
from vitral.workflows.planning.plan import plan_run
from vitral.workflows.planning.throughput import step_seconds


@pytest.fixture
def photos(make_images) -> Path:
    return make_images({"a": 8, "b": 8})


def planned(photos: Path, **options: Any) -> Any:
    return plan_run({"data": str(photos), **TINY, "val_fraction": 0.2, **options})


def machine(monkeypatch: pytest.MonkeyPatch, *seconds: float, cores: int = 8) -> list[int]:
    """A machine of so many seconds a step with 1, 2, 4, … threads; returns the list of what is set there."""
    set_there: list[int] = [1 << (len(seconds) - 1)]
    monkeypatch.setattr(torch, "get_num_threads", lambda: set_there[-1])
    monkeypatch.setattr(torch, "set_num_threads", set_there.append)
    monkeypatch.setattr(plan_threads, "cores", lambda: cores)
    monkeypatch.setattr(plan_threads, "step_seconds", lambda job, counts, most: list(seconds[: len(counts)]))
    return set_there


@pytest.mark.parametrize(
    ("seconds", "count", "why"),
    [
        ((1.0, 0.55), 2, "2 threads are 1.8 times as fast as one in trial steps"),
        ((1.0, 0.8), 1, "2 threads are only 1.2 times as fast as one in trial steps, and become much slower while"),
        ((1.0, 4.0), 1, "2 threads are 4.0 times slower than one"),
        ((1.0, 0.6, 0.5, 0.45), 2, "8 threads are only 2.2 times as fast"),
        ((1.0, 0.6, 0.35, 0.2), 8, "8 threads are 5.0 times as fast"),
    ],
)
def test_another_thread_must_gain_more_than_it_risks(seconds, count, why, photos, monkeypatch):
    machine(monkeypatch, *seconds)
    job = planned(photos)
    assert job.run.threads == count
    (choice,) = (one for one in job.plan.choices if one.name == "threads")
    assert choice.value == str(count)
    assert choice.reason.startswith(why)


def test_the_time_is_measured_with_these_threads(photos, monkeypatch):
    there = machine(monkeypatch, 1.0, 2.0)
    seen: list[int] = []

    def epochs(job: Any, began: float | None) -> tuple[int, str, float]:
        seen.append(torch.get_num_threads())
        return 3, "an epoch takes a while", 60.0

    monkeypatch.setattr("vitral.workflows.planning.plan.epochs_within", epochs)
    options = {name: value for name, value in TINY.items() if name != "epochs"}
    job = plan_run({"data": str(photos), **options, "val_fraction": 0.2, "minutes": 1.0})
    assert (seen, job.run.threads, there[-1]) == ([1], 1, 2)
    assert [one.name for one in job.plan.choices].count("threads") == 1


def test_one_thread_needs_no_trial(photos, monkeypatch):
    machine(monkeypatch, 1.0)
    monkeypatch.setattr(plan_threads, "step_seconds", lambda *_: pytest.fail("tried"))
    job = planned(photos)
    assert job.run.threads == 1
    assert not [one for one in job.plan.choices if one.name == "threads"]


def test_a_large_network_takes_all_without_a_trial(photos, monkeypatch):
    machine(monkeypatch, 1.0, 2.0)
    monkeypatch.setattr(plan_threads, "_LARGE", 1.0)
    assert planned(photos).run.threads == 2


def test_what_is_requested_is_taken_or_refused(photos, monkeypatch):
    machine(monkeypatch, 1.0, 2.0, cores=4)
    job = planned(photos, threads=4)
    assert job.run.threads == 4
    assert ("threads", "4", "requested") in {(one.name, one.value, one.reason) for one in job.plan.choices}
    for wrong, said in ((0, "must be from 1"), (-1, "must be from 1"), (5, "--threads must be from 1 to 4, not 5")):
        with pytest.raises(UsageError, match=said):
            planned(photos, threads=wrong)


def test_a_run_computes_with_them_and_so_does_its_resumption(photos, tmp_path, monkeypatch):
    there = machine(monkeypatch, 1.0, 4.0)
    seen: list[int] = []

    class Stop(Callback):
        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            seen.append(torch.get_num_threads())
            if len(seen) == 1:
                raise KeyboardInterrupt

    with pytest.raises(Interrupted):
        train(photos, tmp_path / "run", callbacks=[Stop()])
    assert there[-1] == 2, "as before"
    assert json.loads((tmp_path / "run/config.json").read_text())["run"]["threads"] == 1
    machine(monkeypatch, 1.0, 0.5)
    vitral.train(out=str(tmp_path / "run"), resume=True, quiet=True, callbacks=[Stop()])
    assert set(seen) == {1}


def test_trial_steps_are_timed(photos):
    (seconds,) = step_seconds(planned(photos), [1], 4)
    assert 0 < seconds < 5
