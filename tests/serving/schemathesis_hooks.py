"""Images for schemathesis, which knows only their type: loaded by its command line, not by pytest."""

from __future__ import annotations

import base64
from typing import Any

import schemathesis
from hypothesis import strategies

from vitral.demo import IMAGES

FILES = strategies.sampled_from([file.read_bytes() for file in sorted(IMAGES.glob("*.png"))])

for kind in ("image/*", "image/png", "application/octet-stream"):
    schemathesis.openapi.media_type(kind, FILES)
schemathesis.openapi.format("byte", FILES.map(lambda data: base64.b64encode(data).decode()))


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Replace what no schema can exclude: times that no server can keep, names that are no classes, parameters that
    stand in the query and in the body, and those that have no effect without `explain`.
    """
    for given in (case.query, case.body):
        if isinstance(given, dict):
            if is_short(given.get("timeout")):
                given["timeout"] = 10
            if isinstance(given.get("target"), str):
                given["target"] = "cat"
    if isinstance(case.query, dict) and isinstance(case.body, dict) and case.meta.generation.mode.is_positive:
        for name in case.query.keys() & case.body.keys():
            del case.body[name]
    sides = [side for side in (case.query, case.body) if isinstance(side, dict)]
    if case.meta.generation.mode.is_positive and not any(side.get("explain") for side in sides):
        for side in sides:
            for name in ("target", "overlay"):
                side.pop(name, None)


def is_short(timeout: Any) -> bool:
    try:
        return 0 < float(timeout) < 10
    except (TypeError, ValueError):
        return False
