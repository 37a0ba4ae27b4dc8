"""One class an image."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitral.data.spellings import is_missing, nfc, whole
from vitral.data.targets.columns import LabelColumns, cell_of
from vitral.data.targets.target import Labeling, Targets
from vitral.errors import DataError
from vitral.wording import natural, shown, some


@dataclass(frozen=True)
class OneClass(Targets):
    """One class an image: labels (n,) int64, indices into the classes."""

    task = "class"
    one_class = True
    strata_noun = "each class"

    def describe(self, label: np.ndarray, names: Sequence[str]) -> str:
        return names[int(label)]

    def reader(self, columns: LabelColumns, wanted: Labeling) -> OneLabel | None:
        if columns.label is not None:
            reason = f"the column {columns.header[columns.label]} has one class per image"
            return OneLabel(columns.label, reason, self)
        if len(columns.free) == 1:
            columns.refuse_commas(columns.free)
        return None

    def counts(self, labels: np.ndarray, names: int) -> np.ndarray:
        return np.bincount(labels, minlength=names)

    def strata(self, labels: np.ndarray, names: int) -> np.ndarray:
        return labels

    def renumbered(self, labels: np.ndarray, place: Sequence[int | None], names: int) -> np.ndarray:
        return np.array([-1 if index is None else index for index in place])[labels]

    def check(self, names: Sequence[str], source: str) -> None:
        if len(names) < 2:
            what = f"only one class: {''.join(names)}"
            hint = "use one folder per class: DATA/cat/1.jpg, DATA/dog/2.jpg"
            if os.path.isfile(source):
                hint = f"label images of another class: vitral label {shlex.quote(source)}"
            raise DataError(what, where=source, why="a classifier needs at least two classes", hint=hint)


ONE_CLASS = OneClass()


@dataclass(frozen=True)
class OneLabel:
    """A column with a class."""

    column: int
    reason: str
    targets: Targets = ONE_CLASS
    missing: str = "label"
    numeric: bool = False
    """All labels are whole numbers, which pandas may have written as "3.0"."""
    hidden: bool = False
    """-1 stands for no label."""

    def parse(self, row: Sequence[str]) -> str | None:
        cell = nfc(shown(cell_of(row, self.column)))
        if is_missing(cell, hidden=self.hidden):
            return None
        return whole(cell) if self.numeric else cell

    def build(self, labels: Mapping[str, list[str]], where: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        return index_labels(labels, where)


def require_one_class(targets: Targets, source: str, what: str) -> None:
    """Raise `DataError` for data of another task."""
    if not targets.one_class:
        why = f"these data are of --task {targets.task}"
        raise DataError(f"{what} needs one class per image", where=source, why=why, hint="use a table with file,label")


def index_labels(
    labels: Mapping[str, Sequence[str]], source: str, also: Iterable[str] = ()
) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """Return the classes, sorted naturally, and each split's labels (n,) int64 as indexes into them.

    The classes are those of the train split (of all splits, if there is no train split) and those of `also`.
    `DataError` if another split has more.
    """
    names_of = {split: set(texts) for split, texts in labels.items()}
    known = (names_of.get("train") or set().union(*names_of.values())).union(also)
    classes = tuple(sorted(known, key=natural))
    for split, names in names_of.items():
        if extra := sorted(names - known, key=natural):
            what = f"the {split} split has classes that train lacks: {some(extra, 5)}"
            hint = "give the classes the same names in every split, or remove the extra ones"
            raise DataError(what, where=source, why=f"train has {len(classes)}: {some(classes, 5)}", hint=hint)
    position = {name: i for i, name in enumerate(classes)}
    return classes, {split: np.array([position[t] for t in texts], np.int64) for split, texts in labels.items()}
