"""Dynamic batching: images of several requests are computed together, off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class _Item:
    image: Tensor
    answer: asyncio.Future[Any]
    arrived: float


@dataclass(frozen=True)
class Timing:
    """One batch that was computed."""

    images: int
    seconds: float
    waited: Sequence[float]
    """Seconds that each image waited for the batch."""


class Batcher:
    """Collects images and computes them `size` at a time in `executor`, which has one thread.

    While a batch is computed the next one fills by itself, so a busy server needs no waiting. An idle one waits up to
    `wait` seconds after the first image. An image whose request is canceled leaves the queue. The queue has no bound of
    its own: whoever calls holds a place for each image (`vitral.serving.limits.Places`).
    """

    def __init__(
        self,
        compute: Callable[[Tensor], Sequence[Any]],
        executor: Executor,
        *,
        size: int,
        wait: float,
        record: Callable[[Timing], None] = lambda timing: None,
    ):
        """`compute` maps images (B, C, H, W) uint8 to B answers; `record` is called after each batch."""
        self.compute, self.executor, self.size, self.wait, self.record = compute, executor, size, wait, record
        self._waiting: deque[_Item] = deque()
        self._arrival = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to compute, in the running event loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; images that still wait are canceled."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        for item in self._waiting:
            item.answer.cancel()

    async def __call__(self, images: Sequence[Tensor]) -> list[Any]:
        """Answers to these images, which share a batch as far as its size allows."""
        loop = asyncio.get_running_loop()
        items = [_Item(image, loop.create_future(), time.perf_counter()) for image in images]
        self._waiting.extend(items)
        self._arrival.set()
        try:
            return list(await asyncio.gather(*(item.answer for item in items)))
        finally:  # after an answer nothing is left to remove
            for item in items:
                if not item.answer.done() or item.answer.cancelled():
                    with suppress(ValueError):
                        self._waiting.remove(item)

    async def _run(self) -> None:
        while True:
            await self._arrival.wait()
            await self._fill()
            taken = [self._waiting.popleft() for _ in range(min(self.size, len(self._waiting)))]
            batch = [item for item in taken if not item.answer.done()]
            if not self._waiting:
                self._arrival.clear()
            if batch:
                await self._answer(batch)

    async def _fill(self) -> None:
        """Wait until the batch is full, or its first image has waited long enough."""
        while self._waiting and len(self._waiting) < self.size:
            left = self._waiting[0].arrived + self.wait - time.perf_counter()
            if left <= 0:
                return
            self._arrival.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._arrival.wait(), left)
            self._arrival.set()

    async def _answer(self, batch: Sequence[_Item]) -> None:
        began = time.perf_counter()
        try:
            images = torch.stack([item.image for item in batch])
            answers = await asyncio.get_running_loop().run_in_executor(self.executor, self.compute, images)
        except Exception as error:  # of any kind: it belongs to the requests of this batch, and the next one continues
            for item in batch:
                if not item.answer.done():
                    item.answer.set_exception(error)
            return
        for item, answer in zip(batch, answers, strict=True):
            if not item.answer.done():
                item.answer.set_result(answer)
        waited = [began - item.arrived for item in batch]
        self.record(Timing(len(batch), time.perf_counter() - began, waited))
