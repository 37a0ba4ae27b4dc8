"""Any number of labels an image: a probability for each by sigmoid, and a threshold for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from vitral.console import html_table
from vitral.inference.outputs.output import Output
from vitral.inference.predictions import ByValue, Columns, first
from vitral.wording import shown


@dataclass(frozen=True, eq=False)
class LabelsPrediction(ByValue):
    """The predicted labels of one image."""

    name: str
    classes: tuple[str, ...]
    probabilities: np.ndarray
    """(K,), each on its own: they do not sum to 1."""
    thresholds: tuple[float, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels whose probability reaches their threshold, most probable first; there may be none."""
        return tuple(name for name, p, threshold in self._ranked() if p >= threshold)

    def top(self, count: int = 5) -> list[tuple[str, float]]:
        """The most probable labels with their probabilities, predicted or not."""
        return [(name, p) for name, p, _ in self._ranked()[first(count)]]

    def columns(self, top: int = 1, all: bool = False) -> LabelCells:
        """The columns of a table with this prediction."""
        return LabelCells(self.classes, top, all)

    def cells(self, count: int = 3) -> list[str]:
        """The predicted labels as text; without any, what is most probable."""
        found = [f"{name} {p:.1%}" for name, p, threshold in self._ranked() if p >= threshold]
        return found or ["no label", *(f"({name} {p:.1%})" for name, p in self.top(1))]

    def to_json(self, count: int = 5) -> dict[str, Any]:
        """Return plain data: the predicted labels, and the `count` most probable ones."""
        ranked = self._ranked()
        rows = [{"label": name, "probability": p, "threshold": t} for name, p, t in ranked]
        found = [row for row, (_, p, threshold) in zip(rows, ranked, strict=True) if p >= threshold]
        return {"image": self.name, "labels": found, "top": rows[:count]}

    def __repr__(self) -> str:
        return f"LabelsPrediction({self.labels!r}, {self.name!r})"

    def _repr_html_(self) -> str:
        """The predicted labels, for notebooks."""
        return html_table(shown(self.name), [(cell, "") for cell in self.cells()])

    def _ranked(self) -> list[tuple[str, float, float]]:
        """Label, probability and threshold, most probable first."""
        order = np.argsort(-self.probabilities, kind="stable")
        return [(self.classes[i], float(self.probabilities[i]), self.thresholds[i]) for i in order]


class LabelCells:
    """The columns of a table of predicted labels: the set, the most probable ones, all of them."""

    def __init__(self, names: Sequence[str], top: int, all: bool):
        self.ranked = Columns(names, max(top, 2), all)
        kept = self.ranked.names[2:] if top > 1 else [name for name in self.ranked.names if name.startswith("p_")]
        self.names = ["labels", *kept]
        self.texts = {"labels", *self.ranked.texts}
        taken = "".join(names)
        self.separator = next((one for one in ("|", ";", ",") if one not in taken), "\t")

    def cells(self, prediction: LabelsPrediction) -> list[str | float | None]:
        """Return the cells of one image; labels are joined by the first of "|", ";" and "," that no name contains."""
        cells = dict(zip(self.ranked.names, self.ranked.cells(prediction), strict=True))
        return [self.separator.join(prediction.labels), *(cells[name] for name in self.names[1:])]


@dataclass(frozen=True)
class Labels(Output):
    """Probabilities of labels that do not exclude each other, with a threshold for each."""

    thresholds: tuple[float, ...]
    task = "labels"
    noun, explained = "labels", "label was predicted"

    def values(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def prediction(self, name: str, values: np.ndarray) -> LabelsPrediction:
        return LabelsPrediction(name, self.names, values, self.thresholds)

    def answers(self, comparable: np.ndarray) -> np.ndarray:
        return comparable.astype(np.float64) >= np.array(self.thresholds)

    def describe(self, answer: np.ndarray) -> str:
        return " + ".join(name for name, has in zip(self.names, answer, strict=True) if has) or "no label"

    def meaning(self) -> dict[str, object]:
        return {"probabilities": "sigmoid of each", "thresholds": list(self.thresholds)}

    def columns(self, top: int = 1, all: bool = False) -> LabelCells:
        return LabelCells(self.names, top, all)

    def to_json(self) -> dict[str, object]:
        return {"task": self.task, "thresholds": list(self.thresholds)}

    @classmethod
    def from_json(cls, names: Sequence[str], saved: Mapping[str, Any]) -> Labels:
        thresholds = tuple(float(one) for one in saved["thresholds"])
        if len(thresholds) != len(names):
            raise ValueError(f"{len(thresholds)} thresholds for {len(names)} labels")
        return cls(tuple(names), thresholds)
