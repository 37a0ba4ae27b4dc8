"""Faults of plots that a person would see: texts that are cut or overlap, legends over data."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox


def faults(figure: Figure) -> list[str]:
    """Texts that are cut or overlap, and legends that cover data."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for axes in figure.axes for text in texts(axes)]
    whole = Bbox.from_extents(-0.5, -0.5, figure.bbox.width + 0.5, figure.bbox.height + 0.5)
    found = [f"cut: {name}" for name, box in boxes if whole.count_contains([box.p0, box.p1]) < 2]
    for number, (name, box) in enumerate(boxes):
        inner = box.expanded(0.96, 0.96)
        found += [f"{name} over {other}" for other, beside in boxes[number + 1 :] if inner.overlaps(beside)]
    for axes in figure.axes:
        if (legend := axes.get_legend()) is not None:
            covered = legend.get_window_extent(renderer).count_contains(points(axes))
            found += [f"{covered} points below a legend"] if covered else []
    return found


def texts(axes: Axes) -> Iterator[Text]:
    """The texts of axes that are drawn."""
    found: list[Text] = [*axes.texts, axes.title]
    for axis in (axes.xaxis, axes.yaxis):
        found += [tick.label1 for tick in axis._update_ticks() if tick.label1.get_visible()]  # type: ignore[attr-defined]
        found += [axis.label, axis.offsetText]
    if (legend := axes.get_legend()) is not None:
        found += legend.get_texts()
    yield from (one for one in found if one.get_text().strip())


def points(axes: Axes) -> np.ndarray:
    """The points of curves, in pixels; straight lines are no data."""
    curves = [np.asarray(line.get_xydata()) for line in axes.lines if line.get_transform() == axes.transData]
    return np.concatenate([np.zeros((0, 2)), *(axes.transData.transform(one) for one in curves if len(one) > 2)])
