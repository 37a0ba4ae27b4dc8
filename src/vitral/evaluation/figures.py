"""Figures of the report: training curves and reliability diagram as inline SVG, heat map and images as data URIs.

Figures are drawn without a display and without matplotlib's global state (no pyplot, no rcParams). Colors are CSS
variables, so that the same figure works on a light page, on a dark page and in print. Output is deterministic.
"""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from PIL import Image

from vitral.data.dataset import spread
from vitral.drawing import FONT, dress, svg
from vitral.epoch_metrics import Curve, Metric
from vitral.evaluation.scores import CalibrationBin, NumberScore

# The colors of a light page; in markup `inline` replaces them by CSS variables, which matplotlib does not support.
INK, MUTED, LINE, FIRST, SECOND = "#1d1f24", "#5a606b", "#e0ddd5", "#0072b2", "#d55e00"
_VARIABLES = {INK: "--ink", MUTED: "--muted", LINE: "--line", FIRST: "--first", SECOND: "--second"}

_SIZE_INCHES = (4.3, 3.0)
_FEW_POINTS = 40  # up to this number of epochs, each gets a marker
_HEAT_MAP_CELLS = 250
_PIXELATED_BELOW = 96  # pixels; smaller images are shown enlarged, pixel by pixel


@dataclass(frozen=True)
class Plot:
    """A figure for the page: `svg` is markup without links, `alt` a description in words."""

    title: str
    svg: str
    alt: str


@dataclass(frozen=True)
class EmbeddedImage:
    """An image embedded in the page, as a data URI with its size in pixels; `pixelated` keeps hard edges when
    enlarged."""

    uri: str
    width: int
    height: int
    pixelated: bool


@dataclass(frozen=True)
class Drawing:
    """A figure of matplotlib with title and description."""

    title: str
    figure: Figure
    alt: str


def curves(history: Sequence[Mapping[str, object]], best_epoch: int | None, metrics: Sequence[Metric]) -> list[Plot]:
    """Plot the curves of these metrics over the epochs for a page, as `draw_curves` does."""
    drawn = draw_curves(history, best_epoch, metrics)
    return [Plot(one.title, inline(one.figure, one.title.split()[0].lower()), one.alt) for one in drawn]


def draw_curves(
    history: Sequence[Mapping[str, object]], best_epoch: int | None, metrics: Sequence[Metric]
) -> list[Drawing]:
    """Draw the curves of these metrics over the epochs, each only if it has at least two finite values."""
    lines: dict[Curve, list[Series]] = {}
    for metric in metrics:
        points = series_of(history, metric.key)
        if metric.curve and len(points) > 1:
            lines.setdefault(metric.curve, []).append((metric.label, points))
    return [_curve(curve, series, best_epoch) for curve, series in lines.items()]


Series = tuple[str, list[tuple[float, float]]]
"""Label of a line, and its (epoch, value)."""


def series_of(history: Sequence[Mapping[str, object]], key: str) -> list[tuple[float, float]]:
    """Return (epoch, value) sorted by epoch, skipping lines without a finite value; the last line of an epoch wins."""
    points = {}
    for line in history:
        epoch, value = line.get("epoch"), line.get(key)
        if is_finite(epoch) and is_finite(value):
            points[float(epoch)] = float(value)
    return sorted(points.items())


def is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def reliability(bins: Sequence[CalibrationBin], ece: float) -> Plot:
    """Plot the reliability diagram for a page."""
    drawn = draw_reliability(bins, ece)
    return Plot(drawn.title, inline(drawn.figure, "reliability"), drawn.alt)


def draw_reliability(bins: Sequence[CalibrationBin], ece: float) -> Drawing:
    """Draw accuracy over confidence by bin, with the diagonal of a calibrated model and the images in each bin."""
    figure = Figure(figsize=(5.2, 4.1))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    filled = [bin_ for bin_ in bins if bin_.images]
    middle, width = [(bin_.lower + bin_.upper) / 2 for bin_ in filled], 0.92 * (bins[0].upper - bins[0].lower)
    upper.plot([0, 1], [0, 1], color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), label="calibrated")
    upper.bar(middle, [bin_.accuracy for bin_ in filled], width, color=FIRST, alpha=0.75, label="accuracy")
    for x, bin_ in zip(middle, filled, strict=True):
        upper.plot([x, x], [bin_.accuracy, bin_.confidence], color=SECOND, linewidth=2.4, solid_capstyle="butt")
    upper.plot([], [], color=SECOND, linewidth=2.4, label="gap to confidence")
    lower.bar(middle, [bin_.images for bin_ in filled], width, color=MUTED, alpha=0.6)
    upper.set(xlim=(0, 1), ylim=(0, 1.02))
    for axes, label in ((upper, "accuracy"), (lower, "images")):
        _dress(axes, label)
    lower.set_xlabel("confidence", fontfamily=FONT, fontsize=10.5, color=MUTED)
    lower.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    for axis in (upper.yaxis, lower.xaxis):
        axis.set_major_formatter(FuncFormatter(_percent))
    _legend(upper, "upper left")
    parts = [f"{b.confidence:.0%} confidence, {b.accuracy:.0%} accuracy ({b.images})" for b in filled]
    alt = f"Reliability diagram; expected calibration error {ece:.2%}. By bin: {'; '.join(parts)}."
    return Drawing("Reliability", figure, alt)


def draw_confusion(confusion: np.ndarray, classes: Sequence[str]) -> Figure:
    """Draw the fraction of each predicted class (column) in each true class (row), with names and numbers for few."""
    share = confusion / np.maximum(confusion.sum(axis=1, keepdims=True), 1)
    figure = Figure(figsize=(5.2, 4.6), layout="constrained")
    axes = figure.subplots()
    axes.imshow(np.sqrt(share), cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("predicted", color=MUTED)
    axes.set_ylabel("true", color=MUTED)
    if len(classes) > _NAMED_CLASSES:
        return figure
    places = range(len(classes))
    axes.set_xticks(places, classes, rotation=45, ha="right")
    axes.set_yticks(places, classes)
    for row, column in np.argwhere(confusion):
        color = "white" if share[row, column] > _WHITE_FROM else INK
        axes.text(column, row, f"{confusion[row, column]:,}", ha="center", va="center", color=color)
    return figure


_NAMED_CLASSES = 20
_WHITE_FROM = 0.4  # share of a cell that is too dark for dark text


def heat_map(confusion: np.ndarray) -> EmbeddedImage:
    """Draw the fraction of each predicted class (column) in each true class (row), on a square-root scale in cividis.

    With more than 250 classes, several share a cell, so that a single error stays visible.
    """
    count = len(confusion)
    per_cell = math.ceil(count / _HEAT_MAP_CELLS)
    starts = np.arange(0, count, per_cell)
    cells = np.add.reduceat(np.add.reduceat(confusion, starts, axis=0), starts, axis=1).astype(np.float64)
    share = cells / np.maximum(cells.sum(axis=1, keepdims=True), 1)
    colors = colormaps["cividis"](np.sqrt(share), bytes=True)[..., :3]
    return _embed(Image.fromarray(np.ascontiguousarray(colors)), pixelated=True)


def embedded(pixels: np.ndarray, limit: int) -> EmbeddedImage:
    """Embed an image, uint8 (H, W) or (H, W, C), scaled down to `limit` pixels per side if it is larger."""
    pixels = np.asarray(pixels)
    if pixels.ndim == 3:
        pixels = pixels[..., 0] if pixels.shape[2] < 3 else pixels[..., :3]
    image = Image.fromarray(np.ascontiguousarray(pixels, dtype=np.uint8))
    original = max(image.size)
    if original > limit:
        image.thumbnail((limit, limit), Image.Resampling.LANCZOS)
    return _embed(image, pixelated=original < _PIXELATED_BELOW)


def _embed(image: Image.Image, pixelated: bool) -> EmbeddedImage:
    """Encode pixelated images as PNG, and photographs as JPEG at a tenth of the size."""
    buffer = io.BytesIO()
    if pixelated:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.save(buffer, "JPEG", quality=88)
    kind = "png" if pixelated else "jpeg"
    uri = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"
    return EmbeddedImage(uri, *image.size, pixelated)


def _curve(curve: Curve, series: Sequence[Series], best_epoch: int | None) -> Drawing:
    figure = Figure(figsize=_SIZE_INCHES)
    axes = figure.subplots()
    words = []
    for label, points in series:
        x, y = zip(*points, strict=True)
        # In every figure, the solid line in the first color is measured on unseen images.
        color, style = (SECOND, (0, (3, 1.5))) if label == "train" else (FIRST, "solid")
        marker = "o" if len(points) <= _FEW_POINTS else ""
        axes.plot(x, y, color=color, linestyle=style, linewidth=2, marker=marker, markersize=3.5, label=label)
        words.append(f"{label} from {curve.form.format(y[0])} to {curve.form.format(y[-1])}")
    first, last = (limit([x for _, points in series for x, _ in points]) for limit in (min, max))
    if best_epoch is not None and first <= best_epoch <= last and not curve.of_steps:
        line = axes.axvline(best_epoch, color=INK, linewidth=1.2, zorder=0, label=f"best epoch, {best_epoch}")
        line.set_linestyle((0, (1, 2)))
        if (value := dict(series[-1][1]).get(float(best_epoch))) is not None:
            (ring,) = axes.plot([best_epoch], [value], linestyle="", marker="o", markersize=9, color=INK)
            ring.set(markerfacecolor="none", markeredgewidth=1.5)
        words.append(f"best epoch {best_epoch}")
    _dress(axes, curve.title.lower())
    axes.set_xlabel("epoch", fontfamily=FONT, fontsize=10.5, color=MUTED)
    axes.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    if curve.form.endswith("%}"):
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    if curve.of_steps:
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}"))
    else:
        _legend(axes, "best")
    alt = f"{curve.title} over epochs {first:g} to {last:g}: {'; '.join(words)}."
    return Drawing(curve.title, figure, alt)


def _dress(axes: Axes, ylabel: str) -> None:
    dress(axes, ylabel, MUTED, LINE)
    axes.tick_params(axis="x", length=3)


def _legend(axes: Axes, place: str) -> None:
    axes.legend(loc=place, frameon=False, labelcolor=INK, prop={"family": FONT, "size": 10})


def _percent(value: float, _position: object) -> str:
    # Ticks of a narrow range, such as 97.5 %, must not be rounded to 98 %.
    return f"{100 * value:.4g}%"


def inline(figure: Figure, prefix: str) -> str:
    """Return the figure as an <svg> element for an HTML page, without declarations and links, with unique ids."""
    figure.patch.set_alpha(0)
    figure.set_layout_engine("constrained")
    text = svg(figure, f"{prefix}-")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", text).replace("xlink:href", "href")
    for color, variable in _VARIABLES.items():
        text = text.replace(color, f"var({variable})")
    # The page sets the size. Screen readers skip the drawing and read the figure's alt text.
    text = re.sub(r'<svg width="[^"]*" height="[^"]*"', "<svg", text, count=1)
    text = text.replace("<svg", '<svg aria-hidden="true"', 1)
    return re.sub(r"\n\s*", "\n", text).strip()


def scatter(score: NumberScore, predicted: np.ndarray, true: np.ndarray, number: int) -> Plot:
    """Plot predicted over true numbers (n,), with the diagonal on which both are equal."""
    low, high = float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))
    figure = _points(true, predicted, "true", "predicted", ([low, high], [low, high]))
    r2 = "" if score.r2 is None else f"R² {score.r2:.3f}, "
    alt = f"{score.name} predicted over true, from {low:.4g} to {high:.4g}; {r2}mean absolute error {score.mae:.4g}."
    return Plot(score.name, inline(figure, f"scatter-{number}"), alt)


def residuals(score: NumberScore, predicted: np.ndarray, true: np.ndarray, number: int) -> Plot:
    """Plot the errors, predicted minus true, over the predicted numbers (n,)."""
    errors, ends = predicted - true, [float(predicted.min()), float(predicted.max())]
    figure = _points(predicted, errors, "predicted", "predicted - true", (ends, [0.0, 0.0]))
    low, middle, high = (float(np.quantile(errors, share)) for share in (0.05, 0.5, 0.95))
    alt = f"Errors of {score.name}: median {middle:+.3g}, nine in ten from {low:+.3g} to {high:+.3g}."
    return Plot(f"{score.name}, residuals", inline(figure, f"residual-{number}"), alt)


def _points(x: np.ndarray, y: np.ndarray, across: str, up: str, ideal: tuple[list[float], list[float]]) -> Figure:
    """Plot points, and the line on which they would ideally be."""
    figure = Figure(figsize=_SIZE_INCHES)
    axes = figure.subplots()
    axes.plot(*ideal, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)))
    rows = spread(len(x), _MOST_POINTS)
    axes.plot(x[rows], y[rows], linestyle="", marker="o", markersize=3.5, alpha=0.6, color=FIRST)
    _dress(axes, up)
    axes.set_xlabel(across, fontfamily=FONT, fontsize=10.5, color=MUTED)
    return figure


_MOST_POINTS = 2_000
