"""Numbers an image: the network computes them standardized, and a prediction undoes that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.console import html_table
from vitral.errors import UsageError
from vitral.inference.outputs.output import Output
from vitral.inference.predictions import ByValue
from vitral.wording import shown

_TAKEN = ("path", "error")
"""Names of other columns in a table of predictions."""


@dataclass(frozen=True, eq=False)
class NumbersPrediction(ByValue):
    """The predicted numbers of one image."""

    name: str
    classes: tuple[str, ...]
    """Names of the numbers."""
    values: np.ndarray
    """(T,), in the units of the training data."""

    @property
    def numbers(self) -> dict[str, float]:
        """Name → number."""
        return {name: float(value) for name, value in zip(self.classes, self.values, strict=True)}

    def columns(self, top: int = 1, all: bool = False) -> NumberCells:
        """The columns of a table with this prediction."""
        return NumberCells(self.classes)

    def cells(self, count: int = 3) -> list[str]:
        """The numbers with their names, as text."""
        return [f"{name} {value:.6g}" for name, value in self.numbers.items()]

    def to_json(self, count: int = 5) -> dict[str, Any]:
        """Return plain data."""
        return {"image": self.name, "numbers": self.numbers}

    def __repr__(self) -> str:
        return f"NumbersPrediction({self.numbers!r}, {self.name!r})"

    def _repr_html_(self) -> str:
        """The numbers, for notebooks."""
        return html_table(shown(self.name), [(cell, "") for cell in self.cells()])


class NumberCells:
    """The columns of a table of predicted numbers: one for each."""

    texts = ()

    def __init__(self, names: Sequence[str]):
        self.names = [f"value_{n}" if n in _TAKEN else n for n in names]

    def cells(self, prediction: NumbersPrediction) -> list[str | float | None]:
        """Return the cells of one image; None replaces a value that is not finite."""
        return [float(value) if math.isfinite(value) else None for value in prediction.values]


@dataclass(frozen=True)
class Numbers(Output):
    """Numbers with the mean and the deviation of the training images, by which their logits are standardized."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    task = "numbers"
    noun, explained = "numbers", "number was predicted"
    compared = "standardized numbers"

    def values(self, logits: Tensor) -> Tensor:
        """Return the numbers (B, T) float64 on the CPU: a date in seconds has more digits than fp32."""
        mean, deviation = (torch.tensor(one, dtype=torch.float64) for one in (self.mean, self.deviation))
        return logits.cpu().double() * deviation + mean

    def prediction(self, name: str, values: np.ndarray) -> NumbersPrediction:
        return NumbersPrediction(name, self.names, values)

    def predicted(self, values: Tensor) -> Tensor:
        if len(self.names) > 1:
            hint = f"--target {self.names[0]}"
            raise UsageError("several numbers can be explained", why=f"they are {', '.join(self.names)}", hint=hint)
        return values.new_zeros(len(values), dtype=torch.int64)

    def text(self, value: float) -> str:
        return f"{value:.6g}"

    def comparable(self, logits: Tensor) -> Tensor:
        """Standardized numbers: one limit fits all units."""
        return logits

    def answers(self, comparable: np.ndarray) -> np.ndarray:
        """Every answer is the same: numbers are compared by their differences alone."""
        return np.zeros((len(comparable), 0))

    def describe(self, answer: np.ndarray) -> str:
        return "numbers"

    def meaning(self) -> dict[str, object]:
        return {"numbers": "logit * deviation + mean", "mean": list(self.mean), "deviation": list(self.deviation)}

    def columns(self, top: int = 1, all: bool = False) -> NumberCells:
        return NumberCells(self.names)

    def to_json(self) -> dict[str, object]:
        return {"task": self.task, "mean": list(self.mean), "deviation": list(self.deviation)}

    @classmethod
    def from_json(cls, names: Sequence[str], saved: Mapping[str, Any]) -> Numbers:
        mean, deviation = (tuple(float(one) for one in saved[key]) for key in ("mean", "deviation"))
        if not len(mean) == len(deviation) == len(names) or not all(map(math.isfinite, (*mean, *deviation))):
            raise ValueError(f"mean and deviation of {len(names)} numbers are not as many, or not finite")
        return cls(tuple(names), mean, deviation)
