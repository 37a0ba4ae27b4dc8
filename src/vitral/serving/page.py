"""The page, its files and the documentation of the API. Files come from the package under fixed paths: nothing of a
request becomes a path on disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from functools import cache

from jinja2 import Environment, StrictUndefined, Template
from starlette.requests import Request
from starlette.responses import Response

from vitral import web
from vitral._version import __version__
from vitral.serving.openapi import openapi
from vitral.serving.problems import PROBLEMS
from vitral.serving.service import Service

ASSETS = {f"/{path}": name for path, name in web.SERVER.items()}
"""Path → file of `vitral.web`; the page itself is at `/`."""

EXAMPLE = f"/{web.EXAMPLE}"
TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "png": "image/png",
}

CSP = web.policy({"frame-ancestors": "'none'", "require-trusted-types-for": "'script'"})
"""Content security policy of the page: its own files, images in memory, and requests to its own server."""


Endpoint = Callable[[Request], Awaitable[Response]]


def asset(path: str, example: bytes) -> Endpoint:
    """An endpoint that answers with the page, or one of its files; `example` is an image to try, if any."""
    if path == EXAMPLE:
        content = example
    else:
        page = web.page(served=True, example=web.EXAMPLE if example else "")
        content = (web.text(ASSETS[path]) if path in ASSETS else page).encode()
    return fixed(content, TYPES.get(path.rpartition(".")[2], TYPES["html"]), PERMISSIONS)


PERMISSIONS = {"Permissions-Policy": "camera=(self), microphone=(), geolocation=()"}
"""Header of a page that may ask for the camera."""


def fixed(content: bytes, kind: str, more: Mapping[str, str] | None = None) -> Endpoint:
    """Make an endpoint that answers with this content of this type, or with 304 if the browser already has it."""
    headers = {
        "Content-Type": kind,
        "Content-Security-Policy": CSP,
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
        **(more or {}),
    }

    async def endpoint(request: Request) -> Response:
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    return endpoint


async def docs(request: Request) -> Response:
    """The documentation of the API, drawn from its description."""
    service: Service = request.app.state.service
    page = _template().render(api=openapi(service), problems=PROBLEMS, version=__version__, limits=service.limits)
    return Response(page, headers={"Content-Type": TYPES["html"], "Content-Security-Policy": CSP})


@cache
def _template() -> Template:
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(web.text("docs.html.jinja"))
