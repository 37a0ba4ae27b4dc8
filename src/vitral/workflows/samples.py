"""Sample images of a run, as its network sees them in training."""

from __future__ import annotations

from itertools import islice

import numpy as np
import torch

from vitral.data.canvas import from_canvases
from vitral.data.loader import Batches
from vitral.data.text import decode
from vitral.device import seeded


def describe(label: np.ndarray, names: tuple[str, ...]) -> str:
    """Return the labels of an image as text: its class, its labels, its numbers, or its text."""
    if label.ndim == 0:
        return names[int(label)]
    if label.dtype == np.int64:
        return decode(label.tolist(), names)
    if label.dtype == np.uint8:
        return ", ".join(name for name, has in zip(names, label, strict=True) if has) or "no label"
    return ", ".join(f"{name} {value:.4g}" for name, value in zip(names, label, strict=True))


def training_samples(batches: Batches, classes: tuple[str, ...], count: int) -> list[tuple[np.ndarray, str]]:
    """Augment the first `count` training images of the first epoch: uint8 (H, W, C) with their labels.

    Mixup, CutMix and random erasing are left out: they act on standardized images, whose labels they mix.
    """
    if batches.augmentation is None:
        return []
    (batch,) = islice(batches.epoch(0), 1)
    some = batch.images[:count]
    parts = [image[None] for image in from_canvases(some)] if batches.preprocessing.native else [some]
    with seeded(batches.seed), torch.no_grad():
        pixels = [image for part in parts for image in batches.augmentation.pixels(part)]
    images = [image.permute(1, 2, 0).cpu().numpy() for image in pixels]
    texts = [describe(label, classes) for label in batch.labels[:count].cpu().numpy()]
    return list(zip(images, texts, strict=True))
