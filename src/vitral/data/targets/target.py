"""The base of all targets, and the protocol of a reader of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np

from vitral.data.targets.columns import LabelColumns

ClassFolders = Literal["auto", "top", "leaf"]
"""Folders that are classes: the topmost below the splits, or the innermost; auto refuses what may be either."""


@dataclass(frozen=True)
class Labeling:
    """The reading of labels from folders or a table, as typed."""

    task: str | None = None
    """Name of the task; None chooses it by the columns."""
    separator: str | None = None
    """Separator of several labels in a cell; None finds "|" or ";"."""
    columns: tuple[str, ...] = ()
    """Columns of labels or numbers; by default those whose names or values say so."""
    class_folders: ClassFolders = "auto"
    names: tuple[str, ...] = ()
    """Names that a network knows: of a table with a column for each, these are the columns."""


ANY = Labeling()
"""As the columns of the table say."""


class LabelReader(Protocol):
    """Reads the label of a row."""

    @property
    def targets(self) -> Targets:
        """The meaning of the labels."""

    @property
    def reason(self) -> str:
        """The reason for the task, for the plan."""

    @property
    def missing(self) -> str:
        """Word for a label that a row lacks."""

    def parse(self, row: Sequence[str]) -> object:
        """Return the label of a row, hashable; None if it lacks one."""

    def build(self, labels: Mapping[str, list[Any]], where: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        """Return the names, and the labels of every split with a row for each image."""


@dataclass(frozen=True)
class Targets:
    """One kind of labels. `labels` are a split's, with a row for each image; `names` are `DataSet.classes`.

    A label belongs to the whole image. Augmentation moves pixels and does not see labels, so masks and boxes, which
    would have to move with them, are not possible.
    """

    task: ClassVar[str]
    """Name of the task, as in `--task`."""
    one_class: ClassVar[bool] = False
    """True if a label is the number of one class: labels (n,) int64."""
    sequence: ClassVar[bool] = False
    """True if a label is a sequence of tokens, which a decoder writes and a file beside the image may hold."""
    column: ClassVar[str] = "label"
    """Name of a column of such labels."""
    threshold: ClassVar[float | None] = None
    """Threshold of a name for which none was fitted; None if a network of this task has no thresholds."""
    strata_noun: ClassVar[str]
    """Words for the groups of which a held-out split has about the same share (`strata`)."""

    def describe(self, label: np.ndarray, names: Sequence[str]) -> str:
        """Return the label of one image as text."""
        raise NotImplementedError

    def reader(self, columns: LabelColumns, wanted: Labeling) -> LabelReader | None:
        """Return the reader of these labels in a table for which `--task` names them; None without such a column.

        Raises `DataError` for columns that hold something else.
        """
        raise NotImplementedError

    def labeling(self, names: tuple[str, ...], separator: str | None, class_folders: ClassFolders) -> Labeling:
        """Return how labels of a network with these names are read."""
        return Labeling(self.task, class_folders=class_folders)

    def counts(self, labels: np.ndarray, names: int) -> np.ndarray:
        """Number of images with each name, (names,) int64."""
        raise NotImplementedError

    def absent(self, before: np.ndarray, after: np.ndarray, names: int) -> np.ndarray:
        """Numbers of the names with an image among the labels `before` and none among those `after`."""
        return np.setdiff1d(before, after)

    def strata(self, labels: np.ndarray, names: int) -> np.ndarray:
        """Group of each image, (n,) int64 from 0: splits that are cut take about the same share of every group."""
        raise NotImplementedError

    def renumbered(self, labels: np.ndarray, place: Sequence[int | None], names: int) -> np.ndarray:
        """Return the labels for other `names`: `place` has the new number of each name, None for one without images."""
        raise NotImplementedError

    def check(self, names: Sequence[str], source: str) -> None:
        """Raise `DataError` for names from which nothing can be learned; `source` is for the message."""
