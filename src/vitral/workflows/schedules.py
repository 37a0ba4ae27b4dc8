"""Epochs of a run in execution that are planned again for `--minutes`."""

from __future__ import annotations

from collections.abc import Callable

from vitral.console import duration
from vitral.pretraining.methods import METHODS
from vitral.training.loop import State
from vitral.training.plan import Choice
from vitral.training.schedule import planned_epochs
from vitral.training.timing import plan_again
from vitral.workflows.saving import Running


def replanning(running: Running) -> Callable[[State], int | None]:
    """Return the function that plans the epochs again for `--minutes`, and prints it."""
    job, run = running.job, running.job.run
    if run.minutes is None or run.recipe in METHODS:  # the schedules of pretraining are fixed when it begins
        return lambda state: None
    time = duration(60 * run.minutes)

    def again(state: State) -> int | None:
        epochs = plan_again(run, state.history, job.plan.most_epochs)
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
