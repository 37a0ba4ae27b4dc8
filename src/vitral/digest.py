"""Digests in files, to detect on reading that a file changed after vitral wrote it, by a disk error or by hand.

A file contains the XXH3-128 of all its bytes, computed with zeros in place of the digest:

    safetensors     in the metadata: {"vitral": "{… \\"vitral_digest\\": \\"xxh3-128:…\\"}"}
    JSON            "vitral_digest": "xxh3-128:…", the last key
    other files     a last line, `Digest`

Either half of the mark, name or digest, shows that the file had one, so that a flipped bit cannot make it look like an
older file without a digest. XXH3 detects faults, not tampering: anyone who can write the file can write its digest.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import xxhash

from vitral import bounded
from vitral.filesystem import mapped

KEY = "vitral_digest"
"""Name of the digest in JSON and in metadata."""
KIND = "xxh3-128:"
BLANK = KIND + "0" * 32
"""Placeholder for a digest while it is computed."""

_MARK = re.compile(rb'vitral_digest[\\": ]{1,8}xxh3-128:([0-9a-f]{32})')
_TRACE = re.compile(rb"vitral_digest|xxh3-128:[0-9a-f]{32}")
_HALF_A_MARK = "the mark of its digest is damaged"


def digest(data: bytes) -> str:
    """Return the digest of `data`: "xxh3-128:" and 32 hexadecimal digits."""
    return KIND + xxhash.xxh3_128_hexdigest(data)


def sealed(data: bytes) -> bytes:
    """Return `data` with `BLANK` replaced by the digest."""
    place = _place(data)
    if place is None:
        raise ValueError(f"there is no '{KEY}' to fill in")
    return data[:place] + _of(data, place).encode() + data[place + 32 :]


def sealed_json(data: Mapping[str, object], indent: int | None = None) -> str:
    """Return `data` as JSON text with its digest as the last key."""
    return sealed((json.dumps({**data, KEY: BLANK}, indent=indent) + "\n").encode()).decode()


def read_json(path: Path) -> Any:
    """Parse a JSON file, such as `sealed_json` writes. Raises `ValueError` if it has changed, and as `bounded.read`."""
    raw = path.read_bytes()
    check(raw)
    return bounded.parse(raw)


def with_digest(data: bytes, start: str = "\n", end: str = "\n") -> bytes:
    """Append a last line with the digest to `data`."""
    return sealed(data + f"{start}{KEY}: {BLANK}{end}".encode())


def check(data: bytes) -> bool:
    """Return True if `data` is intact, False if it has no digest. Raises `ValueError` if it has changed."""
    place = _place(data)
    if place is None:
        return False
    _compare(data[place : place + 32], _of(data, place))
    return True


def without_digest(data: bytes) -> bytes:
    """Undo `with_digest`; bytes without a digest are returned unchanged. Raises `ValueError` if they have changed."""
    return data[: data.rindex(b"\n" + KEY.encode())] if check(data) else data


# ---- safetensors


def seal_tensors(path: Path) -> None:
    """Write the digest into a safetensors file whose metadata contain `BLANK`, and sort the metadata.

    The library writes metadata in random order; equal contents must give equal files.
    """
    with open(path, "r+b") as file:
        start = file.read(8)
        head = _in_order(file.read(*struct.unpack("<Q", start)))
        file.seek(8)
        file.write(head)
        file.flush()
        place = _place(start + head)
        if place is None:
            raise ValueError(f"there is no '{KEY}' to fill in")
        digits = _of_file(file, start + head, place)
        file.seek(place)
        file.write(digits.encode())


def check_tensors(path: Path) -> bool:
    """Return True if a safetensors file is intact, False if it has no digest. Raises `ValueError` if it has changed.

    Reads every byte once; of a file without a digest, only the header.
    """
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        size = file.seek(0, 2)
        file.seek(8)
        head = start + file.read(min(length, size))
        place = _place(head)
        if place is None:
            return False
        _compare(head[place : place + 32], _of_file(file, head, place))
    return True


def _in_order(head: bytes) -> bytes:
    """Sort the metadata of a safetensors header without changing its length."""
    header = bounded.parse(head)
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    return ordered.ljust(len(head)) if len(ordered) <= len(head) else head


def _place(head: bytes) -> int | None:
    """Return the offset of the 32 digits of the digest, or None. Raises `ValueError` for half a mark."""
    marks = list(_MARK.finditer(head))
    if marks:
        return marks[-1].start(1)  # earlier metadata may contain other digests
    if _TRACE.search(head):
        raise ValueError(_HALF_A_MARK)
    return None


def _of(head: bytes, place: int, rest: Any = b"") -> str:
    """Compute the digits for `head` followed by `rest`."""
    state = xxhash.xxh3_128(head[:place])
    state.update(b"0" * 32)
    state.update(head[place + 32 :])
    state.update(rest)
    return str(state.hexdigest())


def _of_file(file: IO[bytes], head: bytes, place: int) -> str:
    with mapped(file) as every, every[len(head) :] as rest:
        return _of(head, place, rest)


def _compare(stored: bytes, computed: str) -> None:
    if stored.decode() != computed:
        raise ValueError(f"its contents have changed (digest {computed[:8]}…, not {stored.decode()[:8]}…)")
