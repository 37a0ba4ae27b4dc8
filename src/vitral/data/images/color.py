"""Color profiles (ICC): every image becomes sRGB, the colors that a person sees and that networks learned.

Phones store Display P3, cameras and editors Adobe RGB, print shops CMYK profiles. Most images have no profile, or one
of sRGB: they stay as they are. Conversion is LittleCMS's, by Pillow.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:  # else it is imported for the first profile
    from PIL import ImageCms

Convert = Callable[[Image.Image], Image.Image]
"""Converts an image of mode L, RGB or CMYK to sRGB: L to L, the others to RGB."""

_MARK = b"ICC_PROFILE\0"  # of a segment in a JPEG (ICC.1, B.4); the numbers of this and of all segments follow
_SPACES = {"RGB": "RGB ", "CMYK": "CMYK", "L": "GRAY"}
"""Mode → signature of the color space of its profiles (ICC.1, 7.2.6)."""
_INVISIBLE = 2  # levels of 255: profiles of sRGB are tables of different precision
_LONGEST_NAME = 60
_MOST = 64  # profiles whose conversion is kept: a phone or an editor writes the same one into all its images


@dataclass(frozen=True)
class Profile:
    """A profile as it applies to one mode."""

    name: str
    """Its description; "" for one that is damaged or of other colors than the image."""
    convert: Convert | None
    """None if the colors are those of sRGB already, and for a damaged profile, which is ignored."""


_known: dict[tuple[bytes, str], Profile] = {}


def profile_of(image: Image.Image) -> Profile | None:
    """Profile of an open image; None without one, and for values of 32 bits, which are no colors."""
    data = image.info.get("icc_profile")
    if not isinstance(data, bytes) or not data or image.mode in ("I", "F"):
        return None
    gray = image.mode in ("L", "LA", "La", "1") or image.mode.startswith("I;16")
    return _profile(data, "L" if gray else "CMYK" if image.mode == "CMYK" else "RGB")


def conversion_of(image: Image.Image) -> Convert | None:
    """Conversion of an open image to sRGB; None if it needs none."""
    profile = profile_of(image)
    return profile.convert if profile else None


def jpeg_is_srgb(data: bytes, at: int, mode: str) -> bool:
    """True unless the APP2 segment at this offset holds a profile whose colors are not those of sRGB.

    A profile in several segments is too long for one of sRGB.
    """
    size = int.from_bytes(data[at + 2 : at + 4], "big")
    segment = data[at + 4 : at + 2 + size]
    if not segment.startswith(_MARK):
        return True
    return segment[12:14] == b"\1\1" and _profile(segment[14:], mode).convert is None


def _profile(data: bytes, mode: str) -> Profile:
    key = (hashlib.blake2b(data, digest_size=16).digest(), mode)
    if (found := _known.get(key)) is None:
        if len(_known) >= _MOST:
            _known.clear()
        found = _known[key] = _read(data, mode)
    return found


def _read(data: bytes, mode: str) -> Profile:
    from PIL import ImageCms

    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(data))
        space = opened.profile.xcolor_space
        if space != _SPACES[mode] and (mode, space) != ("L", _SPACES["RGB"]):
            raise ValueError(f"a profile of {space}")
        convert = _of_grays(opened, space) if mode == "L" else _of_colors(opened, mode)
        name = " ".join((opened.profile.profile_description or "unnamed").split())[:_LONGEST_NAME]
        return Profile(name, None if mode != "CMYK" and _changes_nothing(convert, mode) else convert)
    except Exception:  # of any type, as in read_image; or Pillow is without LittleCMS
        return Profile("", None)


def _of_colors(profile: ImageCms.ImageCmsProfile, mode: str, *, exact: bool = False) -> Convert:
    """Convert colors by LittleCMS; `exact` without its tables, which are many times faster and coarse in the dark."""
    from PIL import ImageCms

    flags = ImageCms.Flags.NOOPTIMIZE if exact else ImageCms.Flags.NONE
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
    transform = ImageCms.buildTransform(profile, srgb, mode, "RGB", flags=flags)
    return transform.apply


def _of_grays(profile: ImageCms.ImageCmsProfile, space: str) -> Convert:
    """Convert grays by a table; a profile of RGB has neutral colors, too."""
    mode = "L" if space == _SPACES["L"] else "RGB"
    exact = _of_colors(profile, mode, exact=True)
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    table = np.asarray(exact(ramp.convert(mode)))[0, :, 1].tolist()
    return lambda image: image.point(table)


def _changes_nothing(convert: Convert, mode: str) -> bool:
    """True if a conversion moves no color visibly."""
    steps = np.arange(0, 256, 15, dtype=np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, -1, 3)
    given = np.arange(256, dtype=np.uint8)[None] if mode == "L" else cube
    found = np.asarray(convert(Image.fromarray(given)))
    return int(np.abs(found.astype(int) - given.astype(int)).max()) <= _INVISIBLE
