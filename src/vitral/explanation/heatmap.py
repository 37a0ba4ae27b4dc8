"""`Heatmap`: an attribution map with its image, class, method and checks."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vitral.console import shown_together
from vitral.errors import UsageError
from vitral.explanation.attribution import Attribution
from vitral.explanation.methods import method_named
from vitral.kinds import checked
from vitral.wording import printable, shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Heatmap(Attribution):
    """Attribution map of one image for one class by one method. `save`, `overlay` and `figure` draw it.

    Example:
        heatmap = vitral.explain("runs/photos", "cat.jpg")[0]
        print(heatmap.label, heatmap.values.shape)
        heatmap.save("why.svg")
    """

    @checked
    def overlay(self, size: int | None = None, *, smooth: bool = True) -> Image.Image:
        """Image with the map over it, `size` pixels along its longer side (default: the image's, at least 448).

        The map is gray if it is not believable. Without `smooth` each patch is a square.
        """
        from vitral.explanation.drawing import overlay

        return overlay(self, size, smooth=smooth)

    @checked
    def save(self, path: str | Path) -> Path:
        """Write image, map, overlay and color bar with class and probability as PNG or SVG, or the values as JSON.

        The suffix of the path selects the format.
        """
        from vitral.explanation.drawing import save

        return save([self], path)

    def figure(self) -> Figure:
        """Return image, map, overlay and color bar as a figure of matplotlib."""
        from vitral.explanation.drawing import page

        return page([self])

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


class Heatmaps(list[Heatmap]):
    """A list of maps, which a notebook shows as images."""

    def _repr_html_(self) -> str:
        return shown_together(self)


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
        a,
        values=(shares[0] - shares[1]).astype(np.float32),
        against=b.label,
        checks={"believable": False} if doubtful else {},
    )
