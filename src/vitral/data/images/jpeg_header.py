"""Headers of ordinary JPEGs, read without Pillow."""

from __future__ import annotations

import struct
from typing import NamedTuple

from vitral.data.images.color import jpeg_is_srgb

MAX_PLAIN = 1 << 25
"""Pixels up to which torchvision decodes, at ten bytes each."""

# JPEG markers (ITU T.81, table B.1).
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive
_SCAN, _APP1, _APP2, _APP14 = 0xDA, 0xE1, 0xE2, 0xEE
_HARMLESS = frozenset((0xC4, 0xDB, 0xDD, 0xFE, *range(0xE0, 0xF0)))  # tables, restart interval, comment, application


class PlainJpeg(NamedTuple):
    """An ordinary JPEG without EXIF and in the colors of sRGB, by its header."""

    mode: str
    """Pillow's: "L" or "RGB"."""
    height: int
    width: int
    is_ycbcr: bool
    """True if its colors are those of JFIF, not RGB and not what Adobe's segment says."""

    @classmethod
    def of(cls, data: bytes, at_least: tuple[int, int] | None = None) -> PlainJpeg | None:
        """Read the header; None if the file needs Pillow, which can also decode at half the size.

        Walks the segments up to the scan (ITU T.81, B.1.1): Pillow's parser would take a tenth of the decoding time.
        """
        found, adobe, tagged, at = None, False, list[int](), 2
        if not data.startswith(b"\xff\xd8\xff"):
            return None
        while at + 10 <= len(data) and data[at] == 0xFF and data[at + 1] != _SCAN:
            kind = data[at + 1]
            if kind in _FRAMES:
                bits, height, width, components = struct.unpack_from(">BHHB", data, at + 4)
                mode = {1: "L", 3: "RGB"}.get(components, "")
                if bits != 8 or not 0 < height * width <= MAX_PLAIN or not mode:
                    return None
                if at_least and height >= 2 * at_least[0] and width >= 2 * at_least[1]:
                    return None
                found = cls(mode, height, width, mode == "RGB" and data[at + 10 : at + 19 : 3] != b"RGB")
            elif kind not in _HARMLESS or (kind == _APP1 and data[at + 4 : at + 8] == b"Exif"):
                return None
            adobe |= kind == _APP14
            tagged += [at] if kind == _APP2 else []
            at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if found and not all(jpeg_is_srgb(data, place, found.mode) for place in tagged):
            return None
        return found and found._replace(is_ycbcr=found.is_ycbcr and not adobe)
