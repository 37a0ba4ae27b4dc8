"""The routes of labeling: the page, the state and its changes, actions, and images by number."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitral import web
from vitral.labeling import teaching, view
from vitral.labeling.assistant import labels_of
from vitral.labeling.insight import by_similarity
from vitral.labeling.insight import neighbors as nearest
from vitral.labeling.service import Labeling, answering, json_body, whole_number
from vitral.labeling.state import Action
from vitral.labeling.thumbnails import LARGE, resized, thumbnail
from vitral.serving.application import reraise_as_problem
from vitral.serving.guard import Guard
from vitral.serving.page import PERMISSIONS, TYPES, Endpoint, fixed
from vitral.serving.problems import Problem


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
        Route("/v1/state", answering(state)),
        Route("/v1/changes", answering(changes)),
        Route("/v1/actions", answering(actions), methods=["POST"]),
        *teaching.routes(),
        Route("/v1/finish", answering(finish), methods=["POST"]),
        Route("/v1/images/{number:int}/small", answering(small)),
        Route("/v1/images/{number:int}/large", answering(large)),
        Route("/v1/images/{number:int}/similar", answering(similar)),
        Route("/v1/images/{number:int}/neighbors", answering(neighbors)),
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
    return fixed(web.text(name).encode(), TYPES[name.rpartition(".")[2]], PERMISSIONS)


async def state(labeling: Labeling, request: Request) -> Response:
    """Everything that the page shows: images, classes and marks."""
    return JSONResponse(await labeling.run(view.whole, labeling.session, labeling.assistant))


async def changes(labeling: Labeling, request: Request) -> Response:
    """Changes since a version, as soon as there is one."""
    version = whole_number(request.query_params.get("since", ""), "since")
    number = whole_number(request.query_params.get("insight", "0"), "insight")
    await labeling.changed_since(version, number)
    return JSONResponse(await labeling.run(view.changed, labeling.session, version, labeling.assistant, number))


async def actions(labeling: Labeling, request: Request) -> Response:
    """Apply an action; answer with the changes since the version that the page has."""
    plain = await json_body(labeling, request)
    version = plain.pop("version", -1)
    if type(version) is not int:
        raise Problem("bad-request", "'version' must be a whole number")
    await labeling.run(labeling.session.act, Action.from_json(plain))
    if labeling.assistant is not None:
        labeling.assistant.ask()
    return JSONResponse(await labeling.run(view.changed, labeling.session, version))


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
