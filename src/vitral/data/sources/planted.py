"""`planted`: generated images whose class depends on one patch at a known location.

Heatmaps can therefore be tested against ground truth. An image of 32×32 pixels is a grid of cells of 4×4, the patches
of the networks that the plan chooses for this size. Sixteen cells contain a shape, all others noise. One of the
sixteen, at a random location, has one of three shapes in one of two colors: that is the class. The other fifteen
(distractors) have none of these combinations, but the same shapes in other colors and the same colors on other shapes.
So neither a color nor a shape alone determines the class, only both together in one cell. All shapes have eight pixels
and are mirror-symmetric. Cells, shapes and colors of the distractors have the same distribution for every class.

Nothing is stored: an image is a function of its split and its number, the same on every machine.
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
"""Images in each split."""
SIDE = 32
"""Side of an image, in pixels."""
CELL = 4
"""Side of a cell, in pixels."""
GRID = SIDE // CELL
"""Side of an image, in cells."""
DISTRACTORS = 15
"""Cells with a shape that is independent of the class."""

SHAPES = {
    "cross": ("#..#", ".##.", ".##.", "#..#"),
    "cup": ("#..#", "#..#", "####", "...."),
    "ring": (".##.", "#..#", "#..#", ".##."),
    "bars": ("#..#", "#..#", "#..#", "#..#"),
    "rails": ("####", "....", "....", "####"),
    "nail": ("####", ".##.", ".##.", "...."),
}
GROUND = 128
"""Background value: zero after standardization, the baseline of attribution methods."""
NOISE = 32
"""Amplitude of the noise in every pixel and channel."""
COLORS = {"green": (64, 192, 64), "red": (192, 64, 64), "blue": (64, 64, 192), "yellow": (192, 192, 64)}
"""Colors equally far from the background in every channel."""
CLASS_SHAPES, CLASS_COLORS = ("cross", "cup", "ring"), ("green", "red")
"""Shapes and colors whose combinations are the classes."""

CLASSES = tuple(f"{color} {shape}" for color in CLASS_COLORS for shape in CLASS_SHAPES)
_COMBINATIONS = tuple((shape, color) for color in COLORS for shape in SHAPES)
_PLANTED = tuple((shape, color) for color in CLASS_COLORS for shape in CLASS_SHAPES)  # by class
_DISTRACTORS = tuple(pair for pair in _COMBINATIONS if pair not in _PLANTED)

_MASKS = {name: np.array([[c == "#" for c in row] for row in rows]) for name, rows in SHAPES.items()}


@dataclass(frozen=True)
class Drawing:
    """Description of an image: cells, shapes and noise."""

    cells: tuple[int, ...]
    """Cells with a shape, numbered row by row, the planted one first."""
    kinds: tuple[tuple[str, str], ...]
    """Shape and color in each of `cells`."""
    noise: np.ndarray
    """int16 (32, 32, 3), −32 to 31."""

    @classmethod
    def of(cls, split: str, index: int) -> Drawing:
        """Describe image `index` of `split`, from raw words of the generator alone: numpy keeps these stable."""
        seed = np.random.SeedSequence((tuple(SIZES).index(split), index))
        words = np.random.PCG64(seed).random_raw(GRID**2 + DISTRACTORS + SIDE * SIDE * 3 // 8)
        places, choices, noise = np.split(words, (GRID**2, GRID**2 + DISTRACTORS))
        cells = np.argsort(places, kind="stable")[: 1 + DISTRACTORS]
        others = [_DISTRACTORS[int(word % len(_DISTRACTORS))] for word in choices]
        pixels = noise.astype("<u8").view(np.uint8).reshape(SIDE, SIDE, 3)
        return cls(tuple(map(int, cells)), (_PLANTED[label(index)], *others), (pixels >> 2).astype(np.int16) - NOISE)

    def pixels(self) -> np.ndarray:
        """Draw the image, uint8 (32, 32, 3)."""
        image = np.full((SIDE, SIDE, 3), GROUND, np.int16)
        for place, (shape, color) in zip(self.cells, self.kinds, strict=True):
            image[_cell(place)][_MASKS[shape]] = COLORS[color]
        return (image + self.noise).astype(np.uint8)


@dataclass(frozen=True)
class DrawingFetch:
    """Fetch that draws images."""

    split: str

    def __call__(self, i: int) -> np.ndarray:
        return Drawing.of(self.split, i).pixels()

    def identity(self, i: int) -> str:
        return f"planted {self.split} {i}"


def accepts(data: str) -> bool:
    """True for the name of the generated set."""
    return data.lower() == "planted"


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """Load train, val and test splits, always the same images."""
    splits = {}
    for name, size in SIZES.items():
        labels = np.array([label(i) for i in range(size)], np.int64)
        splits[name] = Split(Numbered(f"planted/{name}", size), labels, DrawingFetch(name))
    return DataSet("planted", CLASSES, splits, data)


def label(index: int) -> int:
    """The class of an image, in any split; classes are balanced."""
    return index % len(CLASSES)


def mask(split: str, index: int) -> np.ndarray:
    """Mask of the planted cell, bool (32, 32)."""
    if split not in SIZES or not 0 <= index < SIZES[split]:
        raise DataError("no such image", where=f"planted/{split}[{index}]", why=f"there are {SIZES}")
    inside = np.zeros((SIDE, SIDE), bool)
    inside[_cell(Drawing.of(split, index).cells[0])] = True
    return inside


def mask_of(name: str) -> np.ndarray:
    """`mask` of the image with this name, "planted/test[123]"; `DataError` for any other name."""
    match = re.fullmatch(r"planted/([a-z]+)\[([0-9]{1,6})\]", name)
    if not match:
        raise DataError("not an image of the set 'planted'", where=name, hint="vitral explain RUN --benchmark planted")
    return mask(match[1], int(match[2]))


def masks_for(split: Split) -> Callable[[int], np.ndarray]:
    """Function from an image's number in `split`, in any selection and order, to its `mask`."""
    return lambda index: mask_of(split.names[index])


def _cell(place: int) -> tuple[slice, slice]:
    """The pixels of a cell, numbered row by row."""
    row, column = divmod(place, GRID)
    return slice(row * CELL, (row + 1) * CELL), slice(column * CELL, (column + 1) * CELL)
