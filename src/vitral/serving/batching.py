"""Dynamic batching: images of several requests are computed together, off the event loop.

An image passes from the thread that decodes it to the one that computes. The event loop only receives the answer. Under
a flood of requests, a turn of the loop takes long, and neither decoding nor computing may wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition
from typing import Any

import torch
from torch import Tensor

from vitral.inference.inputs import Item


@dataclass(eq=False)
class Ticket:
    """An image of a request, from its bytes to its answer."""

    upload: Item
    answer: asyncio.Future[Any]
    """Settled in its event loop; canceled when nobody waits for it any more."""
    began: float = 0.0
    """The time when a thread began to decode it; 0 before."""
    image: Tensor | None = None
    """The prepared image, (C, H, W) uint8, once it is decoded."""
    arrived: float = 0.0
    """The time when it was decoded."""


def settle(tickets: Sequence[Ticket], answers: Sequence[object] | Exception) -> None:
    """Give each ticket its answer, or all of them an error, from any thread. All are of one event loop."""
    with suppress(RuntimeError):  # the loop is closed, and nobody waits
        tickets[0].answer.get_loop().call_soon_threadsafe(_settle, tickets, answers)


def _settle(tickets: Sequence[Ticket], answers: Sequence[object] | Exception) -> None:
    if isinstance(answers, Exception):
        for ticket in tickets:
            if not ticket.answer.done():
                ticket.answer.set_exception(answers)
        return
    for ticket, answer in zip(tickets, answers, strict=True):
        if not ticket.answer.done():
            ticket.answer.set_result(answer)


@dataclass(frozen=True)
class Timing:
    """One batch that was computed."""

    images: int
    seconds: float
    waited: Sequence[float]
    """Seconds that each image waited for the batch."""


class Batcher:
    """Collects images and computes them `size` at a time in `executor`, which has one thread.

    While a batch is computed the next one fills by itself, so a busy server needs no waiting. Otherwise a batch waits
    up to `wait` seconds after its first image for those that are on their way, and not at all if there are none. An
    image whose request is canceled is not computed. The queue has no bound of its own: whoever calls holds a place for
    each image (`vitral.serving.limits.Places`).
    """

    def __init__(
        self,
        compute: Callable[[Tensor], Sequence[object]],
        executor: Executor,
        *,
        size: int,
        wait: float,
        accepted: Callable[[], int],
        record: Callable[[Timing], None] = lambda timing: None,
    ):
        """`compute` maps images (B, C, H, W) uint8 to B answers. `accepted` counts the images that are not answered
        yet, whether they have arrived or not. `record` is called after each batch, in the thread that computes.
        """
        self.compute, self.executor, self.size, self.wait = compute, executor, size, wait
        self.accepted, self.record = accepted, record
        self._waiting: deque[Ticket] = deque()
        self._changed = Condition()
        self._scheduled = False  # a batch will be taken, or is being computed

    def put(self, ticket: Ticket) -> None:
        """Take a decoded image into the next batch, from any thread."""
        ticket.arrived = time.perf_counter()
        with self._changed:
            self._waiting.append(ticket)
            self._changed.notify()
            if not self._scheduled:
                self.executor.submit(self._run)
                self._scheduled = True

    def stop(self) -> None:
        """Cancel the images that still wait, in their event loop."""
        with self._changed:
            for ticket in self._waiting:
                ticket.answer.cancel()
            self._waiting.clear()

    def _run(self) -> None:
        """Compute a batch, and schedule the next one behind what else waits for the thread."""
        if batch := self._taken():
            self._compute(batch)
        with self._changed, suppress(RuntimeError):  # the executor has ended: `stop` cancels what waits
            self._scheduled = False
            if self._waiting:
                self.executor.submit(self._run)
                self._scheduled = True

    def _taken(self) -> list[Ticket]:
        with self._changed:
            while self._waiting and len(self._waiting) < min(self.size, self.accepted()):
                left = self._waiting[0].arrived + self.wait - time.perf_counter()
                if left <= 0 or not self._changed.wait(left):
                    break
            taken = [self._waiting.popleft() for _ in range(min(self.size, len(self._waiting)))]
        return [ticket for ticket in taken if not ticket.answer.done()]

    def _compute(self, batch: Sequence[Ticket]) -> None:
        began = time.perf_counter()
        try:
            answers = self.compute(torch.stack([ticket.image for ticket in batch if ticket.image is not None]))
        except Exception as error:  # of any kind: it belongs to the requests of this batch, and the next one continues
            settle(batch, error)
            return
        waited = [began - ticket.arrived for ticket in batch]
        self.record(Timing(len(batch), time.perf_counter() - began, waited))
        settle(batch, answers)
