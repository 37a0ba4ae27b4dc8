"""Small pictures for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

MakePictures = Callable[..., Path]


def noise(seed: int, size: tuple[int, int] = (8, 10), channels: int = 3) -> np.ndarray:
    """A picture (H, W, channels), or (H, W) for one channel, that differs for every seed."""
    shape = size if channels == 1 else (*size, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
