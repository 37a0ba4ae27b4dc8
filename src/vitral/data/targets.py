"""Targets: the meaning of a split's labels in each task. A data set has one of these beside its labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from vitral.data.text import PADDING, check_characters
from vitral.errors import DataError

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


class Targets(Protocol):
    """One kind of labels. `labels` are a split's, with a row for each image; `names` are `DataSet.classes`."""

    @property
    def task(self) -> str:
        """Name of the task, as in `--task`."""

    def counts(self, labels: np.ndarray, names: int) -> np.ndarray:
        """Number of images with each name, (names,) int64."""

    def absent(self, before: np.ndarray, after: np.ndarray, names: int) -> np.ndarray:
        """Numbers of the names with an image among the labels `before` and none among those `after`."""

    def strata(self, labels: np.ndarray, names: int) -> np.ndarray:
        """Group of each image, (n,) int64 from 0: splits that are cut take about the same share of every group."""

    def renumbered(self, labels: np.ndarray, place: Sequence[int | None], names: int) -> np.ndarray:
        """Return the labels for other `names`: `place` has the new number of each name, None for one without images."""

    def check(self, names: Sequence[str], source: str) -> None:
        """Raise `DataError` for names from which nothing can be learned; `source` is for the message."""


@dataclass(frozen=True)
class OneClass:
    """One class an image: labels (n,) int64, indices into the classes."""

    task = "class"

    def counts(self, labels: np.ndarray, names: int) -> np.ndarray:
        return np.bincount(labels, minlength=names)

    def absent(self, before: np.ndarray, after: np.ndarray, names: int) -> np.ndarray:
        return np.setdiff1d(before, after)

    def strata(self, labels: np.ndarray, names: int) -> np.ndarray:
        return labels

    def renumbered(self, labels: np.ndarray, place: Sequence[int | None], names: int) -> np.ndarray:
        return np.array([-1 if index is None else index for index in place])[labels]

    def check(self, names: Sequence[str], source: str) -> None:
        if len(names) < 2:
            raise DataError(
                f"only one class: {''.join(names)}",
                where=source,
                why="a classifier needs at least two classes to tell apart",
                hint="one folder for each class: DATA/cat/1.jpg, DATA/dog/2.jpg",
            )


ONE_CLASS = OneClass()


@dataclass(frozen=True)
class Text:
    """One text an image: tokens (n, length) int64, each text with its end and padding; the names are the tokens'."""

    task = "text"

    def counts(self, labels: np.ndarray, names: int) -> np.ndarray:
        """Images whose text has the token."""
        return np.array([(labels == token).any(axis=1).sum() for token in range(names)], np.int64)

    def absent(self, before: np.ndarray, after: np.ndarray, names: int) -> np.ndarray:
        return np.setdiff1d(before, after)

    def strata(self, labels: np.ndarray, names: int) -> np.ndarray:
        """By length, as far as the names go: splits have about the same share of short and of long texts."""
        return np.minimum((labels != PADDING).sum(axis=1), names) - 1

    def renumbered(self, labels: np.ndarray, place: Sequence[int | None], names: int) -> np.ndarray:
        return np.array([PADDING if index is None else index for index in place])[labels]

    def check(self, names: Sequence[str], source: str) -> None:
        check_characters(names, source)


@dataclass(frozen=True)
class SeveralLabels:
    """Any number of labels an image: (n, K) uint8, 1 for each label that the image has."""

    task = "labels"

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


@dataclass(frozen=True)
class Numbers:
    """One number an image for each name: (n, T) float64."""

    task = "numbers"

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

    def check(self, names: Sequence[str], source: str) -> None:
        return None


_QUANTILES = 10
TEXT, SEVERAL_LABELS, NUMBERS = Text(), SeveralLabels(), Numbers()


def require_one_class(targets: Targets, source: str, what: str) -> None:
    """Raise `DataError` for data of another task."""
    if targets.task != "class":
        why = f"these data are of --task {targets.task}"
        raise DataError(f"{what} needs one class an image", where=source, why=why, hint="a table with file,label")
