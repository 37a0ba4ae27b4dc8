"""`Attribution`: the numbers of a heat map, with image, class, method and checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vitral.explanation.methods import method_named


@dataclass(frozen=True, eq=False, repr=False)
class Attribution:
    """Attribution map of one image, one class and one method."""

    values: np.ndarray
    """(rows, columns) fp32: one value for each patch, signed if the method has evidence against the class."""
    target: int
    label: str
    """Name of the class, or the character of a text."""
    probability: float
    """Predicted probability of the class; of a network of numbers the number."""
    method: str
    image: np.ndarray
    """uint8 (H, W, C): the preprocessed image."""
    name: str = ""
    """Path or name of the image."""
    checks: dict[str, Any] = field(default_factory=dict)
    """Measures of this map (`vitral.explanation.faithfulness`). `believable` is False if the map does not beat random
    maps on its own image."""
    against: str = ""
    """For a contrast, the class that `label` is compared with; the values are differences."""
    text: str = ""
    """The predicted value as text, of a network of numbers; empty for a probability."""

    @property
    def title(self) -> str:
        """Class and probability, or the two classes of a contrast."""
        value = self.text or f"{self.probability:.1%}"
        return f"{self.label} rather than {self.against}" if self.against else f"{self.label} {value}"

    @property
    def note(self) -> str:
        """Warning to show next to the map; empty if there is none."""
        if self.checks.get("believable") is False:
            return "no better than a random map on this image"
        entry = method_named(self.method)
        return entry.note

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "image": self.name,
            "target": self.target,
            "label": self.label,
            "value" if self.text else "probability": self.probability,
            "method": self.method,
            "values": self.values.tolist(),
            "note": self.note,
            "checks": self.checks,
            **({"against": self.against} if self.against else {}),
        }
