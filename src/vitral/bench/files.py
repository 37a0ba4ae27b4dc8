"""Training from picture files: the pictures, and how users of torchvision read them."""

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

from vitral.bench.subject import Subject
from vitral.data import DataSet, Split
from vitral.data.intake import read_image
from vitral.data.loader import Batch, Batches, Residency
from vitral.data.transforms import Augmentation, Preprocessing
from vitral.errors import UsageError

AUGMENTATION = Augmentation(crop="random-resized", flip=True)
"""What everyone does to the pictures, as ImageNet is trained on."""

STEPS = {"cuda": 32}
"""Training steps of one pass over the pictures, by device; elsewhere `FEW`."""
FEW = 4


def some_pictures(dataset: DataSet, subject: Subject, batch: int, device: str) -> Split:
    """Training pictures for one pass, whole batches of them, spread evenly over the set.

    Raises `UsageError` where there are fewer than a batch, or more classes than the network has.
    """
    split = dataset["train"]
    if len(split) < batch:
        why = f"a batch is {batch}"
        raise UsageError(
            f"only {len(split)} training pictures", where=dataset.source, why=why, hint="a smaller --batch"
        )
    if len(dataset.classes) > subject.config.classes:
        why = f"{subject.name} tells {subject.config.classes} apart"
        raise UsageError(f"{len(dataset.classes)} classes", where=dataset.source, why=why, hint="other --data")
    pictures = batch * min(len(split) // batch, STEPS.get(device, FEW))
    return split.select(np.linspace(0, len(split) - 1, pictures).round().astype(int))


class Ours:
    """The library's own batches, opened when they are first asked for; every pass is another epoch."""

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
            "split": split, "preprocessing": preprocessing, "batch_size": batch, "device": device,
            "augmentation": AUGMENTATION, "residency": kept, "workers": workers,
        }  # fmt: skip
        self.batches: Batches | None = None
        self.numbers = count()

    def __iter__(self) -> Iterator[Batch]:
        if self.batches is None:
            self.batches = Batches(**self.arguments)
            if self.batches.unreadable:
                raise self.batches.unreadable[0][1]
        return self.batches.epoch(next(self.numbers))


class Theirs:
    """What torchvision's documentation advises: uint8 tensors through v2, in workers that stay, as many as ours."""

    def __init__(self, split: Split, preprocessing: Preprocessing, batch: int, device: torch.device, workers: int):
        self.device = device
        self.loader = DataLoader(
            _Files(split, preprocessing), batch_size=batch, shuffle=True, drop_last=True, num_workers=workers,
            persistent_workers=workers > 0, pin_memory=device.type == "cuda",
        )  # fmt: skip

    def __iter__(self) -> Iterator[Batch]:
        for pair in self.loader:
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in pair)
            yield Batch(images, labels, np.empty(0, np.int64))


class _Files(Dataset[tuple[Tensor, int]]):
    """torchvision's `ImageFolder` for any source of pictures: number to a standardised float (C, H, W) and a label."""

    def __init__(self, split: Split, preprocessing: Preprocessing):
        self.split, self.channels = split, preprocessing.channels
        self.transform = v2.Compose([
            v2.RandomResizedCrop(preprocessing.image_size, scale=(AUGMENTATION.crop_area, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(preprocessing.mean, preprocessing.std),
        ])  # fmt: skip

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(self._pixels(index)), int(self.split.labels[index])

    def _pixels(self, index: int) -> Tensor:
        """uint8 (C, H, W), by torchvision's decoder; what that cannot read is read as ours is."""
        raw = self.split.raw(index)
        if isinstance(raw, bytes):
            from torchvision.io import ImageReadMode, decode_image  # deprecated since 0.29: may be gone one day

            mode = ImageReadMode.RGB if self.channels == 3 else ImageReadMode.GRAY
            with contextlib.suppress(RuntimeError):
                return decode_image(torch.frombuffer(bytearray(raw), dtype=torch.uint8), mode)
        pixels = read_image(raw, name=self.split.names[index], channels=self.channels)
        return torch.from_numpy(pixels).permute(2, 0, 1)
