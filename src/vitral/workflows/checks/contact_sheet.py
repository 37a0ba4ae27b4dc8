"""Draw a contact sheet: a grid of small images with text below each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitral import fonts
from vitral.atomic import replacing
from vitral.data import DataSet
from vitral.data.checks.findings import NearPair, Place
from vitral.errors import UsageError
from vitral.wording import shown

_CELL, _GAP, _LINE, _COLUMNS = 200, 12, 16, 6
_INK, _WRONG = (26, 26, 26), (163, 59, 0)


def check_png(path: str | Path, option: str = "--out") -> Path:
    """Return the path. Raises `UsageError`, with a corrected option, if its extension is not .png."""
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise UsageError(
            "a contact sheet is written as .png", where=path, hint=f"{option} {path.stem or 'similar'}.png"
        )
    return path


def contact_sheet(cells: Sequence[tuple[np.ndarray, str]], path: Path) -> None:
    """Write uint8 images (H, W, C) with their texts, row by row. Lines that begin with "wrong: " are red."""
    from vitral.explanation.drawing import enlarged  # imports matplotlib, for which errors of a command do not wait

    columns = min(len(cells), _COLUMNS)
    tall = _CELL + _GAP + _LINE * max(1 + text.count("\n") for _, text in cells)
    size = (columns * (_CELL + _GAP) + _GAP, -(-len(cells) // columns) * tall + _GAP)
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for number, (pixels, text) in enumerate(cells):
        left, top = _GAP + number % columns * (_CELL + _GAP), _GAP + number // columns * tall
        image = enlarged(pixels, _CELL)
        sheet.paste(image, (left + (_CELL - image.width) // 2, top + _CELL - image.height))
        for row, line in enumerate(text.split("\n")):
            font = fonts.pillow_font(line, 12)
            color = _WRONG if line.startswith("wrong: ") else _INK
            draw.text((left, top + _CELL + 2 + row * _LINE), _fitted(draw, shown(line), font), color, font)
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG")


def _fitted(draw: ImageDraw.ImageDraw, line: str, font: ImageFont.FreeTypeFont) -> str:
    """Shorten a line in its middle; of a path that is too long, file and folder are left, which often is the class."""

    def fits(cut: str) -> bool:
        return draw.textlength(cut, font) <= _CELL

    return fonts.shortened(line if fits(line) else "/".join(line.split("/")[-2:]), fits)


MOST_PAIRS = 60
"""Pairs on a sheet."""


def draw_near(dataset: DataSet, pairs: Sequence[NearPair], path: Path) -> int:
    """Write the first pairs side by side, those between splits first. Returns how many are on the sheet."""
    drawn = sorted(pairs, key=lambda pair: not pair.leaks)[:MOST_PAIRS]
    cells = [_cell(dataset, place, pair) for pair in drawn for place in (pair.first, pair.second)]
    contact_sheet(cells, path)
    return len(drawn)


def _cell(dataset: DataSet, place: Place, pair: NearPair) -> tuple[np.ndarray, str]:
    text = f"{pair.similarity:.1%}{', mirrored' if pair.mirrored else ''}\n{place.split}: {place.label}\n{place.name}"
    return dataset[place.split].image(place.index), text
