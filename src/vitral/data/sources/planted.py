"""`planted`: generated pictures whose class rests on one patch, and the place of that patch is known.

So a map of what an answer rests on can be right or wrong. A picture of 32×32 pixels is a grid of cells of 4×4, the
patches of the networks that the plan chooses for this size. Sixteen cells hold a shape, all others noise. One of the
sixteen, anywhere, has one of three shapes in one of two colours: that is the class. The others have no such
combination, but the same shapes in other colours and the same colours on other shapes; so neither a colour nor a shape
anywhere in the picture tells anything, only the two together in one cell. All shapes have eight pixels and are their
own mirror image. Cells and kinds of the other fifteen are drawn in the same way for every class.

Nothing is stored: a picture is a function of its split and its number, the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitral.data.dataset import DataSet, Numbered, Split
from vitral.errors import DataError

SIZES = {"train": 8000, "val": 1000, "test": 1000}
"""Pictures in each split."""
SIDE = 32
"""Pixels of a picture's side."""
CELL = 4
"""Pixels of a cell's side."""
GRID = SIDE // CELL
"""Cells of a picture's side."""
DISTRACTORS = 15
"""Cells with a shape that says nothing about the class."""

SHAPES = {
    "cross": ("#..#", ".##.", ".##.", "#..#"),
    "cup": ("#..#", "#..#", "####", "...."),
    "ring": (".##.", "#..#", "#..#", ".##."),
    "bars": ("#..#", "#..#", "#..#", "#..#"),
    "rails": ("####", "....", "....", "####"),
    "nail": ("####", ".##.", ".##.", "...."),
}
GROUND = 128
"""Where there is no shape: zero after standardisation, the baseline that methods of attribution take for nothing."""
NOISE = 32
"""Every pixel and channel is off by up to this."""
COLOURS = {"green": (64, 192, 64), "red": (192, 64, 64), "blue": (64, 64, 192), "yellow": (192, 192, 64)}
"""All equally far from the ground in every channel."""
TELLING = ("cross", "cup", "ring"), ("green", "red")
"""The shapes and the colours whose combinations are the classes."""

CLASSES = tuple(f"{colour} {shape}" for colour in TELLING[1] for shape in TELLING[0])
_KINDS = tuple((shape, colour) for colour in COLOURS for shape in SHAPES)
_PLANTED = tuple((shape, colour) for colour in TELLING[1] for shape in TELLING[0])  # by class
_OTHERS = tuple(kind for kind in _KINDS if kind not in _PLANTED)

_MASKS = {name: np.array([[c == "#" for c in row] for row in rows]) for name, rows in SHAPES.items()}


@dataclass(frozen=True)
class Drawing:
    """What a picture shows, before it is drawn."""

    cells: tuple[int, ...]
    """Places row by row, the planted one first."""
    kinds: tuple[tuple[str, str], ...]
    """Shape and colour in each of them."""
    noise: np.ndarray
    """int16 (32, 32, 3), −32 to 31."""

    @classmethod
    def of(cls, split: str, index: int) -> Drawing:
        """Picture `index` of `split`. Made from raw words of the generator alone: numpy promises these never change."""
        seed = np.random.SeedSequence((tuple(SIZES).index(split), index))
        words = np.random.PCG64(seed).random_raw(GRID**2 + DISTRACTORS + SIDE * SIDE * 3 // 8)
        places, choices, noise = np.split(words, (GRID**2, GRID**2 + DISTRACTORS))
        cells = np.argsort(places, kind="stable")[: 1 + DISTRACTORS]
        others = [_OTHERS[int(word % len(_OTHERS))] for word in choices]
        pixels = noise.astype("<u8").view(np.uint8).reshape(SIDE, SIDE, 3)
        return cls(tuple(map(int, cells)), (_PLANTED[label(index)], *others), (pixels >> 2).astype(np.int16) - NOISE)

    def pixels(self) -> np.ndarray:
        """uint8 (32, 32, 3)."""
        picture = np.full((SIDE, SIDE, 3), GROUND, np.int16)
        for place, (shape, colour) in zip(self.cells, self.kinds, strict=True):
            picture[_cell(place)][_MASKS[shape]] = COLOURS[colour]
        return (picture + self.noise).astype(np.uint8)


@dataclass(frozen=True)
class Drawn:
    """Fetch that draws."""

    split: str

    def __call__(self, i: int) -> np.ndarray:
        return Drawing.of(self.split, i).pixels()

    def identity(self, i: int) -> str:
        return f"planted {self.split} {i}"


def accepts(data: str) -> bool:
    """Whether this is the name of the generated set."""
    return data.lower() == "planted"


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """Train, val and test, always the same pictures."""
    splits = {
        name: Split(Numbered(f"planted/{name}", size), np.array([label(i) for i in range(size)], np.int64), Drawn(name))
        for name, size in SIZES.items()
    }
    return DataSet("planted", CLASSES, splits, data)


def label(index: int) -> int:
    """The class of a picture, in any split: as many of each as can be."""
    return index % len(CLASSES)


def mask(split: str, index: int) -> np.ndarray:
    """bool (32, 32): the pixels of the planted cell."""
    if split not in SIZES or not 0 <= index < SIZES[split]:
        raise DataError("no such picture", where=f"planted/{split}[{index}]", why=f"there are {SIZES}")
    found = np.zeros((SIDE, SIDE), bool)
    found[_cell(Drawing.of(split, index).cells[0])] = True
    return found


def mask_of(name: str) -> np.ndarray:
    """`mask` of the picture that its split calls so, "planted/test[123]"; `DataError` for any other name."""
    found = re.fullmatch(r"planted/([a-z]+)\[([0-9]{1,6})\]", name)
    if not found:
        raise DataError("not a picture of the set 'planted'", where=name, hint="vitral explain RUN --benchmark planted")
    return mask(found[1], int(found[2]))


def masks_for(split: Split) -> Callable[[int], np.ndarray]:
    """Picture number in `split`, however it was cut and ordered, → `mask`."""
    return lambda index: mask_of(split.names[index])


def _cell(place: int) -> tuple[slice, slice]:
    """The pixels of a cell, counted row by row."""
    row, column = divmod(place, GRID)
    return slice(row * CELL, (row + 1) * CELL), slice(column * CELL, (column + 1) * CELL)
