"""The program that makes lines of digits: held-out digits in held-out lines, the same bytes each time."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from vitral.data import load
from vitral.data.sources.lines import load_lines
from vitral.data.tokens import decode

TOOLS = Path(__file__).resolve().parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import digit_lines

    return digit_lines


def test_splits_share_no_digit(tool):
    splits = tool.splits_of(load("digits"))
    assert set(splits) == {"train", "val", "test"}
    names = {name: set(split.names) for name, split in splits.items()}
    assert not names["train"] & names["val"]
    assert not names["test"] & (names["train"] | names["val"])


def test_a_line_has_its_digits_from_left_to_right(tool):
    cells = np.zeros((3, tool.CELL, tool.CELL), np.uint8)
    cells[:, 8:20, 8:20] = np.array([80, 160, 240])[:, None, None]
    image = tool.line(cells, np.random.default_rng(0))
    assert image.shape == (tool.HEIGHT, tool.WIDTH)
    order = [int(column.max()) for column in image.T if column.max()]
    assert sorted(set(order)) == [80, 160, 240]
    assert order == sorted(order)


def test_the_same_options_make_the_same_lines(tool, tmp_path, monkeypatch):
    for out in ("a", "b"):
        words = ["digit_lines.py", str(tmp_path / out), "--lines", "12", "--held-out", "4"]
        monkeypatch.setattr(sys, "argv", words)
        tool.main()
    one, other = (load_lines(tmp_path / out) for out in ("a", "b"))
    assert {name: len(split) for name, split in one.splits.items()} == {"train": 12, "val": 4, "test": 4}
    for name, split in one.splits.items():
        texts = [decode(row, one.classes) for row in split.labels]
        assert all(2 <= len(text) <= 8 and text.isdigit() for text in texts)
        assert texts == [decode(row, other.classes) for row in other[name].labels]
        assert all(split.raw(i) == other[name].raw(i) for i in range(len(split)))
