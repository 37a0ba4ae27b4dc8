"""How fast a run goes on this machine, by a few of its own steps: for `--minutes`, and whether pictures keep up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from vitral.data.loader import Batch
from vitral.device import keep_freed_memory
from vitral.model import summarize
from vitral.recipes.learning import begin, objective_of
from vitral.training.optimizers import OptimizerSet
from vitral.training.schedule import computed_share
from vitral.training.step import WARM_UP, Unwatched, step_of

if TYPE_CHECKING:
    from vitral.recipes.planning import Job

KEPT_BACK = 0.05
"""Share of the time that is left for what the trial does not see: saving, a machine that slows down."""
ENOUGH = 0.95
"""Share of a run's speed from which on its pictures count as coming fast enough."""
_OPERATIONS = 1e12
"""Of a step, at most, that tells whether pictures keep up on a processor: some seconds of it, however large the run."""
_STEPS, _SECONDS = 12, 3.0  # of a trial; the first steps are not counted
_FIRST = 2


def epochs_within(job: Job, minutes: float) -> tuple[int, str]:
    """How many epochs of a run, training and validation, fit into the time, at least one; and how that was found.

    Reading the pictures and the report at the end come on top, as in the seconds that a run tells.
    """
    step, look = seconds_a_picture(job)
    counts = {name: len(split) for name, split in job.dataset.splits.items()}
    share = 1.0
    if job.run.start_size is not None:
        share = computed_share(job.run, job.config.patch)  # type: ignore[union-attr]  # a ResNet's pictures do not grow
    epoch = counts["train"] * share * step + counts.get("val", 0) * look
    epochs = max(1, int(60 * minutes * (1 - KEPT_BACK) / epoch))
    told = f"an epoch takes {epoch:.3g} s here, by a trial of some steps"
    if epoch > 60 * minutes:
        told = f"even one takes {epoch / 60:.3g} minutes here, by a trial of some steps"
    return epochs, told


def keeps_up(job: Job, decoding_rate: float) -> tuple[bool, str]:
    """Whether pictures that are decoded in every epoch leave a run `ENOUGH` of the speed that it has on pictures at
    hand, and a sentence about it. `decoding_rate` is pictures a second by all cores.
    """
    on_cpu = job.machine.device.type == "cpu"
    at_most = max(1, int(_OPERATIONS / (3 * summarize(job.config).flops))) if on_cpu else None
    learning = 1 / seconds_a_picture(job, at_most)[0]
    if on_cpu:  # the same cores do one and the other
        reached = 1 / (1 / learning + 1 / decoding_rate)
    else:
        reached = min(learning, decoding_rate)
    told = f"the network learns from {learning:,.3g} pictures a second, by a trial of some steps"
    if reached >= ENOUGH * learning:
        return True, f"{told}: decoding keeps up"
    return False, f"{told}; decoding lets it reach {reached / learning:.0%} of that"


def seconds_a_picture(job: Job, at_most: int | None = None) -> tuple[float, float]:
    """Seconds that a picture takes in training and in validation: medians of steps on random pictures, with random
    weights, on this run's network, batch, augmentation, precision and device; `at_most` so many pictures in a batch.
    """
    run, machine = job.run, job.machine
    if machine.device.type == "cpu":
        keep_freed_memory()
    with torch.random.fork_rng([machine.device] if machine.device.type == "cuda" else []):
        model = begin(job, whitened=False)
        optimizer = OptimizerSet(model, run)
        learn, batch = step_of(model, optimizer, objective_of(job), machine, run), _noise(job, at_most)

        def step() -> None:
            model.train()
            loss, _ = learn(batch, Unwatched(), lr=0.0)
            loss.item()  # waits for the device

        @torch.inference_mode()
        def look() -> None:
            model.eval()
            with machine.autocast():
                model(run.preprocessing.standardise(batch.images)).sum().item()

        first = WARM_UP + 1 if run.graphs else _FIRST  # until steps are recorded
        return _median(step, first) / len(batch.indices), _median(look) / len(batch.indices)


def _noise(job: Job, at_most: int | None) -> Batch:
    count = min(job.run.batch_size, len(job.dataset["train"]), at_most or job.run.batch_size)
    pixels = torch.randint(0, 256, (count, job.run.channels, *job.run.size), dtype=torch.uint8)
    labels = torch.randint(len(job.dataset.classes), (count,))
    device = job.machine.device
    return Batch(pixels.to(device), labels.to(device), np.arange(count))


def _median(program: Callable[[], None], first: int = _FIRST) -> float:
    """Seconds of a call, by as many as a trial has time for, without the `first` ones."""
    taken: list[float] = []
    while len(taken) < first + 1 or (len(taken) < _STEPS and sum(taken) < _SECONDS):
        started = time.perf_counter()
        program()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[first:])
