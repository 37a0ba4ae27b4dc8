"""Read JSON from untrusted files within limits. Every JSON file that vitral opens is read here.

The limits are checked before parsing: a linear scan counts depth and values, so that no file exhausts the stack, the
memory or the time. They are ten times the size of large real files. The labels of ImageNet-21k, in both directions as
Hugging Face writes them, are 44,000 values in 2 MB. The header of a ViT-22B with 16 tensors in each of 48 blocks would
be 9,000 values in 0.1 MB. No real file nests deeper than 6.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 16 << 20
MOST_VALUES = 500_000
DEEPEST = 64

# An unclosed string matches to the end, so that the scan is linear for any text.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_STEP = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_NEITHER = bytes(set(range(256)) - set(_STEP))


def parse(
    text: bytes | str,
    *,
    most_bytes: int = MOST_BYTES,
    most_values: int = MOST_VALUES,
    pairs: Callable[[list[tuple[str, object]]], object] | None = None,
    file_names: bool = False,
) -> Any:
    """Parse JSON text; `pairs` builds an object from its names and values, by default a dict.

    With `file_names`, strings may be names of files that are not UTF-8, with the surrogates of `os.fsdecode`.

    Raises `ValueError` with a one-line reason: a limit exceeded, not UTF-8, not JSON, NaN, an infinity, or a lone
    surrogate.
    """
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if len(raw) > most_bytes:
        raise ValueError(f"{len(raw):,} bytes of JSON; at most {most_bytes:,} are read")
    _check_structure(raw, most_values)
    value = json.loads(raw.decode("utf-8"), parse_constant=_refuse, parse_float=_finite, object_pairs_hook=pairs)
    if _SURROGATE.search(raw):
        allowed = "surrogateescape" if file_names else "strict"
        json.dumps(value, ensure_ascii=False).encode("utf-8", allowed)  # UnicodeEncodeError is a ValueError
    return value


def read(path: Path, *, most_bytes: int = MOST_BYTES, most_values: int = MOST_VALUES, file_names: bool = False) -> Any:
    """Parse a JSON file, reading at most `most_bytes`. Raises `ValueError` as `parse` does, and `OSError`."""
    with open(path, "rb") as file:
        raw = file.read(most_bytes + 1)
    if len(raw) > most_bytes:
        raise ValueError(f"more than {most_bytes:,} bytes of JSON")
    return parse(raw, most_bytes=most_bytes, most_values=most_values, file_names=file_names)


def _check_structure(raw: bytes, most_values: int) -> None:
    """Check depth and number of values without parsing."""
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") <= DEEPEST:
        return  # an upper bound, since strings are counted too: within both limits
    bare = _STRING.sub(b"", raw)
    values = bare.count(b",") + bare.count(b"[") + bare.count(b"{")
    if values > most_values:
        raise ValueError(f"{values:,} values in JSON; at most {most_values:,} are read")
    depth = 0
    for bracket in bare.translate(None, _NEITHER):
        depth += _STEP[bracket]
        if depth > DEEPEST:
            raise ValueError(f"JSON nested more than {DEEPEST} deep")
        if depth < 0:
            return  # not JSON: the parser stops here too


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is too large for a 64-bit float")
    return value
