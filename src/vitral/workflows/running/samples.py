"""Sample images of a run, as its network sees them in training."""

from __future__ import annotations

import numpy as np
import torch

from vitral.data import DataSet
from vitral.data.images.canvas import from_canvases
from vitral.data.loader import Batches
from vitral.device import seeded


def training_samples(batches: Batches, dataset: DataSet, count: int) -> list[tuple[np.ndarray, str]]:
    """Augment the first `count` training images of the first epoch: uint8 (H, W, C) with their labels.

    Mixup, CutMix and random erasing are left out: they act on standardized images, whose labels they mix.
    """
    if batches.augmentation is None:
        return []
    batch = next(iter(batches.epoch(0)))
    some = batch.images[:count]
    parts = [image[None] for image in from_canvases(some)] if batches.preprocessing.native else [some]
    with seeded(batches.seed), torch.no_grad():
        pixels = [image for part in parts for image in batches.augmentation.pixels(part)]
    images = [image.permute(1, 2, 0).cpu().numpy() for image in pixels]
    texts = [dataset.targets.describe(label, dataset.classes) for label in batch.labels[:count].cpu().numpy()]
    return list(zip(images, texts, strict=True))
