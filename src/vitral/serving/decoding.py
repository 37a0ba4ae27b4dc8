"""Decode images in a pool, within limits of bytes, pixels and time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from vitral.data.images.decode import probe
from vitral.errors import ImageError
from vitral.inference.inputs import Item
from vitral.serving.batching import Ticket, settle
from vitral.serving.limits import Limits
from vitral.serving.metrics import Metrics
from vitral.serving.problems import Problem

Prepare = Callable[[bytes, str], Tensor]
"""An encoded image and its name → uint8 (C, height, width), as `Predictor.prepare`."""


class Decoder:
    """A pool of threads, which decode without holding Python's lock.

    A thread cannot be stopped. If an image takes too long, its request gets an error, and its thread runs to the end,
    which the limit of pixels bounds. The other threads take what waits.
    """

    def __init__(self, threads: int, limits: Limits, metrics: Metrics, name: str = "vitral-decode"):
        """`name` begins the names of its threads."""
        self.limits, self.metrics = limits, metrics
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    def close(self) -> None:
        """Let the threads end after what they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __call__(
        self, prepare: Prepare, uploads: Sequence[Item], forward: Callable[[Ticket], None]
    ) -> list[Ticket]:
        """The answered tickets of the uploads, in order. Each decoded image goes to `forward`, which settles it, in
        the thread that decoded it. Raise a problem that lists every image that cannot be read.
        """
        loop = asyncio.get_running_loop()
        tickets = [Ticket(one, loop.create_future()) for one in uploads]
        for one in tickets:
            self._pool.submit(self._decode, prepare, one, forward)
        try:
            await self._answered(tickets)
        except asyncio.CancelledError:
            for one in tickets:
                _give_up(one.answer)
            raise
        _raise_problems(tickets)
        return tickets

    async def _answered(self, tickets: Sequence[Ticket]) -> None:
        """Wait for all answers; give up images that take too long to decode."""
        limit = self.limits.decode_seconds
        pending = list(tickets)
        while pending:
            decoding = [one.began for one in pending if one.began and one.image is None]
            left = min(decoding, default=time.perf_counter()) + limit - time.perf_counter()
            if left <= 0:
                why = f"decoding takes more than {limit:g} seconds"
                for one in pending:
                    if one.image is None and one.began and one.began + limit <= time.perf_counter():
                        one.answer.set_exception(ImageError(one.upload.name, why))
            else:
                await asyncio.wait([one.answer for one in pending], timeout=left)
            pending = [one for one in pending if not one.answer.done()]

    def _decode(self, prepare: Prepare, ticket: Ticket, forward: Callable[[Ticket], None]) -> None:
        if ticket.answer.done():  # canceled
            return
        ticket.began = time.perf_counter()
        try:
            ticket.image = self._prepared(prepare, ticket.upload)
            self.metrics.decode.observe(time.perf_counter() - ticket.began)
            forward(ticket)
        except Exception as error:  # it belongs to the request
            settle([ticket], error)

    def _prepared(self, prepare: Prepare, upload: Item) -> Tensor:
        header = probe(upload.image, name=upload.name)
        if header.height * header.width > self.limits.pixels:
            why = f"{header.width} × {header.height} pixels; the limit is {self.limits.pixels:,} in all"
            raise ImageError(upload.name, why)
        return prepare(upload.image, upload.name)


def _give_up(answer: asyncio.Future[object]) -> None:
    if not answer.cancel() and not answer.cancelled():
        answer.exception()  # asyncio logs errors that nobody has asked for


def _raise_problems(tickets: Sequence[Ticket]) -> None:
    unreadable = []
    for index, (one, error) in enumerate([(one, one.answer.exception()) for one in tickets]):
        if isinstance(error, ImageError):
            unreadable.append({"index": index, "image": one.upload.name, "why": error.why})
        elif error is not None:
            raise error
    if unreadable:
        first = unreadable[0]
        raise Problem("unreadable-image", f"{first['image']}: {first['why']}", errors=unreadable)
