"""Batches for a training loop of one's own: augmented, standardized images with their labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from vitral.data.dataset import DataSet
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.device import seeded, without_autocast
from vitral.errors import UsageError


class Loader:
    """The batches of a split. Each iteration is one epoch: with training images the next one, in a new order.

    A batch is (images, labels): images (B, C, H, W) fp32, standardized, and labels (B,), or (B, K) of images that mixup
    or CutMix has mixed. A training batch that would be incomplete is dropped. Order and augmentation are a function of
    the seed and `epoch`, which you may set.
    """

    def __init__(self, batches: Batches, classes: int):
        self.batches, self.classes = batches, classes
        self.epoch = 0
        """Number of the next epoch."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch = self.epoch
        self.epoch += 1
        augmentation, preprocessing = self.batches.augmentation, self.batches.preprocessing
        for number, batch in enumerate(self.batches.epoch(epoch)):
            with seeded(self.batches.seed, epoch, number), without_autocast(batch.images.device):
                pixels = batch.images if augmentation is None else augmentation.pixels(batch.images)
                images, labels = preprocessing.standardize(pixels), batch.labels
                if augmentation is not None:
                    images, labels = augmentation.standardized(images, labels, self.classes)
            yield images, labels

    def close(self) -> None:
        """Stop the worker processes, if there are any."""
        self.batches.close()


def loader_of(
    dataset: DataSet,
    split: str,
    *,
    preprocessing: Preprocessing,
    batch_size: int,
    shuffle: bool,
    augmentation: Augmentation | None,
    device: str | torch.device,
    seed: int,
    workers: int | None,
) -> Loader:
    """Decode the images of a split once, and return its batches. Raises `ImageError` for an unreadable image."""
    if augmentation is not None and not shuffle:
        raise UsageError("augmentation needs shuffle=True", why="only training images are augmented")
    batches = Batches(
        dataset[split],
        preprocessing,
        batch_size=batch_size,
        device=torch.device(device),
        augmentation=(augmentation or Augmentation()) if shuffle else None,
        seed=seed,
        workers=workers,
    )
    if batches.unreadable:
        raise batches.unreadable[0][1]
    return Loader(batches, len(dataset.classes))


def preprocessing_of(image_size: int | tuple[int, int], channels: int) -> Preprocessing:
    """Return the preprocessing of a newly created network."""
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    return replace(Preprocessing(size), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
