"""Training from image files: the images, vitral's loader and torchvision's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from vitral.bench.models import ModelUnderTest
from vitral.data import DataSet, Split
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.decode import read_image
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch, Batches, Residency
from vitral.errors import UsageError

AUGMENTATION = Augmentation(crop="random-resized", flip=True)
"""Augmentation of all contenders, as usual for ImageNet."""

STEPS = {"cuda": 32}
"""Training steps of one pass over the images, by device; elsewhere `FEW`."""
FEW = 4


def some_images(dataset: DataSet, subject: ModelUnderTest, batch: int, device: str) -> Split:
    """Select training images for one pass: whole batches, spread evenly over the set.

    Raises `UsageError` for fewer images than a batch, or more classes than the network has.
    """
    split = dataset["train"]
    if len(split) < batch:
        why = f"a batch is {batch}"
        raise UsageError(
            f"only {len(split)} training images", where=dataset.source, why=why, hint="use a smaller --batch"
        )
    if len(dataset.classes) > subject.config.classes:
        why = f"{subject.name} has {subject.config.classes}"
        raise UsageError(
            f"{len(dataset.classes)} classes", where=dataset.source, why=why, hint="choose other images with --data"
        )
    images = batch * min(len(split) // batch, STEPS.get(device, FEW))
    return split.select(np.linspace(0, len(split) - 1, images).round().astype(int))


class VitralLoader:
    """vitral's batches, opened at the first pass; every pass is another epoch."""

    def __init__(
        self,
        split: Split,
        preprocessing: Preprocessing,
        batch: int,
        device: torch.device,
        workers: int,
        kept: Residency,
    ):
        self.arguments: dict[str, Any] = {
            "split": split,
            "preprocessing": preprocessing,
            "batch_size": batch,
            "device": device,
            "augmentation": AUGMENTATION,
            "residency": kept,
            "workers": workers,
        }
        self.batches: Batches | None = None
        self.numbers = count()

    def __iter__(self) -> Iterator[Batch]:
        if self.batches is None:
            self.batches = Batches(**self.arguments)
            if self.batches.unreadable:
                raise self.batches.unreadable[0][1]
        return self.batches.epoch(next(self.numbers))


class TorchvisionLoader:
    """Loader as in torchvision's documentation: uint8 tensors through v2, in persistent workers."""

    def __init__(self, split: Split, preprocessing: Preprocessing, batch: int, device: torch.device, workers: int):
        self.device = device
        self.loader = DataLoader(
            _Files(split, preprocessing),
            batch_size=batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )

    def __iter__(self) -> Iterator[Batch]:
        for pair in self.loader:
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in pair)
            yield Batch(images, labels, np.empty(0, np.int64))


class _Files(Dataset[tuple[Tensor, int]]):
    """torchvision's `ImageFolder` for any source of images: index to a standardized float (C, H, W) and a label."""

    def __init__(self, split: Split, preprocessing: Preprocessing):
        self.split, self.channels = split, preprocessing.channels
        self.transform = v2.Compose(
            [
                v2.RandomResizedCrop(preprocessing.image_size, scale=(AUGMENTATION.crop_area, 1.0), antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(preprocessing.mean, preprocessing.std),
            ]
        )

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self._pixels(index)), int(self.split.labels[index])

    def _pixels(self, index: int) -> Tensor:
        """Decode to uint8 (C, H, W) by torchvision; images that it cannot read are read by vitral."""
        raw = self.split.raw(index)
        if isinstance(raw, bytes):
            from torchvision.io import ImageReadMode, decode_image  # deprecated since 0.29: may be gone one day

            mode = ImageReadMode.RGB if self.channels == 3 else ImageReadMode.GRAY
            with contextlib.suppress(RuntimeError):
                return decode_image(torch.frombuffer(bytearray(raw), dtype=torch.uint8), mode)
        pixels = read_image(raw, name=self.split.names[index], channels=self.channels)
        return torch.from_numpy(pixels).permute(2, 0, 1)
