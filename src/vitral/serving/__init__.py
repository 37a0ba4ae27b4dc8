"""Serve predictions over HTTP: `vitral serve RUN`, or `vitral.serving.app("runs/photos")` under any ASGI server.

A request is bounded before it is read (`limits`, `guard`), parsed (`bodies`), decoded in a pool (`decoding`), computed
in batches off the event loop (`batching`, `models`) and answered as JSON or as a problem (`problems`). `server` runs it
under uvicorn: signals, draining, reloading.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from vitral.inference.predictor import Predictor
    from vitral.serving.limits import Limits


def app(
    models: str | Path | Predictor | Mapping[str, str | Path | Predictor],
    *,
    tokens: tuple[str, ...] = (),
    limits: Limits | None = None,
    right: float | None = None,
    **options: object,
) -> Starlette:
    """Load models and return the ASGI application that serves them.

    `models` is one run, weights or `Predictor`, or several by name. `tokens` are bearer tokens, one of which every
    request to a model must carry; without one there is no authentication. With `right`, such as 0.95, images are "not
    sure" so that this share of the other answers is correct. `options` are those of `vitral.load`.

    Raises `MissingExtraError` if an optional package is not installed, and the errors of `vitral.load`.
    """
    from vitral.serving.extra import check_installed

    check_installed()
    from vitral.containers import limit_threads
    from vitral.serving.application import build
    from vitral.serving.auth import Access
    from vitral.serving.limits import Limits
    from vitral.serving.models import named
    from vitral.serving.service import Service

    limit_threads()
    sources = dict(models) if isinstance(models, Mapping) else named([models])
    return build(Service(sources, Access(tokens), limits or Limits(), options, right=right))
