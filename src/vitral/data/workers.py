"""Worker processes that decode and prepare images for the loader."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitral.data.gpu_decoding import EncodedImages
from vitral.data.images.lazy_torchvision import loaded, torchvision
from vitral.data.pixel_cache import Entry
from vitral.data.prepared import Images
from vitral.errors import DataError, ImageError

_CHECKED = 64  # images that a worker decodes before it says which failed


class WorkerPool:
    """Worker processes that prepare images, epoch after epoch, until `close` or the end of the program."""

    def __init__(self, images: Images, workers: int, *, pinned: bool):
        self._sampler, self._images = _BatchSampler(), images
        self._turn = 0
        self._loader: DataLoader[object] = DataLoader(
            images,
            batch_sampler=self._sampler,
            num_workers=workers,
            worker_init_fn=partial(_init_worker, loaded()),
            persistent_workers=workers > 0,
            pin_memory=pinned,
            collate_fn=images.collate if isinstance(images, EncodedImages) else None,
            generator=torch.Generator(),  # DataLoader draws an unused seed each epoch: keep that off the global one
        )
        # The finalizer refers to the loader: the garbage collector would close the queues of the workers before it asks
        # them to end, and Python would wait for them at the program's end, after a signal that they ignore.
        self._end = weakref.finalize(self, self._end_workers, self._loader, os.getpid())

    def epoch(self, seed: int, epoch: int, batches: Sequence[np.ndarray]) -> Iterator[Tensor]:
        """Yield the images of these batches, (B, C, H, W) each."""
        self._turn += 1
        turn = self._turn
        self._sampler.set(seed, epoch, batches)
        prepared = iter(self._loader)
        for indices in batches:
            try:
                images = next(prepared)
            except StopIteration:
                return
            except (DataError, RuntimeError):
                # A worker's error holds a traceback, or is a RuntimeError: raise it again here, as a plain DataError.
                if isinstance(entry := self._images.decoded, Entry):
                    entry.verify()
                self._images.verify(indices)
                raise
            yield images
            if turn != self._turn:  # the one queue now holds the other epoch's images
                raise RuntimeError("an epoch cannot continue after another one of the same batches was started")

    def close(self) -> None:
        """Stop the processes; do nothing in a fork of the program that started them."""
        self._turn += 1
        self._end()

    @staticmethod
    def _end_workers(loader: DataLoader[object], owner: int) -> None:
        running: Any = loader._iterator
        if running is not None and owner == os.getpid():
            running._shutdown_workers()  # as its `__del__` does, which a suspended generator prevents
            loader._iterator = None


def undecodable(images: Images, indices: Sequence[int], workers: int) -> Generator[tuple[int, list[int]]]:
    """Decode these images in worker processes, which end with the generator; yield, some at a time, their number and
    those that failed.
    """
    loader: DataLoader[Any] = DataLoader(
        _Decodable(images, indices),
        batch_size=_CHECKED,
        num_workers=workers,
        collate_fn=list,
        worker_init_fn=partial(_init_worker, loaded()),
        generator=torch.Generator(),
    )
    running: Any = iter(loader)
    try:
        for results in running:
            yield len(results), [index for index in results if index is not None]
    finally:
        running._shutdown_workers()


class _Decodable(Dataset[int | None]):
    """The number of each image that cannot be decoded, and None for the others."""

    def __init__(self, images: Images, indices: Sequence[int]):
        self.images, self.indices = images, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, position: int) -> int | None:
        try:
            self.images.decode(self.indices[position])
        except ImageError:
            return self.indices[position]
        return None


class _BatchSampler(Iterable[list[tuple[int, int, int]]]):
    """(seed, epoch, image) for each image of each batch. DataLoader iterates over it once per epoch."""

    def __init__(self) -> None:
        self.set(0, 0, ())

    def set(self, seed: int, epoch: int, batches: Sequence[np.ndarray]) -> None:
        self.seed, self.epoch, self.batches = seed, epoch, batches

    def __iter__(self) -> Iterator[list[tuple[int, int, int]]]:
        for indices in self.batches:
            yield [(self.seed, self.epoch, int(i)) for i in indices]

    def __len__(self) -> int:
        return len(self.batches)


def _init_worker(with_torchvision: bool, _: int) -> None:
    """Initialize a worker: end it with its parent, import torchvision if that has (it need not be a fork), and ignore
    signals.

    A scheduler or Ctrl-C signals the whole process group: the trainer needs its workers to finish the step and save,
    and stops them itself.
    """
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if with_torchvision:
        torchvision()
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def _end_with_parent() -> None:
    """Wait for the end of the parent, and end.

    Trap: DataLoader's own watch compares the parent with the one that it found when the worker began to wait for work.
    If the parent was killed before, that was already init, and the worker lives forever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
