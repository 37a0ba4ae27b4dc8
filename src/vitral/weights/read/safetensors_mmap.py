"""Read safetensors files as memory-mapped tensors; the header is checked first, for errors that name the fault."""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from vitral import bounded
from vitral.digest import check_tensors
from vitral.errors import WeightsError
from vitral.filesystem import is_utf8, no_maps

LONGEST_HEADER = bounded.MOST_BYTES
"""Bytes. The format allows 100,000,000; ViT-22B would take 100,000, and the labels of ImageNet-21k 2,000,000."""
MOST_TENSORS = 5_000
"""In one file. ViT-22B has 800, and the state of a training at most four times as many."""
MOST_AXES = 16
BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
}
"""Bits of each dtype that weights have; the format knows a few more, of less than a byte."""


def read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read tensors in the header's order, as views of a private mapping of the file, and the header's metadata.

    Only the header is read, and every byte once if the file carries a digest; changing a tensor does not change the
    file. Raises `WeightsError` for a header that is cut short, malformed or too long, for tensors that overlap, leave
    gaps or lie beyond the end of the file, for shapes that contradict the bytes, and for a wrong digest.
    """
    try:
        header = _checked_header(path)
        with ThreadPoolExecutor(1) as executor, opened(path) as (metadata, _, tensor):
            checked = executor.submit(check_tensors, path)  # hashing releases the GIL
            tensors = {name: tensor(name) for name in header}
            checked.result()
    except (SafetensorError, OSError, ValueError, OverflowError, TypeError, RuntimeError, MemoryError) as error:
        why = printable(str(error))
        raise WeightsError("damaged safetensors file", where=path, why=why, hint=ANOTHER_COPY) from error
    return tensors, metadata


ANOTHER_COPY = "put a whole copy of it there, from a backup or from where it was published"
"""Hint for a damaged file."""


def printable(text: str, most: int = 300) -> str:
    """Make text of an untrusted file safe for a terminal: no control characters, at most `most` letters."""
    return "".join(letter if letter.isprintable() else " " for letter in text[:most])


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[dict[str, str], list[str], Callable[[str], Tensor]]]:
    """Open a file: its metadata, its names, and a function from a name to a view of a private mapping of the file.

    The library maps files, and opens paths in UTF-8 only: of other paths, and on disks that refuse maps, the file is
    read into memory. On Windows, which replaces no file that is mapped, each tensor is a copy.
    """
    if (mapping := _mapping(path)) is not None:
        with mapping as file:
            copied = os.name == "nt"
            yield (
                file.metadata() or {},
                list(file.keys()),
                (lambda name: file.get_tensor(name).clone()) if copied else file.get_tensor,
            )
        return
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = bounded.parse(data[8 : 8 + length], most_bytes=LONGEST_HEADER)
    tensors = load(data)
    yield header.get("__metadata__") or {}, list(tensors), tensors.__getitem__


def _mapping(path: Path) -> Any:
    """Map a file; None if that is not possible."""
    if not is_utf8(path):
        return None
    try:
        return safe_open(path, framework="pt")
    except (OSError, RuntimeError, SafetensorError) as error:
        if no_maps(error):
            return None
        raise


def check_header(path: Path) -> None:
    """Check a header as `read_safetensors` does, before the safetensors library reads the file; `ValueError` if bad."""
    _checked_header(path)


def _checked_header(path: Path) -> dict[str, object]:
    with open(path, "rb") as file:
        total = os.fstat(file.fileno()).st_size
        header, begin = _header(file, total)
    _check_offsets(header, begin, total)
    return header


def _header(file: IO[bytes], total: int) -> tuple[dict[str, object], int]:
    """Read each tensor's entry in the header, and the offset of the bytes after it; `ValueError` if malformed."""
    start = file.read(8)
    if len(start) < 8:
        raise ValueError(f"{total:,} bytes; the length of the header alone takes 8")
    (length,) = struct.unpack("<Q", start)
    if length > LONGEST_HEADER:
        raise ValueError(f"the header claims {length:,} bytes; at most {LONGEST_HEADER:,} are allowed")
    if 8 + length > total:
        raise ValueError(f"the header claims {length:,} bytes; the file has {total:,}")
    try:
        header = bounded.parse(file.read(length), most_bytes=LONGEST_HEADER, pairs=_no_duplicates)
    except (UnicodeError, json.JSONDecodeError) as error:
        raise ValueError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise ValueError("the header is not a JSON object")
    header.pop("__metadata__", None)  # safetensors reads it
    if len(header) > MOST_TENSORS:
        raise ValueError(f"{len(header):,} tensors; at most {MOST_TENSORS:,} are read")
    return header, 8 + length


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the header has '{twice}' twice")
    return found


def _check_offsets(header: Mapping[str, object], begin: int, total: int) -> None:
    """Check that all tensors lie inside the file and follow one another without gaps."""
    places = []
    for name, entry in header.items():
        first, last = _offsets(name, entry)
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


def _offsets(name: str, entry: Any) -> tuple[int, int]:
    """Read first and last offset of a tensor, checked against its shape."""
    if not name.isprintable():
        raise ValueError(f"a tensor's name holds a control character: '{name}'")
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
