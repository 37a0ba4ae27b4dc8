"""Decode images in a pool, within limits of bytes, pixels and time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from torch import Tensor

from vitral.data.decode import probe
from vitral.errors import ImageError
from vitral.inference.inputs import Item
from vitral.serving.limits import Limits
from vitral.serving.metrics import Metrics
from vitral.serving.problems import Problem

Prepare = Callable[[bytes, str], Tensor]
"""An encoded image and its name → uint8 (C, height, width), as `Predictor.prepare`."""


class Decoder:
    """A pool of threads, which decode without holding Python's lock.

    A thread cannot be stopped: an image that takes longer than its time is refused, and its thread runs to the end,
    which the limit of pixels bounds. A thread takes work only when it is free, so nothing piles up behind it.
    """

    def __init__(self, threads: int, limits: Limits, metrics: Metrics):
        self.limits, self.metrics = limits, metrics
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="vitral-decode")
        self._free = asyncio.Semaphore(threads)

    def close(self) -> None:
        """Let the threads end after what they are doing."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def __call__(self, prepare: Prepare, uploads: Sequence[Item]) -> list[Tensor]:
        """The prepared images, in order; raise a problem that lists every image that cannot be read."""
        found = await asyncio.gather(*(self._one(prepare, one) for one in uploads), return_exceptions=True)
        images = [one for one in found if isinstance(one, Tensor)]
        if len(images) == len(uploads):
            return images
        errors = []
        for index, (upload, one) in enumerate(zip(uploads, found, strict=True)):
            if isinstance(one, ImageError):
                errors.append({"index": index, "image": upload.name, "why": one.why})
            elif isinstance(one, BaseException):
                raise one
        first = errors[0]
        raise Problem("unreadable-image", f"{first['image']}: {first['why']}", errors=errors)

    async def _one(self, prepare: Prepare, upload: Item) -> Tensor:
        await self._free.acquire()
        work = self._pool.submit(self._decode, prepare, upload)
        try:
            async with asyncio.timeout(self.limits.decode_seconds):
                return await asyncio.wrap_future(work)
        except TimeoutError:
            why = f"decoding takes more than {self.limits.decode_seconds:g} seconds"
            raise ImageError(upload.name, why) from None
        finally:
            if work.done():
                self._free.release()
            else:  # it is given up, and its thread still decodes
                work.add_done_callback(self._release_later(asyncio.get_running_loop()))

    def _release_later(self, loop: asyncio.AbstractEventLoop) -> Callable[[object], None]:
        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._free.release)

        return release

    def _decode(self, prepare: Prepare, upload: Item) -> Tensor:
        began = time.perf_counter()
        header = probe(upload.image, name=upload.name)
        if header.height * header.width > self.limits.pixels:
            why = f"{header.width} × {header.height} pixels; the limit is {self.limits.pixels:,} in all"
            raise ImageError(upload.name, why)
        image = prepare(upload.image, upload.name)
        self.metrics.decode.observe(time.perf_counter() - began)
        return image
