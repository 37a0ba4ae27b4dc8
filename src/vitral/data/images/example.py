"""The image that a page in the browser offers to try."""

from __future__ import annotations

import io
import os

from PIL import Image

from vitral.data.images.decode import read_image

_LONGEST = 1024  # pixels of its longer side at most


def example(path: str | os.PathLike[str]) -> bytes:
    """Return an image as a small PNG, without metadata: a photograph may say where it was taken.

    Raises `ImageError` for an unreadable file.
    """
    image = Image.fromarray(read_image(path, channels=3))
    image.thumbnail((_LONGEST, _LONGEST))
    image.save(made := io.BytesIO(), "PNG")
    return made.getvalue()
