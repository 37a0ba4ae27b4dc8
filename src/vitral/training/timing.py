"""Keep the word of `--minutes`: plan the epochs again once real ones have been measured.

A trial before training measures some steps, on a machine that may be busy at that moment. Once a tenth of the time or a
quarter of the epochs is over, the number of epochs is set anew, in either direction. After a third of the time it is
corrected once, if it would miss the time by more than a twentieth: the first epoch takes longer than the others.
Afterwards it is only lowered, if the run would end more than an epoch too late. A new number is a field of the epoch's
line of metrics, which checkpoints contain: a resumed run has the same schedule.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from vitral.training.callbacks import Epoch
from vitral.training.options import Run
from vitral.training.schedule import planned_epochs

MEASURED, CORRECTED = 0.1, 1 / 3
"""Shares of the time after which the epochs are planned again."""
EARLY = 0.25
"""Share of the planned epochs after which they are, at the latest: a schedule that has ended cannot go on."""
WITHIN = 0.1
"""An epoch more is planned, beyond the time by at most this share of it, if without it more than this share is left."""
_RECENT = 3
"""Last epochs that tell if a run will be late."""


def plan_again(run: Run, history: Sequence[Epoch], most: int | None = None, seconds: float | None = None) -> int | None:
    """Return the new total number of epochs after the last one in `history`; None to leave it.

    `most` is the recipe's limit. `seconds` are for training and validation, by default all of the run's minutes.
    """
    assert run.minutes is not None
    target, planned, epoch = seconds or 60 * run.minutes, planned_epochs(run, history), history[-1]["epoch"]
    spent = sum(line["seconds"] for line in history)
    before = spent - history[-1]["seconds"]

    def measured(seconds: float, epochs: int) -> bool:
        return seconds >= MEASURED * target or epochs >= EARLY * run.epochs

    if not measured(spent, epoch):
        return None
    first, corrects = not measured(before, epoch - 1), before < CORRECTED * target <= spent
    # the first epoch takes longer: caches, memory, kernels
    lines = (history[1:] or history) if first or corrects else history[-_RECENT:]
    unit = max(statistics.median(line["seconds"] - line.get("compile_seconds", 0.0) for line in lines), 1e-9)
    late = spent + unit * _left(history, planned) - target
    if not (first or late > unit or (corrects and abs(late) > WITHIN / 2 * target)):
        return None
    limit = (most or planned) if first or corrects else planned
    epochs = max(epoch, min(_fitting(target, history, unit), limit))
    return epochs if epochs != planned else None


def _left(history: Sequence[Epoch], epochs: int) -> int:
    """Return how many of these epochs are left."""
    return max(0, epochs - len(history))


def _fitting(target: float, history: Sequence[Epoch], unit: float) -> int:
    """Return the total number of epochs that comes closest to the `target` without going beyond `WITHIN`."""
    spent = sum(line["seconds"] for line in history)
    count = math.floor((target - spent) / unit + len(history) + 1e-9)

    def total(epochs: int) -> float:
        return spent + unit * _left(history, epochs)

    more = target - total(count) > WITHIN * target and total(count + 1) <= (1 + WITHIN) * target
    return max(1, count + more)
