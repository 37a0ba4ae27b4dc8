"""safetensors files as memory-mapped tensors; the header is checked here first, so that an error says what is wrong."""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitral.errors import WeightsError

LONGEST_HEADER = 100_000_000  # the limit of the safetensors library itself
MOST_AXES = 16
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64, "F8_E4M3": 8, "F8_E5M2": 8,
}  # fmt: skip
"""The element types that a network's weights have; the format knows a few more, of less than a byte."""


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors in the header's order, as views of a private mapping of the file, and the header's metadata.

    Nothing but the header is read; a changed tensor does not change the file. Raises `WeightsError` for a header that
    is cut short, malformed or too long, for tensors that overlap, leave gaps or lie beyond the end of the file, and
    for shapes that contradict the bytes.
    """
    try:
        with open(path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            header, begin = _header(file, total)
        _check_places(header, begin, total)
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in header}
    except (SafetensorError, OSError, ValueError, OverflowError, TypeError, RuntimeError, MemoryError) as error:
        why = printable(str(error))
        raise WeightsError("damaged safetensors file", where=path, why=why, hint=ANOTHER_COPY) from error
    return tensors, metadata


ANOTHER_COPY = "put a whole copy of it there, from a backup or from where it was published"
"""What to do about a file that is damaged."""


def printable(text: str, most: int = 300) -> str:
    """Text out of a file that is not trusted, fit for a terminal: no control characters, no half letters, no novels."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:most])


def _header(file: IO[bytes], total: int) -> tuple[dict[str, Any], int]:
    """What the header tells of each tensor, and where the bytes after it begin; `ValueError` says what is wrong."""
    start = file.read(8)
    if len(start) < 8:
        raise ValueError(f"{total:,} bytes; the length of the header alone takes 8")
    (length,) = struct.unpack("<Q", start)
    if length > LONGEST_HEADER:
        raise ValueError(f"the header claims {length:,} bytes; at most {LONGEST_HEADER:,} are allowed")
    if 8 + length > total:
        raise ValueError(f"the header claims {length:,} bytes; the file has {total:,}")
    try:
        header = json.loads(file.read(length).decode("utf-8"), object_pairs_hook=_no_twins)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    header.pop("__metadata__", None)  # safetensors reads it
    return header, 8 + length


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the header has '{twice}' twice")
    return found


def _check_places(header: dict[str, Any], begin: int, total: int) -> None:
    """Every tensor lies inside the file, and they follow one another."""
    places = []
    for name, entry in header.items():
        first, last = _place(name, entry)
        if begin + last > total:
            raise ValueError(f"'{name}' ends at byte {begin + last:,}, the file at {total:,}; cut short?")
        places.append((first, last, name))
    end, before = 0, "the header"
    for first, last, name in sorted(places):
        if first != end:
            raise ValueError(f"'{name}' {'overlaps' if first < end else 'leaves a gap after'} '{before}'")
        end, before = last, name
    if begin + end != total:
        raise ValueError(f"the tensors end at byte {begin + end:,}, the file at {total:,}")


def _place(name: str, entry: Any) -> tuple[int, int]:
    """First and last offset of a tensor, held against its shape."""
    try:
        shape, dtype, (first, last) = entry["shape"], entry["dtype"], entry["data_offsets"]
        whole = all(type(number) is int and number >= 0 for number in [*shape, first, last])
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"'{name}' has no shape, dtype and data_offsets") from error
    if not whole or not isinstance(shape, list) or len(shape) > MOST_AXES:
        raise ValueError(f"'{name}' has shape {shape} at {first}–{last}")
    if dtype not in BITS:
        raise ValueError(f"'{name}' has elements of type {dtype}; known: {', '.join(BITS)}")
    needed = math.prod(shape) * BITS[dtype] // 8
    if needed != last - first:
        raise ValueError(f"'{name}' of shape {shape} and type {dtype} needs {needed:,} bytes and has {last - first:,}")
    return first, last
