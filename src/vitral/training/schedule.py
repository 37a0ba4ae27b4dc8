"""The epochs of a run, and its learning rate as a function of the step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vitral.training.options import Run

if TYPE_CHECKING:
    from vitral.training.callbacks import Epoch


def planned_epochs(run: Run, history: Sequence[Epoch]) -> int:
    """Return the epochs of a run that has this history: those of its plan, or of the last time that it was planned
    again, for `--minutes`.
    """
    return int(next((line["epochs"] for line in reversed(history) if "epochs" in line), run.epochs))


def as_planned(run: Run, history: Sequence[Epoch]) -> Run:
    """Return the run with the epochs that it has after this history."""
    epochs = planned_epochs(run, history)
    return run if epochs == run.epochs else dataclasses.replace(run, epochs=epochs)


def learning_rate(run: Run, step: int, steps_per_epoch: int) -> float:
    """Linear warm-up over `run.warmup` epochs, then constant, or cosine or linear decay to `min_lr`.

    The step after the last one would reach `min_lr`.
    """
    warmup = min(round(run.warmup * steps_per_epoch), run.epochs * steps_per_epoch - 1)
    if step < warmup:
        return run.peak_lr * (step + 1) / warmup
    # at most 1: a resumed run may have fewer images, and so fewer steps, than before
    done = min(1.0, (step - warmup) / max(run.epochs * steps_per_epoch - warmup, 1))
    fall = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[run.schedule]
    return run.peak_lr * (run.min_lr + (1 - run.min_lr) * fall)
