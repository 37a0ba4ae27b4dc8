"""A web service of one's own around `vitral.serving.app`: a cat flap that opens for cats.

    MODEL=runs/photos uvicorn --app-dir examples --factory web_service:build
    curl --data-binary @cat.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/flap

The page, `/v1/predict`, `/metrics` and all others are there as well. The new route has their limits, batches and
errors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route

from vitral.inference.inputs import Item
from vitral.serving import app
from vitral.serving.application import answering, predict
from vitral.serving.bodies import Question
from vitral.serving.service import Service

WELCOME = os.environ.get("WELCOME", "cat")
"""The class for which the flap opens …"""
CONFIDENCE = 0.5
"""… from this probability on."""


async def flap(service: Service, asked: Question, uploads: Sequence[Item]) -> dict[str, Any]:
    """Answer for each image whether the flap opens."""
    answer = await predict(service, asked, uploads)
    seen = [(one["label"], one["confidence"]) for one in answer["predictions"]]
    return {"open": [label == WELCOME and confidence >= CONFIDENCE for label, confidence in seen], "seen": seen}


def build(model: str | None = None) -> Starlette:
    """Return the ASGI application: vitral's own with one more route."""
    application = app(model or os.environ.get("MODEL", "demo"))
    application.router.routes.append(Route("/flap", answering(flap), methods=["POST"]))
    return application
