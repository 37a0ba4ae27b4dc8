"""Batches of a split, for training and evaluation.

A data set is decoded once and kept as uint8: in memory if it fits, else in the cache on disk; a data set that fits
neither is decoded again in every epoch, and so are JPEGs that a GPU decodes. Without per-image geometry all images have
one size, and a batch is a copy of rows of a tensor on the training device, or of the cache's file. Otherwise worker
processes prepare the images. The order of an epoch is f(seed, epoch), the geometry of an image f(seed, epoch, image):
resuming needs only a position.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from vitral.console import expect
from vitral.containers import cores
from vitral.data import Split
from vitral.data.gpu_decoding import EncodedImages, GpuDecoder
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.lazy_torchvision import preload, torchvision
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.parts import Part
from vitral.data.pixel_cache import Entry, PixelCache, pixels_key, title_of
from vitral.data.prepared import Images
from vitral.data.sampling import drawn
from vitral.data.shards.order import are_verified, epoch_order, read_ahead
from vitral.data.workers import WorkerPool, undecodable
from vitral.device import derive_seed, total_bytes, widest
from vitral.errors import ImageError
from vitral.kernels.random import Rows
from vitral.system import memory_bytes
from vitral.thread_pool import pool
from vitral.wording import count, memory_size

Residency = Literal["auto", "memory", "cache", "stream"]
Progress = Callable[[int], None]
"""Called with the number of images just decoded."""

MEMORY_SHARE = 0.25  # of the machine's memory (the GPU's, for a tensor there) that decoded images may take
DISK_SHARE = 0.5  # of the free space on the cache's disk that an entry may take with residency "auto"
_WINDOW = 512  # images decoded at a time
_FEW_CORES = 4  # that threads of one process keep busy
_CLEARLY = 1.5  # ratio of rates: a step on the same GPU took 40 % of that of decoding (docs/log/data-path.md)
_STARVED = 0.5  # share of an epoch's time that steps wait for images


@dataclass(frozen=True)
class Batch:
    """One batch: uint8 images (B, C, H, W) and labels (B,) on the device, and the images' indices in the split."""

    images: Tensor
    labels: Tensor
    indices: np.ndarray
    rows: Rows | None = None
    """The rows of a batch that ranks share; None for a whole batch."""
    view: int = 0
    """Number of the random crops: that of the epoch, unless crops repeat."""

    @property
    def total(self) -> int:
        """Number of images of all ranks."""
        return len(self.indices) if self.rows is None else self.rows.total


_ALL = Part()


class Batches:
    """The batches of a split, epoch by epoch.

    Training (`augmentation` given): a new order each epoch; an incomplete last batch is dropped unless it is the only
    one. Evaluation: the split's own order, every image once.
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
        sampler: Iterable[int] | None = None,
        residency: Residency = "auto",
        workers: int | None = None,
        check: bool = True,
        progress: Progress | None = None,
        part: Part = _ALL,
        views: int = 0,
    ):
        """`check`: decode streamed images once before, even if they were verified when their shards were written.
        `views`: epochs after which random crops repeat; 0 for new ones in each. Training images are drawn by their
        `weights` (n,), or by a `sampler` of their numbers, if one is given.

        `residency`: `memory`, `cache` or `stream`; `auto` takes the first that has room. If the cache cannot be
        written, images are streamed.
        """
        self.split, self.preprocessing, self.augmentation = split, preprocessing, augmentation
        self.device, self.seed, self.part, self.views = device, seed, part, views
        self.sampler = sampler
        self.images = len(split) if sampler is None else len(drawn(sampler, len(split), seed, 0))
        """Images of an epoch."""
        self.batch_size = max(1, min(batch_size, self.images))  # a rank may have no image to evaluate
        self.weights = None if weights is None else torch.from_numpy(weights)
        self.labels = labels_on(device, split.labels)
        self.workers = max(1, min(cores() - 1, 16) // part.beside) if workers is None else workers
        self.unreadable: list[tuple[int, ImageError]] = []
        """Images that could not be decoded; batches with them are invalid."""
        self.residency = ""
        """Location and size of the images, and the reason: a sentence without its full stop."""
        self.decoding_rate: float | None = None
        """Images per second that all cores decode; None unless images are decoded again in every epoch."""
        self.damage = ""
        """Reason that an entry of the cache was not used, if one is damaged."""
        self._pool: WorkerPool | None = None
        self._decoder: GpuDecoder | None = None
        self._otherwise: tuple[Images, float] | None = None  # than by the GPU: decoded by all cores, at this rate
        preload(len(split))  # before decoding is timed, and before workers are forked, which would each import it
        if augmentation is not None and augmentation.needs_torchvision:
            torchvision()
        self._checked = check or not are_verified(split)
        expect(progress, len(split))
        self._store = self._open_store(residency, progress or _silent)

    def close(self) -> None:
        """Stop the worker processes, which otherwise live as long as this object; another epoch starts new ones."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def reconsider(self, rate: float, waited: float) -> bool:
        """Leave decoding to the CPU from the next epoch on, if steps starved beside a GPU that decoded; True if so.

        `rate`: images per second in the epoch, `waited`: its share of waiting. The trial had the GPU to itself.
        """
        if self._otherwise is None or waited < _STARVED or rate * _CLEARLY > self._otherwise[1]:
            return False
        self.close()
        (self._store, self.decoding_rate), self._decoder, self._otherwise = self._otherwise, None, None
        self.residency = self._streamed() + f"; beside the steps a GPU decoded {rate:,.0f}"
        return True

    def _streamed(self) -> str:
        return f"streamed by {count(self.workers, 'worker')}; all cores decode {self.decoding_rate:,.0f} images/s"

    @property
    def training(self) -> bool:
        """True if batches are drawn in random order and augmented."""
        return self.augmentation is not None

    def __len__(self) -> int:
        """Batches in an epoch, of all ranks together."""
        count = self.images / self.batch_size
        return math.floor(count) if self.training else math.ceil(count)

    def order(self, epoch: int) -> np.ndarray:
        """Indices of the images of an epoch, in order: f(seed, epoch)."""
        if not self.training:
            return np.arange(len(self.split))
        if self.sampler is not None:
            return drawn(self.sampler, len(self.split), self.seed, epoch)
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        if self.weights is None:
            return epoch_order(self.split, generator)
        return torch.multinomial(self.weights, len(self.split), replacement=True, generator=generator).numpy()

    def epoch(self, epoch: int = 0, start: int = 0) -> Iterator[Batch]:
        """Yield this part of the batches of an epoch from the `start`-th on. One epoch at a time: a new one ends the
        previous.
        """
        order, rows = self.order(epoch), None
        batches = [order[i * self.batch_size : (i + 1) * self.batch_size] for i in range(start, len(self))]
        if self.augmentation is None:
            batches = self.part.whole(batches)
        else:
            rows = self.part.rows(self.batch_size, self.augmentation.mixes)
            batches = [self.part.cut(batch, rows) for batch in batches]
        view = epoch % self.views if self.views else epoch
        yield from self._delivered(batches, view, rows)

    def in_order(self, view: int, batches: list[np.ndarray]) -> Iterator[Batch]:
        """Yield these images with the random crops of a view, as `epoch` crops them and without further augmentation.
        Ends an epoch.
        """
        yield from self._delivered(batches, view, None)

    def _delivered(self, batches: list[np.ndarray], view: int, rows: Rows | None) -> Iterator[Batch]:
        if not batches:
            return
        # One copy for the whole epoch: a copy waits for all work queued on the device.
        positions = torch.from_numpy(np.concatenate(batches)).to(self.device).split(len(batches[0]))
        if isinstance(self._store, Tensor):
            for indices, position in zip(batches, positions, strict=True):
                yield Batch(self._store.index_select(0, position), self.labels[position], indices, rows, view)
            return
        for indices, position, images in zip(batches, positions, self._prepare(view, batches), strict=True):
            copied = images.to(self.device, non_blocking=self.device.type != "mps")  # an Apple GPU reads it later
            yield Batch(copied, self.labels[position], indices, rows, view)

    def _prepare(self, view: int, batches: list[np.ndarray]) -> Iterator[Tensor]:
        """Prepare the images of these batches while the step computes."""
        assert not isinstance(self._store, Tensor)
        pinned = self.device.type == "cuda"
        if isinstance(self._store, Entry):
            entry = self._store
            return _one_ahead(lambda indices: entry.gather(indices, pinned=pinned), batches)
        if self._pool is None:
            self._pool = WorkerPool(self._store, self.workers, pinned=pinned and self._decoder is None)
        prepared = self._pool.epoch(self.seed, view, batches)
        if self._store.decoded is None:
            prepared = read_ahead(self.split, batches, prepared)
        return prepared if self._decoder is None else _one_ahead(self._decoder, prepared)

    def _open_store(self, residency: Residency, progress: Progress) -> Tensor | Entry | Images:
        """Decode every image once: to keep it, or without room for that, to check that it can be read. Images in the
        cache were decoded before.
        """
        images = Images(self.split, self.preprocessing, self.augmentation)
        if residency in ("auto", "stream") and (chosen := self._by_trial(images, progress)) is not None:
            return chosen
        room = {"auto": MEMORY_SHARE / self.part.beside, "memory": math.inf}.get(residency, 0.0)
        # a tensor for a GPU is built in memory, too
        if images.shape and images.kept_bytes < room * min(memory_bytes(), total_bytes(self.device)):
            return self._tensor(images, images.shape, progress)
        cache = PixelCache() if residency in ("auto", "cache") else None
        key = pixels_key(self.split, images.settings) if cache else ""
        if cache and (entry := cache.find(key, len(self.split))):
            progress(len(self.split))
            return self._cached(images, entry, "read from")
        self.damage = cache.damage if cache else ""
        if room and images.decoded_bytes < room * memory_bytes():
            return self._in_memory(images, progress)
        self.residency = f"streamed by {count(self.workers, 'worker')}"
        if cache:
            share = DISK_SHARE if residency == "auto" else 1.0
            if images.kept_bytes < share * cache.free_bytes:
                return self._built(images, cache, key, progress)
            space = f"{memory_size(images.kept_bytes)} needed, {memory_size(cache.free_bytes)} free"
            self.residency += f": no room for the cache in {cache.folder} ({space})"
        self.decoding_rate = self._check(images, progress)
        self.residency += f"; all cores decode {self.decoding_rate:,.0f} images/s"
        return images

    def _by_trial(self, images: Images, progress: Progress) -> Images | None:
        """Stream JPEGs that the GPU decodes, if it is clearly faster than all cores; None to keep what these decode."""
        if not GpuDecoder.serves(images, self.device):
            return None
        encoded = EncodedImages(self.split, self.preprocessing, self.augmentation)
        decoder = GpuDecoder(self.device, self.preprocessing)
        try:
            rate = decoder.rate(encoded)
        except (RuntimeError, ImageError):  # torchvision without nvJPEG, or an image that the check will name
            return None
        started, sample = time.perf_counter(), range(min(_WINDOW, len(self.split)))
        cpu = sum(1 for _ in self._decode_all(images.decode, _silent, sample)) / (time.perf_counter() - started)
        self.unreadable.clear()
        if rate < _CLEARLY * cpu:
            return None
        cpu = self._check(images, progress)
        if rate < _CLEARLY * cpu:  # of processes, which on many cores are faster than the threads of the sample
            self.decoding_rate = cpu
            self.residency = self._streamed()
            return images
        self._decoder, self.decoding_rate, self._otherwise = decoder, rate, (images, cpu)
        self.residency = f"JPEGs decoded on the GPU in every epoch: {rate:,.0f} images/s, all cores {cpu:,.0f}"
        return encoded

    def _check(self, images: Images, progress: Progress) -> float:
        """Decode all images, or a window of shards that were verified, without keeping them; return images per second.

        On many cores by processes: on 16 of them they decoded 6,800 photographs a second, threads, which share Python's
        lock, 1,900 (docs/log/data-path.md).
        """
        started = time.perf_counter()
        indices = range(len(self.split) if self._checked else min(_WINDOW, len(self.split)))
        suspects: Sequence[int] = indices
        if self.workers and len(indices) > _WINDOW and cores() > _FEW_CORES:
            suspects = []  # to be decoded again here: an error cannot leave its process
            with contextlib.closing(undecodable(images, indices, self.workers)) as checked:
                for count, bad in checked:
                    suspects += bad
                    progress(count)
            progress = _silent
        for _ in self._decode_all(images.decode, progress, suspects):
            pass
        return len(indices) / (time.perf_counter() - started)

    def _tensor(self, images: Images, shape: tuple[int, int, int], progress: Progress) -> Tensor:
        tensor = torch.zeros(len(self.split), *shape, dtype=torch.uint8)
        for index, pixels in self._decode_all(images.kept, progress):
            tensor[index] = pixels
        self.residency = f"{memory_size(tensor.nbytes)} of uint8 pixels on the {self.device.type}"
        return tensor.to(self.device)

    def _because(self) -> str:
        """The damage as a final clause."""
        return f"; {self.damage}" if self.damage else ""

    def _in_memory(self, images: Images, progress: Progress) -> Images:
        decoded = [torch.empty(0, dtype=torch.uint8)] * len(self.split)
        for index, pixels in self._decode_all(images.decode, progress):
            decoded[index] = pixels
        self.residency = f"{memory_size(sum(p.nbytes for p in decoded))} of decoded pixels in memory{self._because()}"
        images.decoded = decoded
        return images

    def _built(self, images: Images, cache: PixelCache, key: str, progress: Progress) -> Entry | Images:
        """Build a new entry of the cache; stream if the disk refuses it or an image is unreadable."""
        with cache.build(key, len(self.split), title_of(self.split.names)) as builder:
            for _, pixels in self._decode_all(images.kept, progress):
                if not self.unreadable:
                    builder.add(pixels)
            entry = None if self.unreadable else builder.finish()
        if entry is None:
            self.residency += f": {builder.failure}" if builder.failure else ""
            return images
        return self._cached(images, entry, "written to")

    def _cached(self, images: Images, entry: Entry, how: str) -> Entry | Images:
        self.residency = f"{memory_size(entry.info.nbytes)} of pixels {how} the cache {entry.path}{self._because()}"
        if images.shape:
            return entry
        self.residency += f", cropped by {count(self.workers, 'worker')}"
        images.decoded = entry
        return images

    def _decode_all(
        self, decode: Callable[[int], Tensor], progress: Progress, which: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Decode all images, or these, in threads, a window at a time; those that fail are added to `unreadable`."""
        which = range(len(self.split)) if which is None else which

        def attempt(index: int) -> Tensor | ImageError:
            try:
                return decode(index)
            except ImageError as error:
                return error

        with pool(cores()) as threads:
            for first in range(0, len(which), _WINDOW):
                indices = which[first : first + _WINDOW]
                for index, result in zip(indices, threads.map(attempt, indices), strict=True):
                    if isinstance(result, ImageError):
                        self.unreadable.append((index, result))
                    else:
                        yield index, result
                progress(len(indices))


def labels_on(device: torch.device, labels: np.ndarray) -> Tensor:
    """Copy labels to a device, float64 as the widest type that it has."""
    values = torch.from_numpy(np.ascontiguousarray(labels))
    return values.to(device, widest(device) if values.dtype == torch.float64 else values.dtype)


def _silent(done: int) -> None:
    """Count nothing."""


def _one_ahead(make: Callable[[Any], Tensor], items: Iterable[object]) -> Iterator[Tensor]:
    """Yield `make(item)` for each item, computing the next one in a thread."""
    with pool(1) as thread:
        waiting = None
        for item in items:
            following = thread.submit(make, item)
            if waiting is not None:
                yield waiting.result()
            waiting = following
        if waiting is not None:
            yield waiting.result()
