"""Stream images to results in order: threads decode the next batch while the network computes this one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitral.containers import cores
from vitral.data.images.lazy_torchvision import preload
from vitral.errors import ImageError, UsageError
from vitral.inference.inputs import Item, expand
from vitral.thread_pool import pool

T = TypeVar("T")


def in_batches(things: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yield lists of `size`; the last one may be shorter."""
    part: list[T] = []
    for one in things:
        part.append(one)
        if len(part) == size:
            yield part
            part = []
    if part:
        yield part


def stream(
    images: object,
    prepare: Callable[[Any, str], Tensor],
    compute: Callable[[Tensor], np.ndarray],
    batch_size: int,
) -> Iterator[tuple[str, np.ndarray | ImageError]]:
    """Yield the name of each image with its row of `compute`, or with its error if it is unreadable.

    At most two batches are in memory, and an iterable is read no further ahead. A batch is `batch_size` images in
    order, without the unreadable ones.
    """
    if batch_size < 1:
        raise UsageError(f"batches of {batch_size} images", hint="batch_size=32")

    def prepared(item: Item) -> Tensor | ImageError:
        try:
            return prepare(item.image, item.name)
        except ImageError as error:
            return error

    preload(operator.length_hint(images))
    seen = 0
    with pool(cores()) as threads:
        before: list[tuple[str, Future[Tensor | ImageError]]] = []
        for items in in_batches(expand(images), batch_size):
            ahead = [(item.name, threads.submit(prepared, item)) for item in items]
            yield from _computed(before, compute)
            before, seen = ahead, seen + len(items)
            preload(seen)
        yield from _computed(before, compute)


def _computed(
    batch: Sequence[tuple[str, Future[Tensor | ImageError]]], compute: Callable[[Tensor], np.ndarray]
) -> Iterator[tuple[str, np.ndarray | ImageError]]:
    ready = [(name, future.result()) for name, future in batch]
    images = [image for _, image in ready if isinstance(image, Tensor)]
    rows = iter(compute(torch.stack(images)) if images else ())
    for name, image in ready:
        yield name, image if isinstance(image, ImageError) else next(rows)
