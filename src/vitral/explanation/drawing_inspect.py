"""Drawings of what `figure7` measured, in the paper's manner. No display, none of matplotlib's global state.

Each function gives a matplotlib figure; `save` writes it as PNG or SVG. Colours come from a `Theme`, so that the same
drawing serves a file (dark on white) and a page that has a dark form. The colour maps, viridis and cividis, can be read
by people who do not tell red from green, and in grey.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vitral.explanation.capture import POOL
from vitral.explanation.figure7 import (
    AttentionDistance,
    HeadMaps,
    Likeness,
    PatchFilters,
    PositionSimilarity,
    TokenNorms,
)
from vitral.weights.files import replacing


@dataclass(frozen=True)
class Theme:
    """Colours of a drawing, as matplotlib takes them."""

    ink: str = "#1d1f24"
    muted: str = "#5a606b"
    line: str = "#d9d6ce"
    first: str = "#0072b2"
    second: str = "#d55e00"


PAPER = Theme()
"""For files that are put on white."""

TILES_AT_MOST = 14
"""Maps of position similarity a side; more could not be made out."""
HEADS_AT_MOST, LAYERS_AT_MOST = 12, 4
"""Maps of heads that are drawn; all numbers are in the JSON."""

_FONT = "DejaVu Sans"  # comes with matplotlib: the same letters on every machine
_KERNELS = (8, 16)  # rows and columns of raw kernels
_GAP = 0.12  # of a tile
_DOTS = 400  # outliers drawn for a layer, the largest
_DPI = 160
_TILE = 128  # pixels of a picture under a map


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure as PNG or SVG, by each name's end, on white; whole or not at all."""
    figure.set_layout_engine("constrained")
    figure.patch.set(facecolor="white", alpha=1)
    for path in paths:
        drawn = _svg(figure) if path.suffix == ".svg" else _png(figure)
        figure.set_layout_engine("none")  # what is laid out stays so
        with replacing(path) as temporary:
            temporary.write_bytes(drawn)


def _svg(figure: Figure) -> bytes:
    text = io.StringIO()
    FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return text.getvalue().encode("utf-8")


def _png(figure: Figure) -> bytes:
    figure.set_dpi(_DPI)
    canvas, buffer = FigureCanvasAgg(figure), io.BytesIO()
    canvas.draw()
    Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3]).save(buffer, "PNG", dpi=(_DPI, _DPI))
    return buffer.getvalue()


# Tiles ----------------------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Tiles on a canvas (H, W, 4); between them nothing."""

    canvas: np.ndarray
    size: tuple[int, int]
    """Height and width of a tile on the canvas."""
    gap: int

    def middles(self, axis: int) -> np.ndarray:
        """Where the middles of the tiles are along an axis."""
        step, length = self.size[axis] + self.gap, self.canvas.shape[axis]
        return np.arange((length + self.gap) // step) * step + (self.size[axis] - 1) / 2


def tiled(tiles: np.ndarray, columns: int) -> Tiles:
    """Tiles (n, h, w, 3) of 0 … 1 in rows of `columns`."""
    count, height, width, _ = tiles.shape
    # A gap is a whole number of pixels: small tiles are enlarged until it is one.
    scale = max(1, -(-8 // min(height, width)))
    tiles = tiles.repeat(scale, axis=1).repeat(scale, axis=2)
    height, width = height * scale, width * scale
    between = max(1, round(_GAP * min(height, width)))
    rows = -(-count // columns)
    canvas = np.zeros((rows * (height + between) - between, columns * (width + between) - between, 4))
    for number, tile in enumerate(tiles):
        top, left = number // columns * (height + between), number % columns * (width + between)
        canvas[top : top + height, left : left + width, :3] = tile
        canvas[top : top + height, left : left + width, 3] = 1
    return Tiles(canvas, (height, width), between)


def as_colours(kernels: np.ndarray) -> np.ndarray:
    """Kernels (n, C, p, q) as pictures (n, p, q, 3): 0 is mid-grey, the largest number of each kernel black or white.
    One channel is grey; of more than three the first three are shown, of two red and green.
    """
    channels = {1: [0, 0, 0], 2: [0, 1]}.get(kernels.shape[1], [0, 1, 2])
    shown = kernels[:, channels]
    largest = np.abs(shown).max(axis=(1, 2, 3), keepdims=True)
    colours = 0.5 + 0.5 * shown / np.where(largest > 0, largest, 1)
    if len(channels) == 2:
        colours = np.concatenate([colours, np.full_like(colours[:, :1], 0.5)], axis=1)
    return colours.transpose(0, 2, 3, 1)


def filters(found: PatchFilters, theme: Theme = PAPER) -> Figure:
    """Principal components of the patch kernels, seven in a row, the most important first."""
    return _picture(tiled(as_colours(found.components), min(7, len(found.components))).canvas, 6.2)


def kernels(found: PatchFilters, theme: Theme = PAPER) -> Figure:
    """The kernels themselves, the largest first; at most 128 of them."""
    sizes = np.sqrt((found.kernels.astype(np.float64) ** 2).sum(axis=(1, 2, 3)))
    order = np.argsort(-sizes, kind="stable")[: _KERNELS[0] * _KERNELS[1]]
    return _picture(tiled(as_colours(found.kernels[order]), min(_KERNELS[1], len(order))).canvas, 7.6)


def _picture(canvas: np.ndarray, width: float) -> Figure:
    """An image with nothing around it."""
    height = width * canvas.shape[0] / canvas.shape[1]
    figure = Figure(figsize=(width, min(height, 9.0)))
    axes = figure.subplots()
    axes.imshow(canvas, interpolation="none")
    axes.set_axis_off()
    return figure


def positions(found: PositionSimilarity, theme: Theme = PAPER) -> Figure:
    """A map for each position: how alike it is to every other. Rows and columns as in the picture."""
    assert found.values is not None
    values, at_rows, at_columns = _some_positions(found)
    low = min(0.0, float(np.floor(values.min() * 10) / 10))
    colours = colormaps["viridis"]((values - low) / (1 - low))[..., :3]
    tiles = tiled(colours.reshape(-1, *colours.shape[2:]), len(at_columns))
    tall, wide = tiles.canvas.shape[0] * found.patch[0], tiles.canvas.shape[1] * found.patch[1]
    width = 6.6 * min(1.0, max(0.55, 1.6 * wide / tall))
    figure = Figure(figsize=(width, min(9.0, max(2.2, (width - 1.2) * tall / wide + 0.8))))
    axes = figure.subplots()
    axes.set_facecolor("none")  # between tiles the page is seen
    image = axes.imshow(tiles.canvas, interpolation="none", aspect=found.patch[0] / found.patch[1])
    image.set(cmap="viridis", clim=(low, 1))  # for the colour bar; the canvas has its colours
    axes.yaxis.set_ticks(tiles.middles(0), [str(n) for n in at_rows])
    axes.xaxis.set_ticks(tiles.middles(1), [str(n) for n in at_columns])
    axes.set_xlabel("column of the patch", fontfamily=_FONT, fontsize=10.5, color=theme.muted)
    axes.set_ylabel("row of the patch", fontfamily=_FONT, fontsize=10.5, color=theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=9, labelfontfamily=_FONT, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _bar(figure, axes, image, "similarity", theme)
    return figure


def _some_positions(found: PositionSimilarity) -> tuple[np.ndarray, list[int], list[int]]:
    """At most `TILES_AT_MOST` a side, evenly spread."""
    assert found.values is not None
    kept = [np.unique(np.linspace(0, n - 1, min(n, TILES_AT_MOST)).round().astype(int)) for n in found.values.shape[:2]]
    values = found.values[kept[0]][:, kept[1]]
    return values, [found.at_rows[i] for i in kept[0]], [found.at_columns[i] for i in kept[1]]


# Scatter, boxes, heat map ---------------------------------------------------------------------------------------------


def distance(found: AttentionDistance, theme: Theme = PAPER) -> Figure:
    """A dot for each head, layer by layer, in pixels, with the lines of uniform and of local attention."""
    lines = [(found.uniform, "all patches\nalike"), (found.local, "own patch and\nneighbours alike")]
    return _scatter(found.layers, found.distance, lines, "mean attention distance (pixels)", theme)


def entropy(found: AttentionDistance, theme: Theme = PAPER) -> Figure:
    """The same of entropy, in nats."""
    lines = [
        (float(np.log(found.keys)), "all patches\nalike"),
        (found.local_entropy, "own patch and\nneighbours alike"),
    ]
    return _scatter(found.layers, found.entropy, lines, "attention entropy (nats)", theme)


def _scatter(
    layers: Sequence[int], values: np.ndarray, lines: Sequence[tuple[float, str]], label: str, theme: Theme
) -> Figure:
    figure = Figure(figsize=(6.4, 4.0))
    axes = figure.subplots()
    for height, text in lines:
        axes.axhline(height, color=theme.second, linewidth=1.4, linestyle=(0, (5, 3)), zorder=1)
        axes.annotate(
            text, (1, height), xycoords=("axes fraction", "data"), xytext=(5, 0), textcoords="offset points",
            ha="left", va="center", fontfamily=_FONT, fontsize=9.5, color=theme.second,
        )  # fmt: skip
    for place, heads in enumerate(values):
        axes.plot([place] * len(heads), heads, linestyle="", marker="o", markersize=6.5, color=theme.first, alpha=0.6,
                  markeredgewidth=0, zorder=2)  # fmt: skip
    highest = max([height for height, _ in lines] + [float(v) for v in values[np.isfinite(values)]])
    axes.set_ylim(0, 1.1 * highest if highest > 0 else 1)
    _layer_axis(axes, layers, theme)
    _dress(axes, label, theme)
    return figure


def norms(found: TokenNorms, theme: Theme = PAPER) -> Figure:
    """Norms of the patches after each block as boxes (quartiles; whiskers from 5 to 95 %), outliers as dots, and the
    mean norm of each token before the patches.
    """
    figure = Figure(figsize=(6.4, 4.0))
    axes = figure.subplots()
    _, low, first, middle, third, high, _ = found.quantiles.T
    places = np.arange(len(found.layers))
    axes.vlines(places, low, high, color=theme.muted, linewidth=1.2, zorder=2)
    axes.bar(places, third - first, 0.5, first, color=theme.first, alpha=0.55, zorder=2, label="patches")
    axes.hlines(middle, places - 0.25, places + 0.25, color=theme.ink, linewidth=1.6, zorder=3)
    for place, one, bound in zip(places, found.norms, found.threshold, strict=True):
        outliers = np.sort(one[one > bound])[-_DOTS:]
        name = "outliers" if found.outliers.any() and place == int(np.flatnonzero(found.outliers)[0]) else None
        axes.plot(np.full(len(outliers), place), outliers, linestyle="", marker="o", markersize=4, alpha=0.5,
                  color=theme.second, markeredgewidth=0, zorder=3, label=name)  # fmt: skip
    _prefix_marks(axes, found, places, theme)
    largest = found.norms.max(axis=(1, 2))
    top = max(np.where(found.outliers > 0, largest, high).max(), found.prefix.max(initial=0))
    if top > 12 * max(float(np.median(middle)), 1e-12):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.06 * float(top) or 1)
    _layer_axis(axes, found.layers, theme)
    _dress(axes, "norm of a token", theme)
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=5, frameon=False, labelcolor=theme.ink, borderaxespad=0.2,
        handletextpad=0.5, columnspacing=1.4, prop={"family": _FONT, "size": 9.5},
    )  # fmt: skip
    return figure


def _prefix_marks(axes: Axes, found: TokenNorms, places: np.ndarray, theme: Theme) -> None:
    """The class token's mean norm as a diamond, the distillation token's as a square, those of registers as crosses."""
    names = [name.split()[0] for name in found.prefix_names]
    for name, marker in (("class", "D"), ("distillation", "s"), ("register", "x")):
        columns = [i for i, one in enumerate(names) if one == name]
        for i in columns:
            text = f"{name} token{'s' if len(columns) > 1 else ''}" if i == columns[0] else None
            axes.plot(places, found.prefix[:, i], linestyle="", marker=marker, markersize=6, color=theme.ink,
                      markerfacecolor="none", markeredgewidth=1.3, zorder=4, label=text)  # fmt: skip


def likeness(found: Likeness, theme: Theme = PAPER) -> Figure:
    """CKA of every layer with every other, from the input (in) up."""
    figure = Figure(figsize=(5.2, 4.4))
    axes = figure.subplots()
    image = axes.imshow(found.values, cmap="cividis", vmin=0, vmax=1, origin="lower", interpolation="none")
    names = ["in" if layer == POOL else str(layer) for layer in found.layers]
    step = -(-len(names) // 14)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(0, len(names), step), names[::step])
        axis.set_label_text("layer", fontfamily=_FONT, fontsize=10.5, color=theme.muted)
    axes.tick_params(colors=theme.muted, labelsize=9.5, labelfontfamily=_FONT, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _bar(figure, axes, image, "CKA", theme)
    return figure


# Maps over a picture --------------------------------------------------------------------------------------------------


def heads(found: HeadMaps, picture: np.ndarray, theme: Theme = PAPER) -> Figure:
    """The picture, uint8 (H, W, C), and over it the attention of each head (columns) in some layers (rows)."""
    rows, count = shown_layers(len(found.layers)), min(found.values.shape[1], HEADS_AT_MOST)
    small = Image.fromarray(np.ascontiguousarray(picture[..., 0] if picture.shape[2] < 3 else picture[..., :3]))
    small.thumbnail((_TILE, _TILE), Image.Resampling.LANCZOS)
    shown = np.asarray(small.convert("RGB")) / 255
    tiles = [tile for row in rows for tile in (shown, *(_over(shown, one) for one in found.values[row, :count]))]
    laid = tiled(np.stack(tiles), count + 1)
    for row in range(1, len(rows)):  # the picture once, beside the first row
        laid.canvas[row * (laid.size[0] + laid.gap) :, : laid.size[1], 3] = 0
    tall, wide = laid.canvas.shape[:2]
    width = max(4.0, 1.1 * (count + 1) + 0.6)
    figure = Figure(figsize=(width, width * tall / wide + 0.3))
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.imshow(laid.canvas, interpolation="none")
    heads = [f"head {head}" if count <= 8 else str(head) for head in range(count)]
    axes.xaxis.tick_top()
    axes.set_xticks(laid.middles(1), ["picture" if count <= 8 else "", *heads])
    names = ["MAP head" if found.layers[row] == POOL else f"layer {found.layers[row]}" for row in rows]
    axes.set_yticks(laid.middles(0), names)
    axes.tick_params(colors=theme.muted, labelsize=9.5, labelfontfamily=_FONT, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure


def shown_layers(count: int) -> list[int]:
    """The layers whose maps are drawn: at most four, evenly spread, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, LAYERS_AT_MOST)).round().astype(int)).tolist()


def _over(picture: np.ndarray, values: np.ndarray) -> np.ndarray:
    """A map (rows, columns), brightest where it is largest, over the picture (H, W, 3), which is made grey."""
    height, width = picture.shape[:2]
    top = float(values.max())
    rows, columns = (np.arange(n) * m // n for n, m in zip((height, width), values.shape, strict=True))
    level = (values / top if top > 0 else values)[rows][:, columns]
    weight = 0.25 + 0.6 * level[..., None]
    grey = picture.mean(axis=-1, keepdims=True)
    return weight * colormaps["inferno"](level)[..., :3] + (1 - weight) * (0.08 + 0.6 * grey)


# What drawings share --------------------------------------------------------------------------------------------------


def _layer_axis(axes: Axes, layers: Sequence[int], theme: Theme) -> None:
    count = len(layers)
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_xlabel("layer", fontfamily=_FONT, fontsize=10.5, color=theme.muted)
    step = -(-count // 16)
    axes.set_xticks(range(0, count, step), [str(layer) for layer in layers[::step]])


def _dress(axes: Axes, label: str, theme: Theme) -> None:
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.grid(visible=True, axis="y", color=theme.line, linewidth=0.8, linestyle="solid")
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=theme.muted, linewidth=0.8)
    axes.tick_params(which="both", colors=theme.muted, labelsize=10, labelfontfamily=_FONT, length=0, pad=5)
    axes.set_ylabel(label, fontfamily=_FONT, fontsize=10.5, color=theme.muted)


def _bar(figure: Figure, axes: Axes, image: Any, label: str, theme: Theme) -> None:
    # Inside the axes' own box: beside the image also where that is narrower than its room.
    bar = figure.colorbar(image, cax=axes.inset_axes((1.03, 0, 0.03, 1)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=theme.muted, labelsize=9.5, labelfontfamily=_FONT, length=0)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.set_label(label, fontfamily=_FONT, fontsize=10.5, color=theme.muted)
