"""Predictions, with their forms: text, JSON, table, data frame, notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, SupportsIndex, overload

import numpy as np

from vitral.console import html_table, shown_together
from vitral.errors import UsageError
from vitral.frames import data_frame
from vitral.kinds import checked
from vitral.wording import shown

if TYPE_CHECKING:
    import pandas

UNKNOWN = "unknown"
"""Label of an image of no known class."""
NOT_SURE = "not sure"
"""Answer to an image whose most probable class has too low a probability."""


class ByValue:
    """Equality and hash of a dataclass by the values of its fields, some of which are numpy arrays."""

    def __eq__(self, other: object) -> bool:
        return self._values() == other._values() if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._values())

    def _values(self) -> tuple[object, ...]:
        found = (getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]  # it is a dataclass
        return tuple(tuple(one.tolist()) if isinstance(one, np.ndarray) else one for one in found)


def first(count: int) -> slice:
    """Return the slice of the `count` most probable of a ranking; `UsageError` for a negative count."""
    if count < 0:
        raise UsageError(f"the {count} most probable cannot be listed", why="a count is 0 or more", hint="top(5)")
    return slice(count)


@dataclass(frozen=True, eq=False)
class Prediction(ByValue):
    """The prediction for one image: the probability of each class.

    Example:
        prediction = vitral.load("runs/photos")("cat.jpg")
        print(prediction.label, prediction.confidence, prediction.top(2))
    """

    name: str
    classes: tuple[str, ...]
    probabilities: np.ndarray
    """(K,), summing to 1."""
    threshold: float | None = None
    """A class with probability p is in `labels` if 1 - p is at most this; None if no coverage was requested."""
    unknown: bool | None = None
    """True for an image of no known class; None for weights without a threshold for such images."""
    sure: bool | None = None
    """True if the prediction is confident enough for the requested fraction of correct answers; None if none is
    requested.
    """

    @property
    def answer(self) -> str:
        """The label, or "not sure" if `sure` is False."""
        return NOT_SURE if self.sure is False and not self.unknown else self.label

    @property
    def label(self) -> str:
        """The most probable class; "unknown" for an image of no known class."""
        return UNKNOWN if self.unknown else self.classes[int(self.probabilities.argmax())]

    @property
    def confidence(self) -> float:
        """The probability of the most probable class."""
        return float(self.probabilities.max())

    @property
    def labels(self) -> tuple[str, ...]:
        """Classes that cover the true one with the chosen coverage, most probable first; empty without a coverage."""
        if self.threshold is None:
            return ()
        order = np.argsort(-self.probabilities, kind="stable")
        inside = 1 - self.probabilities[order].astype(np.float64) <= self.threshold
        return tuple(self.classes[index] for rank, index in enumerate(order) if inside[rank] or not rank)

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The most probable classes with their probabilities, best first."""
        order = np.argsort(-self.probabilities, kind="stable")[first(count)]
        return [(self.classes[i], float(self.probabilities[i])) for i in order]

    def columns(self, top: int = 1, all: bool = False) -> Columns:
        """The columns of a table with this prediction."""
        return Columns(self.classes, top, all, self.threshold, self.unknown is not None, self.sure is not None)

    def cells(self, count: int = 3) -> list[str]:
        """Return the prediction as text: "unknown" or "not sure" if that applies, the `count` most probable classes,
        and the classes in `labels`.
        """
        covering = [f"{{{', '.join(self.labels)}}}"] if self.labels else []
        without = [self.answer] if self.unknown or self.sure is False else []
        return [*without, *(f"{name} {p:.1%}" for name, p in self.top(count)), *covering]

    def to_json(self, count: int = 5) -> dict[str, Any]:
        """Return plain data, with the `count` most probable classes."""
        top = [{"class": name, "probability": p} for name, p in self.top(count)]
        sets = {} if self.threshold is None else {"labels": list(self.labels)}
        unknown = {} if self.unknown is None else {"unknown": self.unknown}
        answer = {} if self.sure is None else {"answer": self.answer}
        known = {"image": self.name, **answer, "label": self.label, "confidence": self.confidence, "top": top}
        return {**known, **sets, **unknown}

    def __repr__(self) -> str:
        return f"Prediction({self.answer!r}, {self.confidence:.1%}, {self.name!r})"

    def _repr_html_(self) -> str:
        """The five most probable classes with a bar for each."""
        bar = '<div style="width:{width:.0f}px;height:0.8em;background:#4c78a8"></div>'
        rows = [(name, f"{p:.1%}", bar.format(width=160 * p)) for name, p in self.top()]
        without = self.unknown or self.sure is False
        return html_table(f"{shown(self.name)} ({self.answer})" if without else shown(self.name), rows)


class Predictions(list[Prediction]):
    """A list of predictions, with `to_frame` for pandas."""

    @overload
    def __getitem__(self, index: SupportsIndex) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> Predictions: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Prediction | Predictions:
        item = super().__getitem__(index)
        return Predictions(item) if isinstance(item, list) else item

    def _repr_html_(self) -> str:
        return shown_together(self)

    @checked
    def to_frame(self, top: int = 1, *, all: bool = False) -> pandas.DataFrame:
        """Return a pandas data frame with the columns of `vitral predict --out`.

        They are `path`, `class` and `probability`; with `top` above 1 also `label_1`, `probability_1` …; with `all`
        also `p_CLASS` for each class. Of other tasks they are the labels, or the numbers. Raises `MissingExtraError` if
        pandas is not installed.
        """
        columns = self[0].columns(top, all) if self else Columns((), top, all)
        rows = [(one.name, *columns.cells(one)) for one in self]
        return data_frame(rows, ["path", *columns.names])


class Columns:
    """The columns of a table of predictions: class and probability, the top classes, all classes, the covering ones,
    and with `unknown` 1 for an image of no known class, otherwise 0. With `sure` the first one is the answer.
    """

    def __init__(
        self,
        classes: Sequence[str],
        top: int = 1,
        all: bool = False,
        threshold: float | None = None,
        unknown: bool = False,
        sure: bool = False,
    ):
        self.classes, self.all, self.threshold, self.unknown, self.sure = classes, all, threshold, unknown, sure
        self.top = min(top, len(classes)) if top > 1 else 0
        ranked = [name for rank in range(1, self.top + 1) for name in (f"label_{rank}", f"probability_{rank}")]
        self.names = ["class", "probability", *ranked, *(_columns_of(classes) if all else ())]
        if threshold is not None:
            self.names.append("labels")
        if unknown:
            self.names.append(UNKNOWN)
        if sure:
            self.names.insert(0, "answer")
        self.texts = {"answer", "class", "labels", *ranked[::2]}

    def cells(self, prediction: Any) -> list[str | float | None]:
        """Return the cells of the prediction of one image."""
        cells = self.values(prediction.probabilities)
        if self.unknown:
            cells = [prediction.label, *cells[1:], int(prediction.unknown)]
        return [prediction.answer, *cells] if self.sure else cells

    def values(self, probabilities: np.ndarray) -> list[str | float | None]:
        """Return the cells of one image's probabilities, without the answer. A float has the fewest digits that
        identify its float32; None replaces a value that is not finite.
        """
        order = np.argsort(-probabilities, kind="stable")[: max(self.top, 1)]
        ranked = [cell for i in order for cell in (self.classes[i], _exact(probabilities[i]))]
        sets = [] if self.threshold is None else [self._labels(probabilities)]
        return [*ranked[:2], *(ranked if self.top else ()), *(map(_exact, probabilities) if self.all else ()), *sets]

    def _labels(self, probabilities: np.ndarray) -> str:
        """Return the covering classes, separated by "|"."""
        return "|".join(Prediction("", tuple(self.classes), probabilities, self.threshold).labels)


def _exact(value: np.float32) -> float | None:
    return float(str(value)) if np.isfinite(value) else None


def _columns_of(classes: Sequence[str]) -> list[str]:
    """Return a column name for each class; classes of the same name are numbered."""
    unique = len(set(classes)) == len(classes)
    return [f"p_{name}" if unique else f"p_{number}_{name}" for number, name in enumerate(classes)]
