"""The routes of labeling: the page, the state and its changes, actions, and images by number. A thin layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitral import bounded, web
from vitral.containers import cores
from vitral.errors import ImageError, UsageError, VitralError
from vitral.labeling import view
from vitral.labeling.assistant import Assistant, labels_of
from vitral.labeling.insight import by_similarity
from vitral.labeling.insight import neighbors as nearest
from vitral.labeling.session import Session
from vitral.labeling.state import Action
from vitral.labeling.teach import Teacher
from vitral.labeling.thumbnails import LARGE, resized, thumbnail
from vitral.serving import bodies
from vitral.serving.application import reraise_as_problem
from vitral.serving.auth import Access
from vitral.serving.guard import Guard
from vitral.serving.limits import Limits
from vitral.serving.metrics import Metrics
from vitral.serving.page import TYPES, Endpoint, fixed
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
        for pool in (self._quick, self._decoding):
            pool.shutdown(wait=False, cancel_futures=True)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._wake)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def run(self, work: Callable[..., T], *given: Any) -> T:
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


def build(labeling: Labeling) -> Starlette:
    """The ASGI application, which starts and ends with `labeling`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await labeling.start()
        try:
            yield
        finally:
            await labeling.stop()

    files = [Route(path, _file(name)) for path, name in web.LABEL.items()]
    routes = [
        *files,
        Route("/v1/state", _answering(state)),
        Route("/v1/changes", _answering(changes)),
        Route("/v1/actions", _answering(actions), methods=["POST"]),
        Route("/v1/training", _answering(training)),
        Route("/v1/training", _answering(train), methods=["POST"]),
        Route("/v1/training", _answering(stop), methods=["DELETE"]),
        Route("/v1/finish", _answering(finish), methods=["POST"]),
        Route("/v1/images/{number:int}/small", _answering(small)),
        Route("/v1/images/{number:int}/large", _answering(large)),
        Route("/v1/images/{number:int}/similar", _answering(similar)),
        Route("/v1/images/{number:int}/neighbors", _answering(neighbors)),
    ]
    paths = frozenset(route.path for route in routes)
    guard = Middleware(Guard, service=labeling, routes=paths, without=frozenset(web.LABEL))
    app = Starlette(
        routes=routes, middleware=[guard], lifespan=lifespan, exception_handlers={HTTPException: reraise_as_problem}
    )
    app.state.labeling = labeling
    app.router.redirect_slashes = False
    return app


def _file(name: str) -> Endpoint:
    """An endpoint that answers with a file of the page: nothing of a request becomes a path on disk."""
    return fixed(web.text(name).encode(), TYPES[name.rpartition(".")[2]])


def _answering(work: Callable[[Labeling, Request], Awaitable[Response]]) -> Endpoint:
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


async def state(labeling: Labeling, request: Request) -> Response:
    """Everything that the page shows: images, classes and marks."""
    return JSONResponse(await labeling.run(view.whole, labeling.session, labeling.assistant))


async def changes(labeling: Labeling, request: Request) -> Response:
    """Changes since a version, as soon as there is one."""
    version = _number(request.query_params.get("since", ""), "since")
    number = _number(request.query_params.get("insight", "0"), "insight")
    await labeling.changed_since(version, number)
    return JSONResponse(await labeling.run(view.changed, labeling.session, version, labeling.assistant, number))


async def actions(labeling: Labeling, request: Request) -> Response:
    """Apply an action; answer with the changes since the version that the page has."""
    plain = await _body(labeling, request)
    version = plain.pop("version", -1)
    if type(version) is not int:
        raise Problem("bad-request", "'version' must be a whole number")
    await labeling.run(labeling.session.act, Action.from_json(plain))
    if labeling.assistant is not None:
        labeling.assistant.ask()
    return JSONResponse(await labeling.run(view.changed, labeling.session, version))


async def _body(labeling: Labeling, request: Request) -> dict[str, Any]:
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


async def training(labeling: Labeling, request: Request) -> Response:
    """The state of the run that the page started last."""
    return JSONResponse(await labeling.run(_teacher(labeling).to_json))


async def train(labeling: Labeling, request: Request) -> Response:
    """Start a run of some minutes."""
    minutes = (await _body(labeling, request)).get("minutes")
    if type(minutes) not in (int, float):
        raise Problem("bad-request", "'minutes' must be a number")
    await labeling.run(_teacher(labeling).start, minutes)
    return JSONResponse(await labeling.run(_teacher(labeling).to_json))


async def stop(labeling: Labeling, request: Request) -> Response:
    """Ask the run to save itself and end."""
    await labeling.run(_teacher(labeling).stop)
    return JSONResponse(await labeling.run(_teacher(labeling).to_json))


def _teacher(labeling: Labeling) -> Teacher:
    if labeling.teacher is None:
        raise Problem("not-found", "this server does not train")
    return labeling.teacher


async def finish(labeling: Labeling, request: Request) -> Response:
    """End the server, as Ctrl-C does."""
    labeling.ended = True
    return JSONResponse({"table": str(labeling.session.table)})


async def small(labeling: Labeling, request: Request) -> Response:
    """A thumbnail of an image by its number."""
    return await _image(labeling, request, thumbnail)


async def large(labeling: Labeling, request: Request) -> Response:
    """An image by its number, as large as a screen."""
    return await _image(labeling, request, partial(resized, longest=LARGE))


async def similar(labeling: Labeling, request: Request) -> Response:
    """The numbers of all images, the most similar to one first."""
    number, features = _image_number(labeling, request), _features(labeling)
    order = await labeling.run(by_similarity, features, number)
    return JSONResponse({"order": order.tolist()})


async def neighbors(labeling: Labeling, request: Request) -> Response:
    """The nearest images of the label of an image, and of the class that is suggested for it."""
    number, features = _image_number(labeling, request), _features(labeling)
    assert labeling.assistant is not None
    given, other = labels_of(labeling.session.state), int(labeling.assistant.insight.suggested[number])
    found = {}
    for name, label in (("own", int(given.labels[number])), ("other", other)):
        among = (given.labels == label) & (label >= 0)
        found[name] = (await labeling.run(nearest, features, number, among)).tolist()
    return JSONResponse(found)


def _features(labeling: Labeling) -> np.ndarray:
    if labeling.assistant is None or labeling.assistant.features is None:
        raise Problem("not-found", "the images have no features yet")
    return labeling.assistant.features


def _image_number(labeling: Labeling, request: Request) -> int:
    number = int(request.path_params["number"])
    if number >= len(labeling.session.state.images):
        raise Problem("not-found", "there is no image of this number")
    return number


async def _image(labeling: Labeling, request: Request, make: Callable[[str], bytes]) -> Response:
    number = _image_number(labeling, request)
    content = await labeling.decode(make, labeling.session.path(number))
    return Response(content, media_type="image/jpeg")


def _number(text: str, name: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise Problem("bad-request", f"'{name}' must be a number")
    return int(text)
