"""One text an image: the characters, their probabilities, and that of the whole text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.console import html_table
from vitral.data.tokens import END, decode
from vitral.errors import UsageError
from vitral.inference.outputs.output import Output
from vitral.inference.predictions import ByValue, first
from vitral.wording import shown


@dataclass(frozen=True, eq=False)
class ReadText(ByValue):
    """The text read from one image."""

    name: str
    text: str
    confidence: float
    """Probability of the whole text, its end included."""
    characters: tuple[tuple[str, float], ...]
    """Each token, and its probability given those before it."""
    probabilities: np.ndarray
    """The row of the network: tokens, then their log probabilities."""

    @property
    def label(self) -> str:
        """The text, as other predictions have their label."""
        return self.text

    def top(self, count: int = 1) -> list[tuple[str, float]]:
        """The text and its probability: greedy search finds a single one."""
        return [(self.text, self.confidence)][first(count)]

    def columns(self, top: int = 1, all: bool = False) -> TextColumns:
        """The columns of a table with this prediction."""
        return TextColumns()

    def cells(self, count: int = 1) -> list[str]:
        """The text and its probability, as text."""
        return [f"{self.text} {self.confidence:.1%}"]

    def to_json(self, count: int = 1) -> dict[str, Any]:
        """Return plain data."""
        characters = [{"character": one, "probability": p} for one, p in self.characters]
        return {"image": self.name, "text": self.text, "confidence": self.confidence, "characters": characters}

    def __repr__(self) -> str:
        return f"ReadText({self.text!r}, {self.confidence:.1%}, {self.name!r})"

    def _repr_html_(self) -> str:
        return html_table(shown(self.name), [(self.text, f"{self.confidence:.1%}")])


@dataclass
class TextColumns:
    """The columns of a table of texts."""

    names: list[str] = field(default_factory=lambda: ["text", "confidence"])
    texts = ("text",)

    def cells(self, prediction: ReadText) -> list[str | float | None]:
        """Return the cells of one image."""
        return [prediction.text, float(f"{prediction.confidence:.6g}")]


@dataclass(frozen=True)
class TextOutput(Output):
    """Rows (B, 2 × length) of a network that reads text: tokens, then log probabilities."""

    joint: str = ""
    """Text between two tokens; a space if tokens are numbers."""
    end: int = END
    task = "text"
    sequence = True
    noun, explained = "characters and other tokens", "character was read"

    def values(self, logits: Tensor) -> Tensor:
        return logits

    def prediction(self, name: str, values: np.ndarray) -> ReadText:
        tokens, logs = values.reshape(2, -1)
        ends = np.flatnonzero(tokens == self.end)
        count = int(ends[0]) if len(ends) else len(tokens)
        kept = tokens[:count].astype(int).tolist()
        characters = tuple((self.names[t], math.exp(log)) for t, log in zip(kept, logs.tolist(), strict=False))
        text = decode(kept, self.names, self.joint) if self.end == END else self.joint.join(self.names[t] for t in kept)
        confidence = math.exp(float(logs[: count + 1].astype(np.float64).sum()))
        return ReadText(name, text, confidence, characters, values)

    def predicted(self, values: Tensor) -> Tensor:
        raise UsageError("texts are not explained yet", why="a heat map is for one class or number")

    def comparable(self, logits: Tensor) -> Tensor:
        tokens, logs = logits.unflatten(1, (2, -1)).unbind(1)
        return torch.cat([tokens, logs.exp()], dim=1)

    def distances(self, wanted: np.ndarray, found: np.ndarray) -> np.ndarray:
        half = wanted.shape[1] // 2
        return super().distances(wanted[:, half:], found[:, half:])

    def answers(self, comparable: np.ndarray) -> np.ndarray:
        return comparable[:, : comparable.shape[1] // 2].astype(np.int64)

    def describe(self, answer: np.ndarray) -> str:
        return self.prediction("", np.concatenate([answer, np.zeros(len(answer))])).text

    def meaning(self) -> dict[str, object]:
        return {"text": "classes of the likeliest tokens, one by one, until the end", "between": self.joint}

    def columns(self, top: int = 1, all: bool = False) -> TextColumns:
        return TextColumns()

    def to_json(self) -> dict[str, object]:
        return {"task": "text", **({"joint": self.joint, "end": self.end} if self.joint else {})}

    @classmethod
    def from_json(cls, names: Sequence[str], saved: Mapping[str, Any]) -> TextOutput:
        return cls(tuple(names), str(saved.get("joint", "")), int(saved.get("end", END)))
