"""The protocol of an output."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

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


class Output(Protocol):
    """From the logits of a network to predictions. Saved with the weights."""

    @property
    def task(self) -> str:
        """Name of the task, as in `--task`."""

    @property
    def one_class(self) -> bool:
        """True if a prediction is one of the names."""

    @property
    def sequence(self) -> bool:
        """True if a prediction is a sequence of tokens, each of which is explained by a map of its own."""

    @property
    def noun(self) -> str:
        """Word for `names`, in the plural."""

    @property
    def explained(self) -> str:
        """Words for that which a map explains: "class was predicted"."""

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each logit: a class, a label or a target."""

    def values(self, logits: Tensor) -> Tensor:
        """Return the values (B, K) fp32 that a prediction consists of, such as probabilities, from logits (B, K)."""

    def prediction(self, name: str, values: np.ndarray) -> Any:
        """Return the prediction of one image from its values (K,): a `Prediction`, or that of another task."""

    def predicted(self, values: Tensor) -> Tensor:
        """Return the number (B,) of the name that is explained by default, from values (B, K); `UsageError` if none."""

    def text(self, value: float) -> str:
        """Return a value as text; empty for a probability."""

    def columns(self, top: int = 1, all: bool = False) -> Cells:
        """Return the columns of a table of predictions."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields to save with the weights; empty for one class an image."""


class Comparable(Output, Protocol):
    """An output of which an export is compared with its network."""

    @property
    def compared(self) -> str:
        """Word for the values by which an export is compared with its network."""

    def comparable(self, logits: Tensor) -> Tensor:
        """Return the values (B, K) in which an export is compared with its network, from logits (B, K)."""

    def distances(self, wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
        """Return the largest difference (n,) of each image's values, from comparable values (n, K)."""

    def answers(self, comparable: np.ndarray) -> np.ndarray:
        """Return the answer to each image, (n,) or (n, K), from comparable values (n, K): equal or not."""

    def describe(self, answer: np.ndarray) -> str:
        """Return the answer to an image as text."""

    def meaning(self) -> dict[str, Any]:
        """Return how a program without vitral turns the logits of an export into a prediction."""


def require_classes(output: Output, what: str, hint: str) -> None:
    """Raise `UsageError` for the weights of another task than one class an image."""
    if not output.one_class:
        why = f"these weights are of --task {output.task}"
        raise UsageError(f"{what} supports networks of one class an image", why=why, hint=hint)


def largest_differences(wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
    """Return the largest difference (n,) of each row."""
    differences: np.ndarray = np.abs(wanted - found).max(1)
    return differences
