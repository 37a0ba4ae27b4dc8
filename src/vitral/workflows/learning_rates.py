"""`vitral train --find-lr`: a range test of the learning rate (Smith 2015, arXiv 1506.01186)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from rich.console import Console

from vitral.console import counting
from vitral.data.loader import Batches
from vitral.device import cpu_threads, global_generators, seed_everything
from vitral.distributed.environment import launched
from vitral.errors import TrainingError, UsageError
from vitral.training.optimizer_set import OptimizerSet, train_mode
from vitral.training.step import NoMonitor, Step
from vitral.wording import flag
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.memory import out_of_memory_reported
from vitral.workflows.planning.plan import plan_run
from vitral.workflows.running.build import initial_model, objective_of
from vitral.workflows.running.execute import TRAINERS, _readable_batches

STEPS = 100
"""Optimizer steps of a test."""
BELOW, ABOVE = 300.0, 100.0
"""The test goes from the plan's rate divided by `BELOW` to the rate times `ABOVE`."""
SMOOTHING = 0.9
"""Decay of the averaged loss."""
DIVERGED = 4.0
"""Multiple of the lowest averaged loss, above the loss at the start, at which the test ends."""
_LEAST = 10
"""Fewest steps from which a rate is suggested."""
_WINDOW = 5
"""Steps to either side over which a slope is fitted."""

RULE = "where the averaged loss falls fastest over the logarithm of the rate, before its lowest point"


@dataclass(frozen=True, eq=False)
class RangeTest:
    """Losses over learning rates that grow from step to step, and the rate that they suggest."""

    data: str
    model: str
    optimizer: str
    planned: float
    """The plan's learning rate, as `--lr` takes it."""
    rates: np.ndarray
    """Learning rate of each step (n,), growing by a constant factor."""
    losses: np.ndarray
    """Training loss of each step (n,), before it."""
    averaged: np.ndarray
    """The losses, averaged exponentially and corrected for the start (n,)."""
    scale: float
    """`--lr` divided by the learning rate of a step; not 1 with `--lr-batch`."""
    diverged: bool
    """True if the loss grew so much that the test ended before its last rate."""

    @property
    def suggested(self) -> float | None:
        """The suggested `--lr`, with two significant digits; None if the loss falls nowhere."""
        place = steepest(self.rates, self.averaged)
        return None if place is None else float(f"{self.rates[place] * self.scale:.2g}")

    @property
    def lowest(self) -> float:
        """The rate of the lowest averaged loss, as `--lr`; training at it is about to diverge."""
        return float(self.rates[int(self.averaged.argmin())] * self.scale)

    def to_json(self) -> dict[str, object]:
        return {
            "data": self.data,
            "model": self.model,
            "optimizer": self.optimizer,
            "planned": self.planned,
            "suggested": self.suggested,
            "rule": RULE,
            "lowest": self.lowest,
            "diverged": self.diverged,
            "steps": [
                {"lr": float(rate * self.scale), "loss": float(loss), "averaged": float(mean)}
                for rate, loss, mean in zip(self.rates, self.losses, self.averaged, strict=True)
            ],
        }


def find_lr(given: Mapping[str, object], console: Console) -> RangeTest:
    """Plan a run and train a copy of its network for some steps, at a rate that grows from each to the next.

    Nothing is saved: neither the run folder nor the initial weights are touched. Raises the errors of `vitral.train`.
    """
    if launched():
        raise UsageError("--find-lr is for one process", hint="leave out --nproc, or torchrun")
    return find_lr_of(plan_run(dict(given)), console)


def find_lr_of(job: Job, console: Console) -> RangeTest:
    """Test the rates of a planned run, as `find_lr` does."""
    if job.run.recipe in TRAINERS:
        why = f"{flag('recipe')} {job.run.recipe} does not train in steps"
        raise UsageError("there is no learning rate to find", why=why, hint="leave out --find-lr")
    job, every = _readable_batches(job, console)
    try:
        reported = out_of_memory_reported(job.run, job.config, by_steps=True)
        with global_generators(), cpu_threads(job.run.threads), reported:
            return range_test(job, every["train"], console)
    finally:
        for batches in every.values():
            batches.close()


def range_test(job: Job, train: Batches, console: Console) -> RangeTest:
    """Measure the loss at `STEPS` growing rates, until it diverges."""
    run = job.run
    seed_everything(run.seed)
    model = initial_model(job)
    model.checkpointing = run.checkpointing
    step = Step(model, OptimizerSet(model, run), objective_of(job), job.machine, run)
    rates = np.geomspace(run.peak_lr / BELOW, run.peak_lr * ABOVE, STEPS)
    losses: list[float] = []
    batches = itertools.chain.from_iterable(map(train.epoch, itertools.count()))  # of epoch after epoch
    train_mode(model)
    with counting(console, "finding the rate", STEPS) as progress:
        for number, rate in enumerate(rates):
            seed_everything(run.seed, 0, number)
            parts = [next(batches) for _ in range(run.accumulate)]
            values = [
                step(batch, NoMonitor(), parts=run.accumulate, lr=float(rate) if batch is parts[-1] else None)[0]
                for batch in parts
            ]
            losses.append(float(sum(map(float, values))) / run.accumulate)
            progress(1)
            if has_diverged(losses):
                break
    finite = losses if math.isfinite(losses[-1]) else losses[:-1]
    if not finite:
        raise TrainingError(
            "the loss is not finite at any rate", why="damaged images or weights", hint="--precision fp32"
        )
    return RangeTest(
        run.data,
        run.model,
        run.optimizer,
        run.lr,
        rates[: len(finite)],
        np.array(finite),
        averaged(finite),
        run.lr / run.peak_lr,
        len(finite) < STEPS,
    )


def averaged(losses: list[float] | np.ndarray) -> np.ndarray:
    """Average exponentially, corrected for the start as in Adam: the first value is the first loss."""
    mean, found = 0.0, list[float]()
    for number, loss in enumerate(losses, 1):
        mean = SMOOTHING * mean + (1 - SMOOTHING) * float(loss)
        found.append(mean / (1 - SMOOTHING**number))
    return np.array(found)


def has_diverged(losses: list[float]) -> bool:
    """True if the last loss is not finite, or the averaged one is far above its lowest value and its start."""
    if not math.isfinite(losses[-1]):
        return True
    means = averaged(losses)
    return len(losses) > _LEAST and float(means[-1]) > max(DIVERGED * float(means.min()), 1.2 * float(means[0]))


def steepest(rates: np.ndarray, means: np.ndarray) -> int | None:
    """Return the step at which the averaged loss falls fastest over log(rate), by lines fitted to its neighbors; only
    steps before the lowest point count. None if there are too few steps, or the loss falls nowhere.
    """
    last = int(means.argmin())
    if len(means) < _LEAST or last < _WINDOW:
        return None
    x = np.log(rates)
    slopes = [
        np.polyfit(x[max(0, k - _WINDOW) : k + _WINDOW + 1], means[max(0, k - _WINDOW) : k + _WINDOW + 1], 1)[0]
        for k in range(1, last + 1)
    ]
    place = int(np.argmin(slopes))
    return place + 1 if slopes[place] < 0 else None
