"""Any number of labels an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vitral.data.spellings import is_missing, listed
from vitral.data.targets.classes import index_labels
from vitral.data.targets.columns import LabelColumns, bit_of, cell_of
from vitral.data.targets.target import ClassFolders, Labeling, LabelReader, Targets
from vitral.errors import DataError
from vitral.wording import shown

SEPARATORS = ("|", ";")
"""Separators of labels that are found without being named. A space or a comma may be part of a name."""


@dataclass(frozen=True)
class SeveralLabels(Targets):
    """Any number of labels an image: (n, K) uint8, 1 for each label that the image has."""

    task = "labels"
    strata_noun = "each label"
    threshold: ClassVar[float] = 0.5

    def describe(self, label: np.ndarray, names: Sequence[str]) -> str:
        return ", ".join(name for name, has in zip(names, label, strict=True) if has) or "no label"

    def reader(self, columns: LabelColumns, wanted: Labeling) -> LabelReader | None:
        if columns.label is not None and (reader := separated(columns, columns.label, wanted.separator)):
            return reader
        if columns.all_numbers() and columns.all_bits():
            return indicators(columns)
        columns.refuse_commas(columns.chosen)
        if columns.chosen:
            columns.refuse(self.task, "0 and 1", "not 0 or 1", bit_of)
        return None

    def labeling(self, names: tuple[str, ...], separator: str | None, class_folders: ClassFolders) -> Labeling:
        return Labeling(self.task, separator, names=names, class_folders=class_folders)

    def counts(self, labels: np.ndarray, names: int) -> np.ndarray:
        return labels.sum(axis=0, dtype=np.int64)

    def absent(self, before: np.ndarray, after: np.ndarray, names: int) -> np.ndarray:
        return np.flatnonzero(before.any(axis=0) & ~after.any(axis=0))

    def strata(self, labels: np.ndarray, names: int) -> np.ndarray:
        """An image counts for its rarest label, so that rare ones are shared out first; without labels, for `names`."""
        counts = self.counts(labels, names)
        rarity = np.where(labels > 0, counts, np.iinfo(np.int64).max)
        return np.where(labels.any(axis=1), rarity.argmin(axis=1), names)

    def renumbered(self, labels: np.ndarray, place: Sequence[int | None], names: int) -> np.ndarray:
        moved = np.zeros((len(labels), names), np.uint8)
        for old, new in enumerate(place):
            if new is not None:
                moved[:, new] |= labels[:, old]
        return moved

    def check(self, names: Sequence[str], source: str) -> None:
        if not names:
            why, hint = (
                "no image has a label",
                "write the labels of each image, as cat|dog; or name the --label-separator",
            )
            raise DataError("there are no labels", where=source, why=why, hint=hint)


SEVERAL_LABELS = SeveralLabels()


@dataclass(frozen=True)
class SeparatedLabels:
    """A column with any number of labels, or none."""

    column: int
    separator: str
    reason: str
    targets: Targets = SEVERAL_LABELS
    missing: str = "label"

    def parse(self, row: Sequence[str]) -> frozenset[str]:
        cell = cell_of(row, self.column)
        found = listed(cell)
        stripped = (shown(one.strip()) for one in (cell.split(self.separator) if found is None else found))
        return frozenset(one for one in stripped if not is_missing(one))

    def build(
        self, labels: Mapping[str, list[frozenset[str]]], where: str
    ) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        names, _ = index_labels({split: sorted(frozenset().union(*sets)) for split, sets in labels.items()}, where)
        place = {name: i for i, name in enumerate(names)}
        found = {}
        for split, sets in labels.items():
            found[split] = np.zeros((len(sets), len(names)), np.uint8)
            for row, given in enumerate(sets):
                found[split][row, [place[name] for name in given]] = 1
        return names, found


@dataclass(frozen=True)
class Indicators:
    """A column of 0 and 1 for each label."""

    columns: tuple[int, ...]
    names: tuple[str, ...]
    reason: str
    targets: Targets = SEVERAL_LABELS
    missing: str = "0 or 1 in each column"

    def parse(self, row: Sequence[str]) -> tuple[int, ...] | None:
        bits = [bit_of(cell_of(row, column)) for column in self.columns]
        return None if None in bits else tuple(bit for bit in bits if bit is not None)

    def build(
        self, labels: Mapping[str, list[tuple[int, ...]]], where: str
    ) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        return self.names, {split: np.array(rows, np.uint8) for split, rows in labels.items()}


def separated(columns: LabelColumns, label: int, separator: str | None) -> SeparatedLabels | None:
    """Return the reader of a column of lists or of separated labels; None for one of 0 and 1."""
    name, cells = columns.header[label], list(columns.cells(label).values())
    if any(map(listed, cells)):
        return SeparatedLabels(label, SEPARATORS[0], f"the column {name} has a list of the labels of an image")
    found = separator or found_separator(cells)
    if found is None and cells and all(bit_of(cell) is not None for cell in cells):
        return None
    how = f"separated by '{found}'" if found else "one at most"
    return SeparatedLabels(label, found or SEPARATORS[0], f"the column {name} has the labels of an image, {how}")


def found_separator(cells: Sequence[str]) -> str | None:
    """Return the first of `SEPARATORS` that a cell has."""
    return next((one for one in SEPARATORS if any(one in cell for cell in cells)), None)


def indicators(columns: LabelColumns) -> Indicators:
    """Return the reader of the chosen columns, which hold 0 and 1."""
    return Indicators(tuple(columns.chosen), columns.names, f"{columns.holding} 0 or 1 for each label")
