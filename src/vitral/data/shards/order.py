"""The order of an epoch over shards, and reading ahead in it.

A random order of all images would fetch every shard at once. So the shards are permuted, cut into windows, and the
images of each window are permuted: f(seed, epoch), the same wherever the shards are. A set of at most `WINDOW` images
is one window: it is permuted as any other set.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from vitral.data.dataset import Split
from vitral.data.shards.reading import ShardFetch

WINDOW = 16_384
"""Least images of a window: some seven shards of 256 MB of photographs."""
AHEAD = 2
"""Windows from the image that a step waits for to the last one whose shard is fetched."""
_CONNECTIONS = 4


def epoch_order(split: Split, generator: torch.Generator) -> np.ndarray:
    """Permute the images of a split, (n,) int64; those of shards window by window."""
    images = torch.randperm(len(split), generator=generator).numpy()
    numbers = split.shard_numbers()
    if numbers is None or len(split) <= WINDOW:
        return images
    counts = np.bincount(numbers)
    order = torch.randperm(len(counts), generator=generator).numpy()
    before = np.empty(len(counts), np.int64)  # images before each shard in this epoch
    before[order] = np.cumsum(counts[order]) - counts[order]
    windows = (before // WINDOW)[numbers]
    return images[np.argsort(windows[images], kind="stable")]


def shard_fetch(split: Split) -> ShardFetch | None:
    """The fetch of images in shards; None for any other."""
    fetch = getattr(split.fetch, "base", split.fetch)
    return fetch if isinstance(fetch, ShardFetch) else None


def are_verified(split: Split) -> bool:
    """True if every image was decoded when it was written, and is compared with its checksum when it is read."""
    fetch = shard_fetch(split)
    return fetch is not None and fetch.index.has_digests


def read_ahead(split: Split, batches: Sequence[np.ndarray], prepared: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield `prepared`, the images of these batches; meanwhile fetch remote shards of the next ones."""
    fetch = shard_fetch(split)
    if fetch is None or not fetch.store.is_remote or not batches:
        yield from prepared
        return
    reader = _Reader(fetch, first_needs(split, batches), horizon=-(-AHEAD * WINDOW // len(batches[0])))
    try:
        for done, images in enumerate(prepared):
            reader.advance(done)  # the first time after the workers were started: a fork has no threads
            yield images
    finally:
        reader.stop()


def first_needs(split: Split, batches: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """Each shard once, with the number of the first batch that needs it, in this order."""
    numbers = split.shard_numbers()
    assert numbers is not None
    needed = numbers[np.concatenate(batches)]
    shards, first = np.unique(needed, return_index=True)
    of_batch = np.searchsorted(np.cumsum([len(batch) for batch in batches]), first, side="right")
    order = np.argsort(first, kind="stable")
    return list(zip(of_batch[order].tolist(), shards[order].tolist(), strict=True))


class _Reader:
    """Threads that fetch shards before a batch needs them."""

    def __init__(self, fetch: ShardFetch, needs: list[tuple[int, int]], horizon: int):
        self._fetch, self._needs, self._horizon = fetch, iter(needs), horizon
        self._last, self._stopped = -1, False
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []

    def advance(self, batch: int) -> None:
        """Set the number of the batch that was just prepared; the first call starts the threads."""
        with self._change:
            self._last = batch
            self._change.notify_all()
        if not self._threads:
            self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(_CONNECTIONS)]
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """Fetch nothing more; a shard that is being fetched is finished."""
        with self._change:
            self._stopped = True
            self._change.notify_all()

    def _run(self) -> None:
        while (shard := self._next()) is not None:
            try:
                self._fetch.prefetch(shard)
            except OSError:  # the worker that reads it reports it
                continue

    def _next(self) -> int | None:
        """The next shard, once it is within the horizon; None at the end."""
        with self._change:
            batch, shard = next(self._needs, (0, None))
            self._change.wait_for(lambda: self._stopped or batch <= self._last + self._horizon)
            return None if self._stopped else shard
