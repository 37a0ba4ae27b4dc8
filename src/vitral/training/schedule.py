"""The learning rate as a function of the step."""

from __future__ import annotations

import math

from vitral.training.run import Run


def learning_rate(run: Run, step: int, steps_per_epoch: int) -> float:
    """Linear warm-up over `run.warmup` epochs, then constant, or falling by cosine or line to `min_lr`, which the step
    after the last would have.
    """
    warmup = min(round(run.warmup * steps_per_epoch), run.epochs * steps_per_epoch - 1)
    if step < warmup:
        return run.peak_lr * (step + 1) / warmup
    done = (step - warmup) / max(run.epochs * steps_per_epoch - warmup, 1)
    fall = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[run.schedule]
    return run.peak_lr * (run.min_lr + (1 - run.min_lr) * fall)
