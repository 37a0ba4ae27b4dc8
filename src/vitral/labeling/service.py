"""A session behind a server, and what all of its endpoints share: threads, limits, and errors as problems."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from vitral import bounded
from vitral.containers import cores
from vitral.errors import ImageError, UsageError, VitralError
from vitral.labeling.assistant import Assistant
from vitral.labeling.session import Session
from vitral.labeling.teach import Teacher
from vitral.labeling.trial import Trial
from vitral.serving import bodies
from vitral.serving.auth import Access
from vitral.serving.limits import Limits
from vitral.serving.metrics import Metrics
from vitral.serving.page import Endpoint
from vitral.serving.problems import Problem

T = TypeVar("T")

PATIENCE = 20.0
"""Seconds that a request for changes waits for one."""

_MOST_VALUES = 1_000_000


class Labeling:
    """A session behind a server, for pages that know its token."""

    def __init__(
        self, session: Session, token: str, assistant: Assistant | None = None, teacher: Teacher | None = None
    ):
        self.session, self.assistant, self.teacher = session, assistant, teacher
        self.access, self.limits, self.metrics = Access((token,), only_local=True), Limits(body=4 << 20), Metrics()
        self.trial = None if assistant is None else Trial(assistant, self.metrics)
        self.draining = self.ended = False
        # Not named vitral-: the server ends its process beside such threads, before the table is written.
        self._quick = ThreadPoolExecutor(2, thread_name_prefix="label-work")
        self._decoding = ThreadPoolExecutor(cores(), thread_name_prefix="label-decode")
        self._changed = asyncio.Event()

    def drain(self) -> None:
        """Answer all requests that wait for a change."""
        self.draining = True
        self._changed.set()

    def hang_up(self) -> None:
        """End: the terminal is gone."""
        self.ended = True

    async def start(self) -> None:
        """Begin to answer, in the running event loop."""
        tell = partial(self._tell, asyncio.get_running_loop())
        self.session.on_change = tell
        if self.assistant is not None:
            self.assistant.on_change = tell

    async def stop(self) -> None:
        """End; images that are being decoded are given up."""
        self.session.on_change = lambda: None
        if self.assistant is not None:
            self.assistant.on_change = lambda: None
        if self.trial is not None:
            self.trial.close()
        for pool in (self._quick, self._decoding):
            pool.shutdown(wait=False, cancel_futures=True)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def run(self, work: Callable[..., T], *given: object) -> T:
        """The result of a function that would block the event loop for a moment."""
        return await asyncio.get_running_loop().run_in_executor(self._quick, partial(work, *given))

    async def decode(self, make: Callable[[str], bytes], path: str) -> bytes:
        """The result of decoding an image, for which no action waits."""
        return await asyncio.get_running_loop().run_in_executor(self._decoding, make, path)

    async def changed_since(self, version: int, number: int) -> None:
        """Wait until there is a newer version or insight, for at most `PATIENCE`, or until the server ends."""
        waiting = self._changed
        is_known = self.assistant is None or self.assistant.number == number
        if self.session.version == version and is_known and not self.draining:
            try:
                await asyncio.wait_for(waiting.wait(), PATIENCE)
            except TimeoutError:
                return


def answering(work: Callable[[Labeling, Request], Awaitable[Response]]) -> Endpoint:
    """An endpoint that answers a `VitralError` as a problem, for a person."""

    async def endpoint(request: Request) -> Response:
        try:
            return await work(request.app.state.labeling, request)
        except ImageError as error:
            raise Problem("unreadable-image", error.why or "it cannot be read") from error
        except VitralError as error:
            plain = {"title": error.what, "detail": error.why or "", "try": error.hint or ""}
            status = 400 if isinstance(error, UsageError) else 507
            return JSONResponse({**plain, "status": status}, status, media_type="application/problem+json")

    return endpoint


async def json_body(labeling: Labeling, request: Request) -> dict[str, object]:
    """The JSON object of a request, within the limits."""
    bodies.declared_size(request, labeling.limits)
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise Problem("unsupported-type", "an action is application/json")
    try:
        async with asyncio.timeout(labeling.limits.timeout):
            body = await bodies.read(request, labeling.limits)
        plain = bounded.parse(body, most_bytes=labeling.limits.body, most_values=_MOST_VALUES)
    except TimeoutError:
        raise Problem("slow-body", f"the time was {labeling.limits.timeout:g} seconds") from None
    except ValueError:
        raise Problem("bad-request", "the body is not JSON that can be read") from None
    if not isinstance(plain, dict):
        raise Problem("bad-request", "the body must be an object")
    return plain


def whole_number(text: str, name: str) -> int:
    """The value of a parameter; `Problem` for what is not a whole number."""
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Problem("bad-request", f"'{name}' must be a number")
    return int(text)
