"""Decode images for the page, as small JPEGs that are kept in the user's cache and as large ones."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import stat
from pathlib import Path

from PIL import Image

from vitral.atomic import replacing
from vitral.data.files import check_size, file_state
from vitral.data.images.decode import MAX_BYTES, probe, read_image
from vitral.errors import ImageError
from vitral.folders import cache_folder

SMALL, LARGE = 256, 2048
"""Longest sides in pixels."""
MOST_PIXELS = 100_000_000
"""Pixels of an image that the page shows; decoding more takes seconds and hundreds of megabytes."""
_FORMAT = 1
"""Version of the files in the cache."""


def thumbnail(path: str, folder: Path | None = None) -> bytes:
    """Return a small JPEG of an image, from the cache if the file has not changed since.

    `folder` holds the cache (default: `vitral/thumbnails` in the user's). Raises `ImageError` for what is not an
    image, is too large, or cannot be read.
    """
    try:
        state = file_state(path, os.stat(path))
    except (OSError, ValueError) as error:
        raise ImageError(path, getattr(error, "strerror", None) or str(error)) from error
    key = hashlib.sha256(f"{_FORMAT} {SMALL} {state}".encode("utf-8", "surrogateescape")).hexdigest()
    kept = (folder or cache_folder("thumbnails")) / key[:2] / f"{key[2:40]}.jpg"
    with contextlib.suppress(OSError):
        return kept.read_bytes()
    made = resized(path, SMALL)
    with contextlib.suppress(OSError), replacing(kept) as temporary:  # a full disk costs time, not an answer
        temporary.write_bytes(made)
    return made


def resized(path: str, longest: int) -> bytes:
    """Return a JPEG of an image, upright and in sRGB, with sides of at most `longest` pixels.

    Raises `ImageError` as `thumbnail` does.
    """
    data = _read(path)
    header = probe(data, name=path)
    if header.height * header.width > MOST_PIXELS:
        why = f"{header.width} × {header.height} pixels; the page shows at most {MOST_PIXELS:,} in all"
        raise ImageError(path, why)
    least = max(1, round(longest * min(1.0, min(header.height, header.width) / max(header.height, header.width))))
    pixels = read_image(data, name=path, channels=3, at_least=(least, least))
    image = Image.fromarray(pixels)
    image.thumbnail((longest, longest), Image.Resampling.BICUBIC, reducing_gap=2.0)
    written = io.BytesIO()
    image.save(written, "JPEG", quality=85 if longest > SMALL else 80)
    return written.getvalue()


def _read(path: str) -> bytes:
    """Read a regular file, never a pipe or a device, which the file may have become since it was listed."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise ImageError(path, "not a file")
            check_size(status.st_size, MAX_BYTES)
            return file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(path, getattr(error, "strerror", None) or str(error)) from error
