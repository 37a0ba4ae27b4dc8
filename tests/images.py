"""Small images for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter

MakeImages = Callable[..., Path]


def noise(seed: int, size: tuple[int, int] = (8, 10), channels: int = 3) -> np.ndarray:
    """An image (H, W, channels), or (H, W) for one channel, that differs for every seed."""
    shape = size if channels == 1 else (*size, channels)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def scene(seed: int, size: tuple[int, int] = (72, 96)) -> Image.Image:
    """Draw a photograph of nothing: blurred noise, with coarse and fine structure."""
    coarse = Image.fromarray(noise(seed, (size[0] // 8, size[1] // 8))).resize(size[::-1], Image.Resampling.BICUBIC)
    fine = Image.fromarray(noise(seed + 10_000, size)).filter(ImageFilter.GaussianBlur(2))
    return Image.blend(coarse, fine, 0.4)
