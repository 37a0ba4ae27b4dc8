"""Ground-truth masks from files: a folder of masks, or a table of boxes.

A mask belongs to every image whose path has the same ending, ignoring extensions: `masks/cat/1.png` to
`photos/train/cat/1.jpg`, `masks/1.png` to every image named 1.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np

from vitral.data.dataset import Split
from vitral.data.files import is_image
from vitral.data.images.decode import read_image
from vitral.data.spellings import nfc
from vitral.errors import DataError
from vitral.explanation.benchmark import MaskOf

COLUMNS = ("image", "left", "top", "right", "bottom")
"""Columns of a table of boxes, one box per line, in pixels of the stored image, right and bottom exclusive."""


def masks_from(path: str | Path, split: Split) -> MaskOf:
    """Masks (H, W) of a split's images by number; None for images without a mask.

    From a folder of masks, in which the object is not black, or from a .csv with `COLUMNS`, in which the object is the
    union of an image's boxes. Raises `DataError` for another path, an invalid table, and if no mask belongs to an
    image.
    """
    path = Path(path)
    if path.is_dir():
        masks = _masks(path)
    elif path.suffix.lower() == ".csv" and path.is_file():
        masks = _boxes(path)
    else:
        hint = f"a folder of images, or a .csv with the columns {', '.join(COLUMNS)}"
        raise DataError("no such folder of masks or table of boxes", where=path, hint=hint)
    if not any(_matching(name, masks) for name in split.names):
        why = f"the images are named like {split.names[0]}"
        raise DataError("none of these masks belongs to an image", where=path, why=why, hint="use the same names")

    def mask_of(index: int) -> np.ndarray | None:
        draw = _matching(split.names[index], masks)
        return draw(split, index) if draw else None

    return mask_of


Draw = Callable[[Split, int], np.ndarray]
"""Draws the mask of an image of a split."""


def _matching(name: str, masks: Mapping[str, Draw]) -> Draw | None:
    """Entry with the longest ending of an image's path."""
    parts = _key(name.rpartition(":")[2]).split("/")
    endings = ("/".join(parts[i:]) for i in range(len(parts)))
    return next((masks[ending] for ending in endings if ending in masks), None)


def _key(path: str) -> str:
    return nfc(PurePosixPath(path.replace("\\", "/")).with_suffix("").as_posix())


def _masks(folder: Path) -> dict[str, Draw]:
    def draw(file: Path, split: Split, index: int) -> np.ndarray:
        pixels = read_image(file, name=str(file), channels=1)[..., 0]
        return pixels > (127 if file.suffix.lower() in (".jpg", ".jpeg") else 0)  # black in a JPEG is not exactly 0

    files = sorted(file for file in folder.rglob("*") if file.is_file() and is_image(file.name))
    return {_key(file.relative_to(folder).as_posix()): partial(draw, file) for file in files}


def _boxes(table: Path) -> dict[str, Draw]:
    def draw(boxes: list[list[int]], split: Split, index: int) -> np.ndarray:
        mask = np.zeros(split.image(index).shape[:2], bool)
        for left, top, right, bottom in boxes:
            mask[max(top, 0) : max(bottom, 0), max(left, 0) : max(right, 0)] = True
        return mask

    boxes_of: dict[str, list[list[int]]] = defaultdict(list)
    with table.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.DictReader(file)
        if missing := [name for name in COLUMNS if name not in (rows.fieldnames or ())]:
            raise DataError(f"no column '{missing[0]}'", where=table, why=f"boxes need {', '.join(COLUMNS)}")
        for row in rows:
            sides = [row[side] for side in COLUMNS[1:]]
            try:
                boxes_of[_key(row["image"])].append([round(float(side)) for side in sides])
            except (TypeError, ValueError, OverflowError):
                why = f"line {rows.line_num} has {', '.join(map(str, sides))}"
                raise DataError("a box is four numbers", where=table, why=why) from None
    return {name: partial(draw, boxes) for name, boxes in boxes_of.items()}
