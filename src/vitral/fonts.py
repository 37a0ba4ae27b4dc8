"""Fonts of drawings: letters of any script for which a font is installed, and the width of a line."""

from __future__ import annotations

import contextlib
import logging
import os
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from PIL import ImageFont

_FIRST = "DejaVu Sans"
"""Comes with matplotlib: the same letters on every machine."""
_OTHERS = (
    "Noto Sans CJK SC",
    "Noto Sans CJK JP",
    "Noto Sans CJK KR",
    "Noto Sans CJK TC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei",
    "Droid Sans Fallback",
    "PingFang SC",
    "Hiragino Sans",
    "Heiti TC",
    "Microsoft YaHei",
    "Yu Gothic",
    "Malgun Gothic",
    "Noto Sans Arabic",
    "Noto Sans Hebrew",
    "Noto Sans Devanagari",
    "Noto Sans Bengali",
    "Noto Sans Tamil",
    "Noto Sans Thai",
    "Nirmala UI",
    "Leelawadee UI",
    "Arial Unicode MS",
    "Segoe UI Symbol",
    "Noto Emoji",
    "Symbola",
    "Unifont",
)
"""Fonts of other scripts, on Linux, macOS and Windows."""
_BOLD = 1.13
"""Width of bold letters, relative to plain ones."""


@cache
def families() -> list[str]:
    """Return names of installed fonts, in the order in which matplotlib shall look for a letter."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    known = {os.path.realpath(entry.fname) for entry in fontManager.ttflist}
    for path in findSystemFonts():
        if os.path.realpath(path) not in known:  # installed since matplotlib wrote its list
            with contextlib.suppress(Exception):  # of a damaged font, of any type
                fontManager.addfont(path)
    installed = {entry.name for entry in fontManager.ttflist}
    return [_FIRST, *(name for name in _OTHERS if name in installed)]


def pillow_font(text: str, points: float) -> ImageFont.FreeTypeFont:
    """Return the first font that has all letters of a text, or else the one that has most of them."""
    letters = {ord(letter) for letter in text if not letter.isspace()}
    name = max(families(), key=lambda one: len(letters & _letters(one)))
    return ImageFont.truetype(_path(name), points)


def shortened(text: str, fits: Callable[[str], bool]) -> str:
    """Cut a text in its middle until it fits, since names differ at their ends."""
    if fits(text):
        return text
    for count in range(len(text) - 1, 1, -1):
        cut = f"{text[: count - count // 2]}…{text[len(text) - count // 2 :]}"
        if fits(cut):
            return cut
    return "…"


def width(text: str, points: float, *, bold: bool = False) -> float:
    """Return the width of a line in inches."""
    return sum(map(_em, text)) * points / 72 * (_BOLD if bold else 1)


@cache
def _em(letter: str) -> float:
    """Width of a letter, relative to the size of the font."""
    if unicodedata.category(letter) in ("Mn", "Me", "Cf"):
        return 0.0
    if ord(letter) in _letters(_FIRST):
        return _measure().getlength(letter) / 100
    return 1.0 if unicodedata.east_asian_width(letter) in "WF" else 0.6


@cache
def _measure() -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(_path(_FIRST), 100)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without matplotlib's messages on fonts that lack a weight."""
    log = logging.getLogger("matplotlib.font_manager")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@cache
def _path(family: str) -> str:
    from matplotlib.font_manager import FontProperties, findfont

    with quiet():
        return str(findfont(FontProperties(family=[family])))


@cache
def _letters(family: str) -> frozenset[int]:
    from matplotlib.font_manager import get_font

    font: Any = get_font(_path(family))
    return frozenset(font.get_charmap())
