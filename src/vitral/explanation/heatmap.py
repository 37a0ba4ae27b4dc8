"""A map of what an answer rests on, with what is needed to read it and to doubt it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitral.explanation.methods import METHODS
from vitral.explanation.methods.method import ROUTING


@dataclass(frozen=True, eq=False)
class Heatmap:
    """One picture, one class, one method."""

    values: np.ndarray
    """(rows, columns) fp32: a number for each patch, signed where the method can speak against the class."""
    target: int
    label: str
    """The name of the class."""
    probability: float
    """What the network gives the class."""
    method: str
    image: np.ndarray
    """uint8 (H, W, C): the picture as the network saw it."""
    name: str = ""
    """Where the picture came from."""
    checks: dict[str, Any] = field(default_factory=dict)
    """What was measured about this map (`vitral.explanation.faithfulness`); `believable` is False where the map does
    not beat a random one on its own picture."""
    against: str = ""
    """Of a contrast, the class that `label` is set against; the values are then differences."""

    @property
    def title(self) -> str:
        """Class and probability, or the two classes of a contrast."""
        return f"{self.label} rather than {self.against}" if self.against else f"{self.label} {self.probability:.1%}"

    @property
    def note(self) -> str:
        """What must be said beside the map; empty where there is nothing to warn of."""
        if self.checks.get("believable") is False:
            return "no better than a random map on this picture"
        return ROUTING if METHODS[self.method].routing else ""

    def overlay(self, size: int | None = None, *, smooth: bool = True) -> Image.Image:
        """The picture with the map over it, `size` pixels along its longer side (default: readable); grey where the map
        cannot be believed. Without `smooth` each patch is a square.
        """
        from vitral.explanation.drawing import overlay

        return overlay(self, size, smooth=smooth)

    def save(self, path: str | Path) -> Path:
        """Write picture, map, overlay and colour bar with class and probability as PNG or SVG (by the name's end), or
        the numbers as JSON.
        """
        from vitral.explanation.drawing import save

        return save([self], path)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "image": self.name,
            "target": self.target,
            "label": self.label,
            "probability": self.probability,
            "method": self.method,
            "values": self.values.tolist(),
            "note": self.note,
            "checks": self.checks,
            **({"against": self.against} if self.against else {}),
        }
