"""Contact sheets of the findings of `vitral data check`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitral.data import DataSet
from vitral.data.findings import NearPair, Place
from vitral.workflows.contact_sheet import contact_sheet

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
