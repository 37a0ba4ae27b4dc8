"""The learning rate by the step."""

from __future__ import annotations

import numpy as np
import pytest

from vitral.training.options import Run
from vitral.training.schedule import learning_rate


def rates(run: Run, steps: int = 20) -> np.ndarray:
    return np.array([learning_rate(run, step, steps) for step in range(run.epochs * steps)])


def test_warm_up_is_a_line_to_the_peak():
    found = rates(Run(epochs=10, warmup=2.0, lr=0.5))
    assert found[:40] == pytest.approx(0.5 * np.arange(1, 41) / 40)
    assert found.max() == found[39] == 0.5
    assert (np.diff(found[40:]) < 0).all()


def test_cosine_falls_to_zero():
    found = rates(Run(epochs=10, warmup=0.0, lr=1.0))
    assert found[0] == 1.0
    assert found == pytest.approx((1 + np.cos(np.pi * np.arange(200) / 200)) / 2)
    assert found[100] == pytest.approx(0.5)
    assert 0 < found[-1] < 1e-3


def test_linear_falls_to_its_share():
    found = rates(Run(epochs=10, warmup=0.0, lr=1.0, schedule="linear", min_lr=0.1))
    assert np.diff(found) == pytest.approx(np.full(199, -0.9 / 200))
    assert found[-1] == pytest.approx(0.1, abs=0.01)


def test_constant_stays():
    assert (rates(Run(epochs=3, warmup=1.0, lr=0.2, schedule="constant"))[20:] == 0.2).all()


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_short_runs_and_long_warm_ups_stay_in_bounds(schedule):
    for epochs, warmup, steps in ((1, 0.0, 1), (1, 5.0, 1), (2, 5.0, 3), (1, 0.01, 1)):
        found = rates(Run(epochs=epochs, warmup=warmup, schedule=schedule, lr=1.0), steps)
        assert (found > 0).all()
        assert (found <= 1).all()


def test_scaled_with_the_batch():
    assert rates(Run(epochs=2, warmup=1.0, lr=1.0, lr_batch=256, batch_size=64)).max() == 0.25


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_rate_is_never_negative(schedule):
    """A run resumed with fewer images may be past its last step."""
    run = Run(epochs=2, schedule=schedule, warmup=0.0, min_lr=0.1, lr=1.0)
    assert learning_rate(run, 500, 10) == pytest.approx(0.1)
