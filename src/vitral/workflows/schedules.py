"""Schedules of a run in execution: the size of growing images, and epochs that are planned again for `--minutes`."""

from __future__ import annotations

import math
from collections.abc import Callable

from vitral.console import duration
from vitral.data.loader import Batches
from vitral.pretraining.methods import METHODS
from vitral.training.loop import State
from vitral.training.options import Run
from vitral.training.plan import Choice
from vitral.training.schedule import computed_share, image_size, planned_epochs
from vitral.training.timing import plan_again
from vitral.workflows.job import Job
from vitral.workflows.saving import Running


def size_schedule(
    job: Job, train: Batches, planned: Callable[[], Run] | None = None
) -> Callable[[int], tuple[int, int]] | None:
    """Return the function from a step to the height and width of training images; None if they do not grow.

    `planned` returns the run with the epochs that it has now.
    """
    run, patch = job.run, getattr(job.config, "patch", None)
    if run.start_size is None or patch is None:
        return None
    return lambda step: image_size(planned() if planned else run, patch, step, math.ceil(len(train) / run.accumulate))


def replanning(running: Running) -> Callable[[State], int | None]:
    """Return the function that plans the epochs again for `--minutes`, and prints it."""
    job, run = running.job, running.job.run
    if run.minutes is None or run.recipe in METHODS:  # the schedules of pretraining are fixed when it begins
        return lambda state: None
    patch, time = getattr(job.config, "patch", None), duration(60 * run.minutes)
    growth = computed_share(run, patch) if run.start_size is not None and patch else 1.0

    def again(state: State) -> int | None:
        epochs = plan_again(run, state.history, job.plan.most_epochs, growth)
        if epochs is not None and epochs != (before := planned_epochs(run, state.history)):
            line = f"planned again: {epochs} epochs instead of {before}, for {time}"
            running.console.print(line, highlight=False, soft_wrap=True)
        return epochs

    return again


def planned_again(state: State) -> tuple[Choice, ...]:
    """Return the choices of epochs that were made during training."""
    return tuple(
        Choice("epochs, planned again", str(line["epochs"]), f"measured until the end of epoch {line['epoch']}")
        for line in state.history if "epochs" in line
    )  # fmt: skip
