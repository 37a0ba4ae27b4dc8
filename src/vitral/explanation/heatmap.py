"""`Heatmap`: an attribution map with its image, class, method and checks."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitral.errors import UsageError
from vitral.explanation.methods import method_named
from vitral.wording import printable, shown


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap:
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

    def overlay(self, size: int | None = None, *, smooth: bool = True) -> Image.Image:
        """Image with the map over it, `size` pixels along its longer side (default: the image's, at least 448).

        The map is gray if it is not believable. Without `smooth` each patch is a square.
        """
        from vitral.explanation.drawing import overlay

        return overlay(self, size, smooth=smooth)

    def save(self, path: str | Path) -> Path:
        """Write image, map, overlay and color bar with class and probability as PNG or SVG, or the values as JSON.

        The suffix of the path selects the format.
        """
        from vitral.explanation.drawing import save

        return save([self], path)

    def __repr__(self) -> str:
        rows, columns = self.values.shape
        return printable(f"Heatmap({self.title}, {self.method}, {rows}×{columns} patches, {self.name!r})")

    def _repr_html_(self) -> str:
        """Overlay, class and probability for a notebook."""
        file = io.BytesIO()
        self.overlay().save(file, "PNG")
        lines = [
            html.escape(shown(line)) for line in (self.title, method_named(self.method).title, self.name, self.note)
        ]
        drawn = f'<img src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'
        return f"<figure>{drawn}<figcaption>{'<br>'.join(filter(None, lines))}</figcaption></figure>"

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


def contrast(a: Heatmap, b: Heatmap) -> Heatmap:
    """Evidence for the class of `a` rather than that of `b`: the difference of two maps of one image and method.

    Each map is first divided by the sum of its absolute values, since scales differ between classes and methods. If one
    map is not believable, the difference is not either. Raises `UsageError` for maps of different images or methods.
    """
    if a.method != b.method or a.values.shape != b.values.shape or not np.array_equal(a.image, b.image):
        raise UsageError("a contrast needs two maps of the same image and method")
    tiny = float(np.finfo(np.float32).tiny)
    shares = [one.values / max(float(np.abs(one.values).sum()), tiny) for one in (a, b)]
    doubtful = any(one.checks.get("believable") is False for one in (a, b))
    return dataclasses.replace(
        a, values=(shares[0] - shares[1]).astype(np.float32), against=b.label,
        checks={"believable": False} if doubtful else {},
    )  # fmt: skip
