"""Masks and boxes from files are matched to their images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitral.data.dataset import Pixels, Split
from vitral.errors import DataError
from vitral.explanation.masks import masks_from

NAMES = ["photos/train/cat/1.jpg", "photos/train/dog/1.jpg", "set.tar:train/dog/2.png", "photos/dog/3"]
SIZE = (6, 8)


@pytest.fixture
def split() -> Split:
    return Split(NAMES, np.zeros(len(NAMES), np.int64), Pixels(np.zeros((len(NAMES), *SIZE, 3), np.uint8)))


def drawn(path: Path, rows: slice, values: int = 255) -> np.ndarray:
    mask = np.zeros(SIZE, np.uint8)
    mask[rows] = values
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(mask).save(path)
    return mask > 0


def test_masks_of_a_folder_by_the_longest_ending(tmp_path, split):
    cat = drawn(tmp_path / "cat" / "1.png", slice(0, 2))
    other = drawn(tmp_path / "1.png", slice(2, 3), values=1)  # masks of 0 and 1 are masks, too
    blurred = drawn(tmp_path / "2.jpg", slice(3, 6))
    mask_of = masks_from(tmp_path, split)
    for found, wanted in zip(map(mask_of, range(3)), (cat, other, blurred), strict=True):
        assert found.dtype == bool
        assert (found == wanted).all()
    assert mask_of(3) is None


def test_boxes_of_a_table_are_joined(tmp_path, split):
    table = tmp_path / "boxes.csv"
    table.write_text("image,left,top,right,bottom\ncat/1.jpg,1,0,3,2\ncat/1.jpg,6.0,4,99,6\n3,-4,-4,1,1\n")
    mask_of = masks_from(table, split)
    wanted = np.zeros(SIZE, bool)
    wanted[0:2, 1:3] = wanted[4:6, 6:8] = True
    assert (mask_of(0) == wanted).all()
    assert mask_of(1) is None
    assert mask_of(3).sum() == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("image,left,top\na,1,2\n", "no column 'right'"),
        ("image,left,top,right,bottom\n1,0,0,x,1\n", "line 2 has 0, 0, x, 1"),
        ("image,left,top,right,bottom\n1,0,0,inf,1\n", "a box is four numbers"),
        ("image,left,top,right,bottom\nnone,0,0,1,1\n", "none of these masks belongs"),
        ("", "no column 'image'"),
    ],
)
def test_invalid_tables(tmp_path, split, text, message):
    table = tmp_path / "boxes.csv"
    table.write_text(text)
    with pytest.raises(DataError, match=message):
        masks_from(table, split)


def test_invalid_paths(tmp_path, split):
    with pytest.raises(DataError, match="no such folder of masks or table of boxes"):
        masks_from(tmp_path / "nowhere", split)
    with pytest.raises(DataError, match="none of these masks belongs"):
        masks_from(tmp_path, split)
