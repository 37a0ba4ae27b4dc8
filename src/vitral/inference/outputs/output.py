"""The base of all outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from torch import Tensor

from vitral.errors import UsageError


class Cells(Protocol):
    """The columns of a table of predictions."""

    names: list[str]

    @property
    def texts(self) -> Collection[str]:
        """Names of the columns that hold text; all others hold numbers."""

    def cells(self, prediction: Any) -> list[str | float | None]:
        """Return the cells of one image."""


@dataclass(frozen=True)
class Output:
    """From the logits of a network to predictions, for one task. Saved with the weights."""

    names: tuple[str, ...]
    """Name of each logit: a class, a label or a target."""

    task: ClassVar[str]
    """Name of the task, as in `--task`."""
    one_class: ClassVar[bool] = False
    """True if a prediction is one of the names."""
    sequence: ClassVar[bool] = False
    """True if a prediction is a sequence of tokens, each of which is explained by a map of its own."""
    noun: ClassVar[str]
    """Word for `names`, in the plural."""
    explained: ClassVar[str]
    """Words for that which a map explains: "class was predicted"."""
    compared: ClassVar[str] = "probabilities"
    """Word for the values by which an export is compared with its network."""

    def values(self, logits: Tensor) -> Tensor:
        """Return the values (B, K) fp32 that a prediction consists of, such as probabilities, from logits (B, K)."""
        raise NotImplementedError

    def prediction(self, name: str, values: np.ndarray) -> Any:
        """Return the prediction of one image from its values (K,): a `Prediction`, or that of another task."""
        raise NotImplementedError

    def predicted(self, values: Tensor) -> Tensor:
        """Return the number (B,) of the name that is explained by default, from values (B, K); `UsageError` if none."""
        return values.argmax(1)

    def text(self, value: float) -> str:
        """Return a value as text; empty for a probability."""
        return ""

    def columns(self, top: int = 1, all: bool = False) -> Cells:
        """Return the columns of a table of predictions."""
        raise NotImplementedError

    def comparable(self, logits: Tensor) -> Tensor:
        """Return the values (B, K) in which an export is compared with its network, from logits (B, K)."""
        return self.values(logits)

    def distances(self, wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Return the largest difference (n,) of each image's values, from comparable values (n, K)."""
        differences: np.ndarray = np.abs(wanted - found).max(1)
        return differences

    def answers(self, comparable: np.ndarray) -> np.ndarray:
        """Return the answer to each image, (n,) or (n, K), from comparable values (n, K): equal or not."""
        raise NotImplementedError

    def describe(self, answer: np.ndarray) -> str:
        """Return the answer to an image as text."""
        raise NotImplementedError

    def meaning(self) -> dict[str, object]:
        """Return how a program without vitral turns the logits of an export into a prediction."""
        raise NotImplementedError

    def to_json(self) -> dict[str, object]:
        """Return the fields to save with the weights; empty for one class per image."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, names: Sequence[str], saved: Mapping[str, object]) -> Output:
        """Invert `to_json`; `KeyError`, `TypeError` or `ValueError` for fields that are missing or damaged."""
        raise NotImplementedError


def require_classes(output: Output, what: str, hint: str) -> None:
    """Raise `UsageError` for the weights of another task than one class per image."""
    if not output.one_class:
        why = f"these weights are of --task {output.task}"
        raise UsageError(f"{what} supports networks of one class per image", why=why, hint=hint)
