"""What follows from the step alone: the learning rate, and the size of the pictures while it grows."""

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
    done = min(1.0, (step - warmup) / max(run.epochs * steps_per_epoch - warmup, 1))  # pictures may have gone since
    fall = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[run.schedule]
    return run.peak_lr * (run.min_lr + (1 - run.min_lr) * fall)


def image_size(run: Run, patch: tuple[int, int], step: int, steps_per_epoch: int) -> tuple[int, int]:
    """Height and width at which training pictures are computed: each of `sizes` for as many steps in the first two
    thirds of training, the full size in the last third.
    """
    found = sizes(run, patch)
    growing = len(found) - 1
    return found[min(3 * step * growing // (2 * run.epochs * steps_per_epoch), growing)]


def sizes(run: Run, patch: tuple[int, int]) -> list[tuple[int, int]]:
    """Heights and widths from `run.start_size` to the full size, the longer way a patch at a time (EfficientNetV2's
    progressive learning, arXiv 2104.00298).
    """
    start, full = run.start, run.size
    count = max((b - a) // p for a, b, p in zip(start, full, patch, strict=True))
    growing = [
        tuple(a + p * round((b - a) // p * k / count) for a, b, p in zip(start, full, patch, strict=True))
        for k in range(count)
    ]
    return [*growing, full]  # type: ignore[list-item]  # two sides each


def computed_share(run: Run, patch: tuple[int, int]) -> float:
    """Pixels that training computes, as a share of those at full size."""
    *growing, full = (height * width for height, width in sizes(run, patch))
    return (2 / 3 * sum(growing) / len(growing) + full / 3) / full if growing else 1.0
