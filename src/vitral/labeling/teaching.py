"""The routes of training and of its results: plan, run, answers for other images, and what a person takes home."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitral.labeling.service import Labeling, answering, json_body
from vitral.labeling.teach import Teacher
from vitral.labeling.trial import LIMITS
from vitral.serving import bodies
from vitral.serving.problems import Problem


def routes() -> list[Route]:
    """The routes."""
    return [
        Route("/v1/training", answering(training)),
        Route("/v1/training", answering(train), methods=["POST"]),
        Route("/v1/training", answering(stop), methods=["DELETE"]),
        Route("/v1/plan", answering(plan), methods=["POST"]),
        Route("/v1/home", answering(home), methods=["POST"]),
        Route("/v1/answer", answering(answer), methods=["POST"]),
    ]


async def training(labeling: Labeling, request: Request) -> Response:
    """The state of the plan or the run that the page asked for last, and of what is made of it."""
    return JSONResponse(await labeling.run(_teacher(labeling).to_json))


async def plan(labeling: Labeling, request: Request) -> Response:
    """Plan a run of some minutes."""
    await labeling.run(_teacher(labeling).plan, await _minutes(labeling, request))
    return await training(labeling, request)


async def train(labeling: Labeling, request: Request) -> Response:
    """Start a run of some minutes."""
    await labeling.run(_teacher(labeling).start, await _minutes(labeling, request))
    return await training(labeling, request)


async def stop(labeling: Labeling, request: Request) -> Response:
    """Ask the run to save itself and end."""
    await labeling.run(_teacher(labeling).stop)
    return await training(labeling, request)


async def home(labeling: Labeling, request: Request) -> Response:
    """Make a table, a page or ONNX of the finished run."""
    kind = (await json_body(labeling, request)).get("kind")
    if not isinstance(kind, str):
        raise Problem("bad-request", "'kind' must be text")
    await labeling.run(_teacher(labeling).make, kind)
    return await training(labeling, request)


async def answer(labeling: Labeling, request: Request) -> Response:
    """The answer of the suggestions, or with `by=run` of the finished run, for the image in the body."""
    if labeling.trial is None:
        raise Problem("not-found", "this server answers no images")
    by = request.query_params.get("by", "suggestions")
    if by not in ("suggestions", "run"):
        raise Problem("bad-request", "'by' must be suggestions or run")
    run = _teacher(labeling).finished if by == "run" else None
    if by == "run" and run is None:
        raise Problem("bad-request", "no run is done yet")
    bodies.declared_size(request, LIMITS)
    try:
        async with asyncio.timeout(LIMITS.timeout):
            body = await bodies.read(request, LIMITS)
            uploads, _ = await bodies.parse(request, body, LIMITS, labeling.run)
            return JSONResponse(await labeling.trial.answer(uploads[0], run))
    except TimeoutError:
        raise Problem("deadline", f"the time was {LIMITS.timeout:g} seconds") from None


async def _minutes(labeling: Labeling, request: Request) -> float:
    minutes = (await json_body(labeling, request)).get("minutes")
    if isinstance(minutes, bool) or not isinstance(minutes, int | float):
        raise Problem("bad-request", "'minutes' must be a number")
    return float(minutes)


def _teacher(labeling: Labeling) -> Teacher:
    if labeling.teacher is None:
        raise Problem("not-found", "this server does not train")
    return labeling.teacher
