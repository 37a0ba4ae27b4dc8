"""Read and parse the body of a request: one image or many, as raw bytes, multipart/form-data or JSON with base64."""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request

from vitral import bounded
from vitral.errors import unknown
from vitral.inference.inputs import Item
from vitral.serving.limits import Limits
from vitral.serving.problems import Problem
from vitral.wording import printable

_LONGEST_NAME = 200
_LONGEST_FIELD = 1000


@dataclass(frozen=True)
class Question:
    """The parameters of a request, without its images."""

    model: str | None = None
    top: int = 5
    explain: str | None = None
    target: str | None = None
    overlay: bool = False
    timeout: float | None = None


def question(query: Mapping[str, object], body: Mapping[str, object]) -> Question:
    """Read the parameters of the query and of the body; a parameter may stand in one of them."""
    if twice := sorted(query.keys() & body.keys()):
        raise Problem("bad-request", f"'{twice[0]}' stands in the query and in the body")
    if "timeout" in body:
        raise Problem("bad-request", "'timeout' must stand in the query: it holds while the body is read")
    given = {**query, **body}
    known = [field.name for field in dataclasses.fields(Question)]
    if unexpected := next((name for name in given if name not in known), None):
        error = unknown("parameter", _shown(unexpected), known)
        raise Problem("unknown-parameter", f"{error.what}; {error.why}")
    top = _number("top", given.get("top", 5), int)
    if top < 1:
        raise Problem("bad-request", "'top' must be at least 1")
    seconds = None if given.get("timeout") is None else _number("timeout", given["timeout"], float)
    if seconds is not None and not seconds > 0:
        raise Problem("bad-request", "'timeout' must be above 0")
    words = {name: _text(name, given.get(name)) for name in ("model", "explain", "target")}
    return Question(**words, top=top, overlay=_switch("overlay", given.get("overlay", False)), timeout=seconds)


def complete(asked: Question) -> Question:
    """Return the parameters of a whole request; refuse those that have no effect without `explain`."""
    alone = "target" if asked.target else "overlay" if asked.overlay else ""
    if alone and not asked.explain:
        raise Problem("bad-request", f"'{alone}' has no effect without 'explain', the method of a heat map")
    return asked


def _number(name: str, value: Any, kind: type[int] | type[float]) -> Any:
    try:
        if isinstance(value, bool) or (kind is int and isinstance(value, float) and not value.is_integer()):  # 3.0 is 3
            raise ValueError
        return kind(value)
    except (TypeError, ValueError):
        expected = "a whole number" if kind is int else "a number"
        raise Problem("bad-request", f"'{name}' must be {expected}") from None


def _text(name: str, value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value or None
    raise Problem("bad-request", f"'{name}' must be text")


def _switch(name: str, value: object) -> bool:
    found = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
    if found is None:
        raise Problem("bad-request", f"'{name}' must be true or false")
    return found


def declared_size(request: Request, limits: Limits) -> int:
    """Return the length that the header declares, or the limit without one; raise `Problem` if it is too large."""
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise Problem("unsupported-type", f"the content-encoding '{_shown(coding)}' is not supported")
    text = request.headers.get("content-length")
    if text is None:
        return limits.body
    if not text.isascii() or not text.isdigit():
        raise Problem("bad-request", "Content-Length must be a number")
    if int(text) > limits.body:
        raise _too_large(limits)
    return int(text)


async def read(request: Request, limits: Limits) -> bytes:
    """The whole body; refused as soon as it is longer than the limit."""
    parts, size = [], 0
    async with aclosing(request.stream()) as stream:
        async for part in stream:
            size += len(part)
            if size > limits.body:
                raise _too_large(limits)
            parts.append(part)
    return b"".join(parts)


def _too_large(limits: Limits) -> Problem:
    return Problem("body-too-large", f"the limit is {limits.body:,} bytes", limit=limits.body)


Parsed = tuple[list[Item], dict[str, Any]]
"""Images, encoded, under the names that the client gives them, which are never opened; and parameters."""


async def parse(request: Request, body: bytes, limits: Limits, run: Callable[..., Awaitable[Parsed]]) -> Parsed:
    """Parse a body by its Content-Type; `run` calls a function off the event loop."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind.startswith("image/") or kind == "application/octet-stream":
        uploads, parameters = [Item("image 0", body)], dict[str, Any]()
    elif kind == "multipart/form-data":
        uploads, parameters = await _multipart(request, body, limits)
    elif kind == "application/json":
        uploads, parameters = await run(_json, body, limits)
    else:
        detail = f"'{_shown(kind)}' is not supported" if kind else "the request has no Content-Type"
        raise Problem("unsupported-type", detail)
    if not uploads or not all(one.image for one in uploads):
        raise Problem("bad-request", "the request holds no image" if not uploads else "an image is empty")
    if len(uploads) > limits.images:
        raise _too_many(limits)
    return uploads, parameters


def _too_many(limits: Limits) -> Problem:
    return Problem("too-many-images", f"the limit is {limits.images} images in a request", limit=limits.images)


class _InMemory(MultiPartParser):
    """A parser that writes nothing to the disk: the body is bounded and in memory already."""

    spool_max_size = 1 << 40

    def on_headers_finished(self) -> None:
        """Take a part with the type of an image as a file, also without a file name (RFC 7578, 4.2)."""
        part = self._current_part
        kind = dict(part.item_headers).get(b"content-type", b"")
        if kind.startswith(b"image/") and part.content_disposition and b"filename" not in part.content_disposition:
            part.content_disposition += b'; filename=""'
        super().on_headers_finished()


async def _multipart(request: Request, body: bytes, limits: Limits) -> Parsed:
    fields = len(dataclasses.fields(Question))
    parser = _InMemory(
        request.headers, _once(body), max_files=limits.images, max_fields=fields, max_part_size=_LONGEST_FIELD
    )
    try:
        form = await parser.parse()
    except MultiPartException as error:
        if "Too many files" in error.message:
            raise _too_many(limits) from None
        if "exceeded maximum size" in error.message:
            why = f"a field is longer than {_LONGEST_FIELD:,} bytes; an image must be a file, with a file name"
            raise Problem("bad-request", f"multipart/form-data: {why}") from None
        raise Problem("bad-request", f"multipart/form-data: {_shown(error.message)}") from None
    try:
        return _parts(form)
    finally:
        await form.close()


def _parts(form: FormData) -> Parsed:
    uploads: list[Item] = []
    parameters: dict[str, object] = {}
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if name not in ("image", "images"):
                raise Problem("bad-request", f"the file '{_shown(name)}' must be called 'image' or 'images'")
            uploads.append(Item(_shown(value.filename or f"image {len(uploads)}"), value.file.read()))
        elif name in ("image", "images"):
            raise Problem("bad-request", f"'{name}' must be a file, with a file name")
        elif name in parameters:
            raise Problem("bad-request", f"'{_shown(name)}' stands there twice")
        else:
            parameters[name] = value
    return uploads, parameters


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body


def _json(body: bytes, limits: Limits) -> Parsed:
    try:
        found = bounded.parse(body, most_bytes=limits.body, most_values=10_000)
    except ValueError as error:
        raise Problem("bad-request", f"the body is not JSON that can be read: {_shown(str(error))}") from None
    if not isinstance(found, dict):
        raise Problem("bad-request", "the body must be an object: {'images': ['BASE64', …]}")
    if ("image" in found) == ("images" in found):
        raise Problem("bad-request", "the body must have either 'image' or 'images'")
    images = found.pop("images") if "images" in found else [found.pop("image")]
    if not isinstance(images, list):
        raise Problem("bad-request", "'images' must be a list")
    if len(images) > limits.images:
        raise _too_many(limits)
    return [_from_json(one, index) for index, one in enumerate(images)], found


def _from_json(image: object, index: int) -> Item:
    name, data = f"image {index}", image
    if isinstance(image, dict):
        if image.keys() - {"name", "data"} or not isinstance(image.get("name", ""), str):
            raise Problem("bad-request", f"{name} must be base64, or an object with 'name' and 'data'")
        name, data = _shown(image.get("name") or name), image.get("data")
    if not isinstance(data, str):
        raise Problem("bad-request", f"{name} must be base64 text")
    try:
        return Item(name, base64.b64decode("".join(data.split()), validate=True))  # many programs wrap its lines
    except (binascii.Error, ValueError):
        raise Problem("bad-request", f"{name} is not base64 (standard alphabet, no data: URL)") from None


def _shown(text: str) -> str:
    """A client's text, short and without control characters."""
    return printable(" ".join(text[:_LONGEST_NAME].split()))
