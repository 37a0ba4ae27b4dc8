"""Batches: from a split to what a training step reads.

A set is decoded once and kept as uint8: in memory where it fits, else in the cache on disk; only what fits nowhere is
decoded again in every epoch. Where no picture needs a geometry of its own, all have one size, and a batch is a copy of
rows: of a tensor on the training device, or of the cache's file. Else worker processes make the pictures. The order of
an epoch is f(seed, epoch), the geometry of a picture f(seed, epoch, picture): nothing but a position has to be saved to
resume.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import os
import signal
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitral.data import Split
from vitral.data.cache import Entry, PixelCache, pixels_key, title_of
from vitral.data.kernels import expect, loaded, torchvision
from vitral.data.transforms import Augmentation, Preprocessing, _channels_first
from vitral.device import cores, derive_seed, memory_bytes, seeded, total_bytes
from vitral.errors import ImageError

Residency = Literal["auto", "memory", "cache", "stream"]
Progress = Callable[[int], None]
"""Called with the number of pictures that were just decoded."""

MEMORY_SHARE = 0.25  # of the machine's memory (the GPU's, for a tensor there) that decoded pictures may take
DISK_SHARE = 0.5  # of what is free on the cache's disk that an entry may take where nobody asked for it
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
        """`residency`: `memory`, `cache` or `stream`; `auto` is the first of them that has room. A cache that cannot be
        written becomes `stream`.
        """
        self.split, self.preprocessing, self.augmentation = split, preprocessing, augmentation
        self.device, self.seed = device, seed
        self.batch_size = min(batch_size, len(split))
        self.weights = None if weights is None else torch.from_numpy(weights)
        self.labels = torch.from_numpy(np.ascontiguousarray(split.labels)).to(device)
        self.workers = max(1, min(cores() - 1, 16)) if workers is None else workers
        self.unreadable: list[tuple[int, ImageError]] = []
        """Pictures that could not be decoded; a batch with one of them would be wrong."""
        self.residency = ""
        """Where the pictures are, how large, and why: a sentence without its full stop."""
        self.decoding_rate: float | None = None
        """Pictures a second that all cores decode, where they are decoded anew in every epoch."""
        self._crew: _Crew | None = None
        expect(len(split))  # now: else decoding is timed with it, and each worker that is forked imports its own
        if augmentation is not None and augmentation.by_torchvision:
            torchvision()
        self._store = self._open_store(residency, progress or (lambda done: None))

    def close(self) -> None:
        """End the worker processes, which else live as long as this object; another epoch begins new ones."""
        if self._crew is not None:
            self._crew.close()
            self._crew = None

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
        """The batches of an epoch from the `start`-th on. One epoch at a time: a new one ends the one before."""
        order = self.order(epoch)
        batches = [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(start, len(self))]
        if not batches:
            return
        # Copied once for the epoch: such a copy waits for all that the device has still to do.
        positions = torch.from_numpy(np.concatenate(batches)).to(self.device).split(self.batch_size)
        if isinstance(self._store, Tensor):
            for indices, position in zip(batches, positions, strict=True):
                yield Batch(self._store.index_select(0, position), self.labels[position], indices)
            return
        for indices, position, images in zip(batches, positions, self._made(epoch, batches), strict=True):
            yield Batch(images.to(self.device, non_blocking=True), self.labels[position], indices)

    def _made(self, epoch: int, batches: list[np.ndarray]) -> Iterator[Tensor]:
        """The images of these batches, made while the step computes."""
        assert not isinstance(self._store, Tensor)
        pinned = self.device.type == "cuda"
        if isinstance(self._store, Entry):
            entry = self._store
            return _one_ahead(lambda indices: entry.gather(indices, pinned=pinned), batches)
        if self._crew is None:
            self._crew = _Crew(self._store, self.workers, pinned=pinned)
        return self._crew.epoch(self.seed, epoch, batches)

    def _open_store(self, residency: Residency, progress: Progress) -> Tensor | Entry | _Pictures:
        """Decode every picture once: to keep it, or where there is no room, to know that it can be read. What is in the
        cache was decoded before.
        """
        pictures = _Pictures(self.split, self.preprocessing, self.augmentation)
        room = {"auto": MEMORY_SHARE, "memory": math.inf}.get(residency, 0.0)
        # even those of a GPU are put together in memory
        if pictures.shape and pictures.kept_bytes < room * min(memory_bytes(), total_bytes(self.device)):
            return self._tensor(pictures, pictures.shape, progress)
        cache = PixelCache() if residency in ("auto", "cache") else None
        key = pixels_key(self.split, pictures.settings) if cache else ""
        if cache and (entry := cache.find(key, len(self.split))):
            progress(len(self.split))
            return self._cached(pictures, entry, "read from")
        if room and pictures.decoded_bytes < room * memory_bytes():
            return self._in_memory(pictures, progress)
        self.residency = f"streamed by {_counted(self.workers)}"
        if cache:
            share = DISK_SHARE if residency == "auto" else 1.0
            if pictures.kept_bytes < share * cache.free_bytes:
                return self._built(pictures, cache, key, progress)
            room_needed = f"{_mib(pictures.kept_bytes)} needed, {_mib(cache.free_bytes)} free"
            self.residency += f": no room for the cache in {cache.folder} ({room_needed})"
        started = time.perf_counter()
        count = sum(1 for _ in self._decoded(pictures.decode, progress))
        self.decoding_rate = count / (time.perf_counter() - started)
        self.residency += f"; {self.decoding_rate:,.0f} a second are decoded by all cores"
        return pictures

    def _tensor(self, pictures: _Pictures, shape: tuple[int, int, int], progress: Progress) -> Tensor:
        images = torch.zeros(len(self.split), *shape, dtype=torch.uint8)
        for index, pixels in self._decoded(pictures.kept, progress):
            images[index] = pixels
        self.residency = f"{_mib(images.nbytes)} of uint8 pixels on the {self.device.type}"
        return images.to(self.device)

    def _in_memory(self, pictures: _Pictures, progress: Progress) -> _Pictures:
        decoded = [torch.empty(0, dtype=torch.uint8)] * len(self.split)
        for index, pixels in self._decoded(pictures.decode, progress):
            decoded[index] = pixels
        self.residency = f"{_mib(sum(p.nbytes for p in decoded))} of decoded pixels in memory"
        pictures.decoded = decoded
        return pictures

    def _built(self, pictures: _Pictures, cache: PixelCache, key: str, progress: Progress) -> Entry | _Pictures:
        """A new entry of the cache; streaming where the disk refuses, or where a picture is lacking."""
        with cache.build(key, len(self.split), title_of(self.split.names)) as builder:
            for _, pixels in self._decoded(pictures.kept, progress):
                if not self.unreadable:
                    builder.add(pixels)
            entry = None if self.unreadable else builder.finish()
        if entry is None:
            self.residency += f": {builder.failure}" if builder.failure else ""
            return pictures
        return self._cached(pictures, entry, "written to")

    def _cached(self, pictures: _Pictures, entry: Entry, how: str) -> Entry | _Pictures:
        self.residency = f"{_mib(entry.info.nbytes)} of pixels {how} the cache {entry.path}"
        if pictures.shape:
            return entry
        self.residency += f", cropped by {_counted(self.workers)}"
        pictures.decoded = entry
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


class _Crew:
    """Worker processes that make the pictures of one epoch after the other, until `close` or the end of the program."""

    def __init__(self, pictures: _Pictures, workers: int, *, pinned: bool):
        self._agenda = _Agenda()
        self._turn, self._owner = 0, os.getpid()
        self._loader: DataLoader[Any] = DataLoader(
            pictures,
            batch_sampler=self._agenda,
            num_workers=workers,
            worker_init_fn=partial(_begin_work, loaded()),
            persistent_workers=workers > 0,
            pin_memory=pinned,
            generator=torch.Generator(),  # it draws a seed an epoch, which nothing here uses; not from the trainer's
        )
        _crews.add(self)

    def epoch(self, seed: int, epoch: int, batches: Sequence[np.ndarray]) -> Iterator[Tensor]:
        """The images of these batches, (B, C, H, W) each."""
        self._turn += 1
        turn = self._turn
        self._agenda.set(seed, epoch, batches)
        for images in self._loader:
            yield images
            if turn != self._turn:  # there is one queue, and it holds the other epoch's pictures now
                raise RuntimeError("an epoch cannot go on after another one of the same batches was begun")

    def close(self) -> None:
        """End the processes; in a fork of the program that began them, nothing."""
        self._turn += 1
        running: Any = self._loader._iterator
        if running is not None and self._owner == os.getpid():
            running._shutdown_workers()  # what its `__del__` calls; a generator that stands still keeps it from that
            self._loader._iterator = None


class _Agenda(Iterable[list[tuple[int, int, int]]]):
    """What the workers make: (seed, epoch, picture) for each picture of each batch. DataLoader asks once an epoch."""

    def __init__(self) -> None:
        self.set(0, 0, ())

    def set(self, seed: int, epoch: int, batches: Sequence[np.ndarray]) -> None:
        self.seed, self.epoch, self.batches = seed, epoch, batches

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        for indices in self.batches:
            yield [(self.seed, self.epoch, int(i)) for i in indices]

    def __len__(self) -> int:
        return len(self.batches)


_crews: weakref.WeakSet[_Crew] = weakref.WeakSet()


@atexit.register
def _close_crews() -> None:
    """Python would tell the workers to end by a signal that they ignore, and wait for them for ever."""
    for crew in list(_crews):
        crew.close()


def _begin_work(by_torchvision: bool, _: int) -> None:
    """What a worker does first: load torchvision where its parent has, of which it need not be a fork, and outlive
    signals. Who stops a job or presses Ctrl-C tells the whole group of processes: the trainer needs its workers to
    finish the step and save, and ends them itself.
    """
    if by_torchvision:
        torchvision()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _one_ahead(make: Callable[[np.ndarray], Tensor], items: Iterable[np.ndarray]) -> Iterator[Tensor]:
    """What `make` makes of each item; the next one is made by a thread meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        waiting = None
        for item in items:
            following = thread.submit(make, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()


class _Pictures(Dataset[Tensor]):
    """One picture at a time, with its own geometry: (seed, epoch, index) to uint8 (C, height, width)."""

    def __init__(self, split: Split, preprocessing: Preprocessing, augmentation: Augmentation | None):
        self.split, self.preprocessing, self.augmentation = split, preprocessing, augmentation
        self.decoded: Sequence[Tensor] | Entry | None = None
        """By picture number, where they are kept."""

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

    @property
    def scaled(self) -> bool:
        """Whether large JPEGs are decoded at a fraction of their size."""
        return self.augmentation is not None and self.augmentation.scaled

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Of every picture, (C, height, width), where none needs a geometry of its own."""
        return None if self.cropped else (self.preprocessing.channels, *self.preprocessing.image_size)

    @property
    def settings(self) -> dict[str, Any]:
        """Plain data: all that `kept` follows from beside the picture itself."""
        facts = self.preprocessing.to_json()
        if self.cropped:
            read = ("image_size", "channels", "interpolation", "antialias")
            return {"crop": True, "scaled": self.scaled, **{k: facts[k] for k in read}}
        unused = ("std",) if self.preprocessing.resize == "letterbox" else ("std", "mean")  # which fills with the mean
        return {"crop": False, **{k: v for k, v in facts.items() if k not in unused}}

    def image(self, index: int, at_least: tuple[int, int] | None = None) -> np.ndarray:
        return self.split.image(index, self.preprocessing.channels, at_least=at_least)

    def kept(self, index: int) -> Tensor:
        """What is worth keeping of a picture (C, H, W): as the network reads it, or with room to crop."""
        return self.decode(index) if self.cropped else self.preprocessing.geometry(self.image(index))

    def decode(self, index: int) -> Tensor:
        """Pixels (C, H, W). Where they are to be cropped, at most twice what is read, which leaves room; the same
        whether they are kept or streamed, so that a run does not depend on the memory at hand. A large JPEG is decoded
        no larger than needed for that, which of a photograph of 12 megapixels takes a third of the time.
        """
        if not self.cropped:
            return _channels_first(self.image(index)).contiguous()
        height, width = self.preprocessing.image_size
        room = (2 * height, 2 * width)
        image = _channels_first(self.image(index, at_least=room if self.scaled else None))
        scale = max(n / m for n, m in zip(room, image.shape[-2:], strict=True))
        if scale >= 1:
            return image.contiguous()
        return self.preprocessing.resized(image, tuple(round(n * scale) for n in image.shape[-2:]))

    @property
    def kept_bytes(self) -> float:
        """The set's size after `kept`."""
        return self.decoded_bytes if self.shape is None else len(self.split) * math.prod(self.shape)

    @cached_property
    def decoded_bytes(self) -> float:
        """The set's size after `decode`, estimated from pictures spread over it."""
        count = len(self.split)
        sample = np.linspace(0, count - 1, min(count, _SAMPLED)).astype(int)
        sizes = []
        for index in sample:
            with contextlib.suppress(ImageError):
                sizes.append(self.decode(int(index)).nbytes)
        return count * float(np.mean(sizes)) if sizes else 0.0


def _counted(workers: int) -> str:
    return f"{workers} worker{'s' * (workers != 1)}"


def _mib(count: float) -> str:
    return f"{count / 2**20:,.0f} MiB" if count >= 2**20 else f"{count / 2**10:,.0f} KiB"
