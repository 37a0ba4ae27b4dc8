"""Everything that the server refuses, as application/problem+json (RFC 9457): what happened and what to do.

A problem never holds a stack, a path of this machine or the content of an image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.responses import JSONResponse

DOCS = "/docs"
"""The page that explains each problem under its name; `type` links there."""


@dataclass(frozen=True)
class Kind:
    """One kind of problem."""

    status: int
    title: str
    hint: str
    """Advice for the client."""


PROBLEMS: Mapping[str, Kind] = {
    "bad-request": Kind(400, "The request cannot be understood", "compare the request with /docs"),
    "unknown-parameter": Kind(400, "The request has a parameter that does not exist", "compare the request with /docs"),
    "unauthorized": Kind(401, "An access token is required", "send the header Authorization: Bearer TOKEN"),
    "cross-site": Kind(403, "Requests from other sites are blocked", "send the request from a program or this page"),
    "not-found": Kind(404, "There is no such endpoint", "see /docs for all endpoints"),
    "unknown-model": Kind(404, "There is no such model", "list the models with GET /v1/models"),
    "method-not-allowed": Kind(405, "The endpoint does not support this method", "see /docs for all endpoints"),
    "slow-body": Kind(408, "The body did not arrive in time", "send fewer or smaller images, or send them faster"),
    "body-too-large": Kind(413, "The body is too large", "send fewer or smaller images in one request"),
    "too-many-images": Kind(413, "The request has too many images", "send them in several requests"),
    "unsupported-type": Kind(
        415, "The body has a type that is not supported", "send image/*, multipart/form-data or application/json"
    ),
    "host-not-allowed": Kind(
        421, "This server does not answer for this host", "use the address that vitral serve printed"
    ),
    "unreadable-image": Kind(
        422, "An image cannot be read", "send a whole JPEG, PNG, WebP, AVIF, BMP, GIF, TIFF or PPM"
    ),
    "no-explanation": Kind(
        422, "The answer cannot be explained in this way", "list the methods and classes with GET /v1/models"
    ),
    "no-embedding": Kind(422, "The model has no features", "list the models and their tasks with GET /v1/models"),
    "headers-too-large": Kind(431, "The header is too large", "send fewer or shorter header fields"),
    "internal": Kind(500, "The server failed", "try again, or look up this request id in the server's log"),
    "queue-full": Kind(503, "The server is busy", "try again after the seconds in Retry-After"),
    "not-ready": Kind(503, "The server is not ready", "try another server, or again later"),
    "deadline": Kind(504, "The answer was not ready in time", "send fewer images, or allow more time"),
}
"""Name → kind. The name is the last part of `type`."""


class Problem(Exception):  # noqa: N818 - the word of the RFC
    """A refusal; `more` are further members of the answer."""

    def __init__(self, name: str, detail: str, *, headers: Mapping[str, str] | None = None, **more: object):
        self.name, self.kind, self.detail = name, PROBLEMS[name], detail
        self.headers, self.more = dict(headers or {}), more
        super().__init__(f"{name}: {detail}")

    def to_json(self, request_id: str) -> dict[str, object]:
        """The members of the answer."""
        return {
            "type": f"{DOCS}#{self.name}",
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail,
            "try": self.kind.hint,
            "request_id": request_id,
            **self.more,
        }

    def response(self, request_id: str) -> JSONResponse:
        """The answer itself."""
        body = self.to_json(request_id)
        return JSONResponse(body, self.kind.status, self.headers, media_type="application/problem+json")
