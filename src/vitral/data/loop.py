"""Batches for a training loop of one's own: augmented, standardized images with their labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from vitral.data.dataset import DataSet, Loader
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.device import seeded, without_autocast
from vitral.errors import UsageError


class LoopBatches(Loader):
    """`Loader` by `Batches`."""

    def __init__(self, batches: Batches, classes: int):
        self.batches, self.classes = batches, classes
        self.epoch = 0

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
) -> LoopBatches:
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
    return LoopBatches(batches, len(dataset.classes))


def preprocessing_of(image_size: int | tuple[int, int], channels: int) -> Preprocessing:
    """Return the preprocessing of a newly created network."""
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    return replace(Preprocessing(size), channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
