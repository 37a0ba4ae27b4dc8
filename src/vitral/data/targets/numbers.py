"""Numbers an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitral.data.targets.columns import LabelColumns, cell_of, number_or_bit
from vitral.data.targets.target import ClassFolders, Labeling, LabelReader, Targets
from vitral.errors import DataError

_QUANTILES = 10


@dataclass(frozen=True)
class Numbers(Targets):
    """One number an image for each name: (n, T) float64."""

    task = "numbers"
    strata_noun = "low and high values"

    def describe(self, label: np.ndarray, names: Sequence[str]) -> str:
        return ", ".join(f"{name} {value:.4g}" for name, value in zip(names, label, strict=True))

    def reader(self, columns: LabelColumns, wanted: Labeling) -> LabelReader | None:
        if columns.label is not None:
            columns.refuse_commas([columns.label])
        if columns.all_numbers():
            return number_columns(columns)
        columns.refuse_odd()
        columns.refuse_commas(columns.chosen)
        columns.refuse_mixed()
        if columns.chosen:
            columns.refuse(self.task, "finite numbers", "no number", number_or_bit)
        return None

    def labeling(self, names: tuple[str, ...], separator: str | None, class_folders: ClassFolders) -> Labeling:
        return Labeling(self.task, names=names, class_folders=class_folders)

    def counts(self, labels: np.ndarray, names: int) -> np.ndarray:
        return np.full(names, len(labels), np.int64)

    def absent(self, before: np.ndarray, after: np.ndarray, names: int) -> np.ndarray:
        return np.empty(0, np.int64)

    def strata(self, labels: np.ndarray, names: int) -> np.ndarray:
        """Tenths of the first number's range of ranks: splits cover all of it."""
        ranks = labels[:, 0].argsort(kind="stable").argsort(kind="stable")
        groups = max(1, min(_QUANTILES, len(labels) // 2))  # of two images at least, so that each can be shared
        return ranks * groups // max(len(labels), 1)

    def renumbered(self, labels: np.ndarray, place: Sequence[int | None], names: int) -> np.ndarray:
        """Every one of the other names needs its column."""
        if missing := set(range(names)).difference(one for one in place if one is not None):
            why = f"{len(missing)} of {names} have no column of their name"
            raise DataError("the data lack numbers of the model", why=why, hint="name the columns as in training")
        return labels[:, [list(place).index(new) for new in range(names)]]


NUMBERS = Numbers()


@dataclass(frozen=True)
class NumberColumns:
    """A column for each number."""

    columns: tuple[int, ...]
    names: tuple[str, ...]
    reason: str
    targets: Targets = NUMBERS
    missing: str = "finite number in each column"

    def parse(self, row: Sequence[str]) -> tuple[float, ...] | None:
        numbers = [number_or_bit(cell_of(row, column)) for column in self.columns]
        return None if None in numbers else tuple(number for number in numbers if number is not None)

    def build(
        self, labels: Mapping[str, list[tuple[float, ...]]], where: str
    ) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        return self.names, {split: np.array(rows, np.float64) for split, rows in labels.items()}


def number_columns(columns: LabelColumns) -> NumberColumns:
    """Return the reader of the chosen columns, which hold numbers."""
    return NumberColumns(tuple(columns.chosen), columns.names, f"{columns.holding} numbers")
