"""Draw the explanation of a text: the image, and a panel for each character with its map over the image."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitral.explanation.drawing import (
    GAP,
    LINE,
    MARGIN,
    MUTED,
    SHEET_IMAGES,
    WARNING,
    Sheet,
    check_suffix,
    enlarged,
    fit,
    overlay,
    write,
    write_bytes,
)
from vitral.explanation.heatmap import Heatmap
from vitral.explanation.methods import TEXT_METHODS
from vitral.inference.outputs.text import ReadText

_TALL = 0.6  # inches, height of a panel of a line
_NARROWEST, _WIDEST, _ROW = 1.2, 5.0, 8.4  # inches, of a panel, and of all panels side by side
_HEAD = 2.6 * LINE
_SPACE = "␣"


def save_text(text: ReadText, maps: Sequence[Heatmap], values: Mapping[str, object], path: str | Path) -> Path:
    """Write one panel a character, in reading order: .png, .svg, or .json for the `values`."""
    path = check_suffix(path)
    if path.suffix.lower() == ".json":
        return write_bytes(path, (json.dumps(values, indent=2) + "\n").encode())
    drawn = maps[:SHEET_IMAGES]
    height, width = drawn[0].image.shape[:2]
    panel = float(np.clip(_TALL * width / height, _NARROWEST, _WIDEST))
    tall = panel * min(height / width, 2.5)
    columns = max(1, min(len(drawn), int((_ROW + GAP) // (panel + GAP))))
    rows, cell = -(-len(drawn) // columns), LINE + tall + GAP
    foot = _foot(drawn[0].method, len(maps) - len(drawn))
    whole = max(columns * (panel + GAP) - GAP, 4.2)
    sheet = Sheet(whole + 2 * MARGIN, 2 * MARGIN + _HEAD + tall + GAP + rows * cell + len(foot) * LINE)
    sheet.text(MARGIN, MARGIN, fit(f"{text.text} {text.confidence:.1%}", whole, 11, bold=True), 11, weight="bold")
    where = f"{Path(text.name).name or 'image'} · the network sees {width} × {height}"
    sheet.text(MARGIN, MARGIN + 1.3 * LINE, fit(where, whole, 8.5), 8.5, MUTED)
    top = MARGIN + _HEAD
    sheet.image(MARGIN, top, panel, np.asarray(enlarged(drawn[0].image)))
    top += tall + GAP
    for number, one in enumerate(drawn):
        left, above = MARGIN + number % columns * (panel + GAP), top + number // columns * cell
        label = _SPACE if one.label.isspace() else one.label
        sheet.text(
            left, above, fit(f"{number + 1}. {label}  {one.probability:.1%}", panel, 9, bold=True), 9, weight="bold"
        )
        sheet.image(left, above + LINE, panel, np.asarray(overlay(one)))
    for number, (line, color) in enumerate(foot):
        sheet.text(MARGIN, sheet.height - MARGIN - (len(foot) - number) * LINE, fit(line, whole, 8), 8, color)
    return write(sheet.figure, path)


def _foot(method: str, left_out: int) -> list[tuple[str, str]]:
    """Lines below the panels, with their colors."""
    entry = TEXT_METHODS[method]
    lines = [(f"{entry.title} · bright: more; dark: less", MUTED)]
    lines += [(entry.note, WARNING)] if entry.note else []
    return lines + ([(f"and {left_out:,} more characters", MUTED)] if left_out else [])
