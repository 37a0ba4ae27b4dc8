"""Batches: from a split to what a training step reads.

A set that fits is decoded once and kept as uint8: in one tensor on the training device where no picture needs a
geometry of its own, else picture by picture. What does not fit streams through worker processes. The order of an epoch
is f(seed, epoch), the geometry of a picture f(seed, epoch, picture): nothing but a position has to be saved to resume.
"""

from __future__ import annotations

import contextlib
import math
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitral.data import Split
from vitral.data.transforms import Augmentation, Preprocessing, _channels_first
from vitral.device import cores, derive_seed, memory_bytes, seeded
from vitral.errors import ImageError

Residency = Literal["auto", "memory", "stream"]
Progress = Callable[[int], None]
"""Called with the number of pictures that were just decoded."""

MEMORY_SHARE = 0.25  # of the machine's memory (the GPU's, for a tensor there) that decoded pictures may take
_SAMPLED = 64  # pictures looked at to estimate the size of the decoded set
_WINDOW = 512  # pictures decoded ahead of the one that waits for them


@dataclass(frozen=True)
class Batch:
    """What a step reads: uint8 images (B, C, H, W) and labels (B,) on the device, and where they come from."""

    images: Tensor
    labels: Tensor
    indices: np.ndarray


class Batches:
    """The batches of a split, epoch by epoch.

    Training (`augmentation` given): a new order each epoch; an incomplete last batch is left out where there is a
    whole one. Evaluation: the split's own order, every picture once.
    """

    def __init__(
        self,
        split: Split,
        preprocessing: Preprocessing,
        *,
        batch_size: int,
        device: torch.device,
        augmentation: Augmentation | None = None,
        seed: int = 0,
        weights: np.ndarray | None = None,
        residency: Residency = "auto",
        workers: int | None = None,
        progress: Progress | None = None,
    ):
        self.split, self.preprocessing, self.augmentation = split, preprocessing, augmentation
        self.device, self.seed = device, seed
        self.batch_size = min(batch_size, len(split))
        self.weights = None if weights is None else torch.from_numpy(weights)
        self.labels = torch.from_numpy(np.ascontiguousarray(split.labels)).to(device)
        self.workers = max(1, min(cores() - 1, 16)) if workers is None else workers
        self.unreadable: list[tuple[int, ImageError]] = []
        """Pictures that could not be decoded; a batch with one of them would be wrong."""
        self._store = self._open_store(residency, progress or (lambda done: None))

    @property
    def residency(self) -> str:
        """Where the pictures are: on the device, in memory, or streamed."""
        if isinstance(self._store, Tensor):
            return f"{self._store.nbytes / 2**20:.0f} MiB of uint8 pixels on the {self.device.type}"
        if self._store.decoded is not None:
            return f"{sum(p.nbytes for p in self._store.decoded) / 2**20:.0f} MiB of decoded pixels in memory"
        return f"streamed by {self.workers} workers"

    @property
    def training(self) -> bool:
        """Whether batches are drawn in random order and augmented."""
        return self.augmentation is not None

    def __len__(self) -> int:
        """Batches in an epoch."""
        count = len(self.split) / self.batch_size
        return math.floor(count) if self.training else math.ceil(count)

    def order(self, epoch: int) -> np.ndarray:
        """Indices of the pictures of an epoch, in order: f(seed, epoch)."""
        if not self.training:
            return np.arange(len(self.split))
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        if self.weights is None:
            return torch.randperm(len(self.split), generator=generator).numpy()
        return torch.multinomial(self.weights, len(self.split), replacement=True, generator=generator).numpy()

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from the `start`-th on."""
        order = self.order(epoch)
        batches = [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(start, len(self))]
        if isinstance(self._store, Tensor):
            positions = torch.from_numpy(np.concatenate(batches) if batches else order[:0]).to(self.device)
            parts = positions.split(self.batch_size)
            for indices, position in zip(batches, parts, strict=bool(batches)):
                yield Batch(self._store[position], self.labels[position], indices)
            return
        for indices, images in zip(batches, self._stream(epoch, batches), strict=True):
            position = torch.from_numpy(indices).to(self.device)
            yield Batch(images.to(self.device, non_blocking=True), self.labels[position], indices)

    def _stream(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Tensor]:
        assert not isinstance(self._store, Tensor)
        loader: DataLoader[Any] = DataLoader(
            self._store,
            batch_sampler=[[(self.seed, epoch, int(i)) for i in indices] for indices in batches],
            num_workers=self.workers,
            worker_init_fn=_outlive_sigterm,
            pin_memory=self.device.type == "cuda",
        )
        yield from loader

    def _open_store(self, residency: Residency, progress: Progress) -> Tensor | _Pictures:
        """Decode every picture once: to keep it, or where the set is too large, to know that it can be read."""
        split, preprocessing = self.split, self.preprocessing
        pictures = _Pictures(split, preprocessing, self.augmentation)
        shape = (preprocessing.channels, *preprocessing.image_size)
        room = {"auto": MEMORY_SHARE, "memory": math.inf, "stream": 0.0}[residency]
        if not pictures.cropped and len(split) * math.prod(shape) < room * _total_bytes(self.device):
            images = torch.zeros(len(split), *shape, dtype=torch.uint8)
            for index, pixels in self._decoded(lambda i: preprocessing.geometry(pictures.pixels(i)), progress):
                images[index] = pixels
            return images.to(self.device)
        keep = _decoded_bytes(pictures) < room * memory_bytes()
        decoded = [torch.empty(0, dtype=torch.uint8)] * len(split)
        for index, pixels in self._decoded(pictures.decode, progress):
            if keep:
                decoded[index] = pixels
        pictures.decoded = decoded if keep else None
        return pictures

    def _decoded(self, decode: Callable[[int], Tensor], progress: Progress) -> Iterator[tuple[int, Tensor]]:
        """All pictures that can be read, decoded by threads a window at a time; the others go to `unreadable`."""

        def attempt(index: int) -> Tensor | ImageError:
            try:
                return decode(index)
            except ImageError as error:
                return error

        with ThreadPoolExecutor(cores()) as pool:
            for first in range(0, len(self.split), _WINDOW):
                indices = range(first, min(first + _WINDOW, len(self.split)))
                for index, found in zip(indices, pool.map(attempt, indices), strict=True):
                    if isinstance(found, ImageError):
                        self.unreadable.append((index, found))
                    else:
                        yield index, found
                progress(len(indices))


def _outlive_sigterm(_: int) -> None:
    """A job that is told to stop tells its whole group: the trainer needs its workers to finish the step and save."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class _Pictures(Dataset[Tensor]):
    """One picture at a time, with its own geometry: (seed, epoch, index) to uint8 (C, height, width)."""

    def __init__(self, split: Split, preprocessing: Preprocessing, augmentation: Augmentation | None):
        self.split, self.preprocessing, self.augmentation = split, preprocessing, augmentation
        self.decoded: list[Tensor] | None = None

    def __getitem__(self, position: tuple[int, int, int]) -> Tensor:
        seed, epoch, index = position
        pixels = (self.decode(index) if self.decoded is None else self.decoded[index]).permute(1, 2, 0)
        if self.augmentation is None:
            return self.preprocessing.geometry(pixels).contiguous()
        with seeded(seed, epoch, index):
            return self.augmentation.geometry(pixels, self.preprocessing).contiguous()

    @property
    def cropped(self) -> bool:
        """Whether each picture is cropped anew in every epoch."""
        return self.augmentation is not None and self.augmentation.crop == "random-resized"

    def pixels(self, index: int) -> np.ndarray:
        return self.split.image(index, self.preprocessing.channels)

    def decode(self, index: int) -> Tensor:
        """Pixels (C, H, W). Where they are to be cropped, at most twice what is read, which leaves room; the same
        whether they are kept or streamed, so that a run does not depend on the memory at hand.
        """
        image = _channels_first(self.pixels(index))
        if not self.cropped:
            return image.contiguous()
        scale = max(2 * n / m for n, m in zip(self.preprocessing.image_size, image.shape[-2:], strict=True))
        if scale >= 1:
            return image.contiguous()
        return self.preprocessing.resized(image, tuple(round(n * scale) for n in image.shape[-2:]))


def _total_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory_bytes()


def _decoded_bytes(pictures: _Pictures) -> float:
    """The set's size after `decode`, estimated from pictures spread over it."""
    count = len(pictures.split)
    sample = np.linspace(0, count - 1, min(count, _SAMPLED)).astype(int)
    sizes = []
    for index in sample:
        with contextlib.suppress(ImageError):
            sizes.append(pictures.decode(int(index)).nbytes)
    return count * float(np.mean(sizes)) if sizes else 0.0
