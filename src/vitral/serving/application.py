"""The routes: the page, predictions, features, models, health, metrics, documentation."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from PIL import Image
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitral.explanation.heatmap import Heatmap
from vitral.explanation.texts import TextExplanation
from vitral.inference.inputs import Item
from vitral.serving import bodies
from vitral.serving.bodies import Question
from vitral.serving.guard import Guard
from vitral.serving.metrics import CONTENT_TYPE
from vitral.serving.openapi import openapi
from vitral.serving.page import ASSETS, EXAMPLE, asset, docs
from vitral.serving.problems import Problem
from vitral.serving.service import Service

MOST_OVERLAYS = 64
"""Most characters of a text whose maps are drawn; the others only get values."""

_NOT_STARTED = "it has not started: a server, or the application that mounts this one, must run its lifespan"

_WATCH_AFTER = 0.2
"""Seconds of a request after which a client that leaves is noticed."""

Work = Callable[[Service, Question, Sequence[Item]], Awaitable[dict[str, object]]]


def build(service: Service) -> Starlette:
    """The ASGI application of a service, which starts and ends with it."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    routes = [
        *(Route(path, asset(path, service.example)) for path in ("/", *ASSETS)),
        *([Route(EXAMPLE, asset(EXAMPLE, service.example))] if service.example else []),
        *(Route(path, endpoint, methods=[method]) for path, (method, endpoint) in ENDPOINTS.items()),
        Route("/openapi.json", description),
        Route("/docs", docs),
    ]
    guard = Middleware(Guard, service=service, routes=frozenset(route.path for route in routes))
    app = Starlette(
        routes=routes, middleware=[guard], lifespan=lifespan, exception_handlers={HTTPException: reraise_as_problem}
    )
    app.state.service = service
    app.router.redirect_slashes = False
    return app


async def reraise_as_problem(request: Request, error: Exception) -> Response:
    """Turn the router's refusals into problems, which the guard answers."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    if status == 405 and isinstance(error, HTTPException):
        allowed = dict(error.headers or {})
        raise Problem("method-not-allowed", f"it takes {allowed.get('Allow', 'another method')}", headers=allowed)
    if status == 404:
        raise Problem("not-found", "nothing is served under this path")
    raise Problem("bad-request", "the request cannot be read")


def answering(work: Work) -> Callable[[Request], Awaitable[Response]]:
    """An endpoint: read and parse the body within its limits, then `work`, all within the deadline.

    A client that leaves ends the work, and gives its places back.
    """

    async def endpoint(request: Request) -> Response:
        service: Service = request.app.state.service
        items = request.query_params.multi_items()
        if len(query := dict(items)) < len(items):
            raise Problem("bad-request", "a parameter stands twice in the query")
        seconds = min(bodies.question(query, {}).timeout or service.limits.timeout, service.limits.timeout)
        reading = True
        with service.bodies.taken(bodies.declared_size(request, service.limits)):
            try:
                async with asyncio.timeout(seconds):
                    body = await bodies.read(request, service.limits)
                    reading = False
                    uploads, parameters = await bodies.parse(request, body, service.limits, service.run)
                    asked = bodies.complete(bodies.question(query, parameters))
                    async with _while_connected(request):
                        return JSONResponse(await work(service, asked, uploads))
            except TimeoutError:
                name = "slow-body" if reading else "deadline"
                raise Problem(name, f"the time was {seconds:g} seconds", timeout=seconds) from None

    return endpoint


@asynccontextmanager
async def _while_connected(request: Request) -> AsyncIterator[None]:
    """Cancel the block when the client leaves, and raise `ClientDisconnect`.

    Most requests are answered before anyone watches, and need no task for it.
    """
    loop, task, left = asyncio.get_running_loop(), asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
            pass
        left = True
        task.cancel()

    watching: list[asyncio.Task[None]] = []
    timer = loop.call_later(_WATCH_AFTER, lambda: watching.append(loop.create_task(watch())))
    try:
        yield
    except asyncio.CancelledError:
        if left and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        timer.cancel()
        for one in watching:
            one.cancel()


async def predict(service: Service, asked: Question, uploads: Sequence[Item]) -> dict[str, object]:
    """Predictions of each image, as `vitral predict` prints them, with a heat map if `explain` names a method."""
    model = service.model(asked.model)
    explained = model.check_explanation(asked.explain, asked.target) if asked.explain else None
    if explained and len(uploads) > service.limits.explained:
        most = service.limits.explained
        raise Problem("too-many-images", f"at most {most} images of a request are explained", limit=most)
    with model.places.taken(len(uploads)):
        found = await model.predict(service.decode, uploads)
        maps = await model.explain(found, *explained) if explained else []
    output, rows = model.predictor.output, [one.answer.result() for one in found]
    named = zip(uploads, rows, strict=True)
    predictions = [output.prediction(one.name, row).to_json(asked.top) for one, row in named]
    if maps:
        # Drawing takes longer than computing, and needs no network.
        drawn = await service.run(lambda: [explanation_of(one, asked.overlay) for one in maps])
        for prediction, explanation, row, one in zip(predictions, drawn, rows, maps, strict=True):
            if isinstance(one, TextExplanation):
                prediction["explanation"] = explanation
                continue
            value = float(row[one.target])
            prediction["explanation"] = {**explanation, "value" if output.text(value) else "probability": value}
    return {"model": model.name, "version": model.version, "predictions": predictions}


def explanation_of(found: Heatmap | TextExplanation, overlay: bool) -> dict[str, object]:
    """A heat map as plain data; with `overlay`, the image as the network saw it and the map over it as PNG. For a text,
    return the map of each character.
    """
    if isinstance(found, TextExplanation):
        return _text_explanation(found, overlay)
    plain = {"method": found.method, "label": found.label, "note": found.note, "values": found.values.tolist()}
    if overlay:
        from vitral.explanation.drawing import enlarged

        plain["image"] = _data_url(enlarged(found.image))
        plain["overlay"] = _data_url(found.overlay())
    return plain


def _text_explanation(found: TextExplanation, overlay: bool) -> dict[str, object]:
    plain = {name: value for name, value in found.to_json().items() if name in ("method", "characters", "note")}
    if overlay and found.maps:
        from vitral.explanation.drawing import enlarged

        plain["image"] = _data_url(enlarged(found.maps[0].image))
        for character, one in zip(plain["characters"], found.maps[:MOST_OVERLAYS], strict=False):
            character["overlay"] = _data_url(one.overlay())
    return plain


def _data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def embed(service: Service, asked: Question, uploads: Sequence[Item]) -> dict[str, object]:
    """The features of each image that the head of the network reads."""
    model = service.model(asked.model)
    model.check_embedding()
    with model.places.taken(len(uploads)):
        rows = [(one.upload.name, one.answer.result()) for one in await model.embed(service.decode, uploads)]
    found = [{"image": name, "embedding": row.tolist()} for name, row in rows]
    return {"model": model.name, "version": model.version, "features": len(rows[0][1]), "embeddings": found}


async def models(request: Request) -> Response:
    """The models, the default first, with their classes and methods; and what a request may hold."""
    service: Service = request.app.state.service
    listed = [
        {**model.to_json(), **({"newer_refused_at": service.refused[name]} if name in service.refused else {})}
        for name, model in service.models.items()
    ]
    limits = {name: getattr(service.limits, name) for name in ("body", "images", "pixels", "explained", "timeout")}
    return JSONResponse({"models": listed, "limits": limits})


async def healthz(request: Request) -> Response:
    """The process answers."""
    return JSONResponse({"status": "ok"})


async def readyz(request: Request) -> Response:
    """New requests are welcome."""
    service: Service = request.app.state.service
    if not service.ready:
        raise Problem("not-ready", "it is ending" if service.draining else _NOT_STARTED)
    return JSONResponse({"status": "ready", "models": list(service.models)})


async def metrics(request: Request) -> Response:
    """Metrics for Prometheus."""
    service: Service = request.app.state.service
    return Response(service.metrics.text(), headers={"Content-Type": CONTENT_TYPE})


async def description(request: Request) -> Response:
    """The API as OpenAPI 3.1."""
    service: Service = request.app.state.service
    return JSONResponse(openapi(service))


ENDPOINTS: dict[str, tuple[str, Callable[[Request], Awaitable[Response]]]] = {
    "/v1/predict": ("POST", answering(predict)),
    "/v1/embed": ("POST", answering(embed)),
    "/v1/models": ("GET", models),
    "/healthz": ("GET", healthz),
    "/readyz": ("GET", readyz),
    "/metrics": ("GET", metrics),
}
"""Path → method and function: the API, of which `openapi` describes each."""
