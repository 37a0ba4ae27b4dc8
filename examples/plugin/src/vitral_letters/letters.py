"""A source of data: `letters:ab` is a set of drawn letters, a class each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vitral.data import DataSet, Split
from vitral.errors import DataError
from vitral.wording import natural

COUNT = 12
"""Images of each letter."""


def accepts(data: str) -> bool:
    """True for `letters:` and the letters."""
    return data.startswith("letters:")


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """Draw every letter at different places. Raises `DataError` without two letters."""
    classes = tuple(sorted(set(data.removeprefix("letters:")), key=natural))
    if len(classes) < 2:
        raise DataError("too few letters", where=data, hint="letters:ab")
    drawn = [(number, place) for number in range(len(classes)) for place in range(COUNT)]
    names = [f"{classes[number]}/{place}.png" for number, place in drawn]
    labels = np.array([number for number, _ in drawn])

    return DataSet("letters", classes, {"train": Split(names, labels, Drawing(classes))}, data)


@dataclass(frozen=True)
class Drawing:
    """Draw an image by its number. An object of a class can be sent to worker processes, a nested function cannot."""

    classes: tuple[str, ...]

    def __call__(self, index: int) -> np.ndarray:
        number, place = divmod(index, COUNT)
        image = Image.new("L", (16, 16))
        ImageDraw.Draw(image).text((2 + place % 4, 1 + place // 4), self.classes[number], fill=255)
        return np.asarray(image)[..., None]
