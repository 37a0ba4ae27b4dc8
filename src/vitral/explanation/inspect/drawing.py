"""Draw the measures of Figure 7 in the style of the paper, without a display or matplotlib's global state.

Each function returns a matplotlib figure; `save` writes it as PNG or SVG. Colors come from a `Theme`, so that the same
drawing suits files (dark on white) and a page with a dark mode. The color maps, viridis and cividis, are color-blind
safe and readable in gray.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from vitral.atomic import replacing
from vitral.drawing import FONT, dress, png, svg
from vitral.explanation.capture import INPUT, POOL
from vitral.explanation.inspect.attention_distance import AttentionDistance
from vitral.explanation.inspect.cka import Likeness
from vitral.explanation.inspect.filters import PatchFilters
from vitral.explanation.inspect.head_maps import HeadMaps
from vitral.explanation.inspect.norms import TokenNorms
from vitral.explanation.inspect.positions import PositionSimilarity


@dataclass(frozen=True)
class Theme:
    """Colors of a drawing, in matplotlib's notation."""

    ink: str = "#1d1f24"
    muted: str = "#5a606b"
    line: str = "#d9d6ce"
    first: str = "#0072b2"
    second: str = "#d55e00"


PAPER = Theme()
"""Theme of files, on white."""

MAX_TILES = 14
"""Rows and columns of drawn maps of position similarity; more would be too small."""
MAX_HEADS, MAX_LAYERS = 12, 4
"""Heads and layers whose maps are drawn; all values are in the JSON."""

_KERNELS = (8, 16)  # rows and columns of raw kernels
_GAP = 0.12  # of a tile
_DOTS = 400  # largest outliers of a layer that are drawn
_DPI = 160
_TILE = 128  # pixels of an image under a map


def save(figure: Figure, *paths: Path) -> None:
    """Write a figure on white as PNG or SVG, by the suffix of each path, atomically."""
    figure.set_layout_engine("constrained")
    figure.patch.set(facecolor="white", alpha=1)
    for path in paths:
        drawn = svg(figure).encode() if path.suffix == ".svg" else png(figure, _DPI)
        figure.set_layout_engine("none")  # keep the layout
        with replacing(path) as temporary:
            temporary.write_bytes(drawn)


# Tiles ----------------------------------------------------------------------------------------------------------------


class Tiles(NamedTuple):
    """Tiles on a canvas (H, W, 4), with transparent gaps."""

    canvas: np.ndarray
    size: tuple[int, int]
    """Height and width of a tile on the canvas."""
    gap: int

    def middles(self, axis: int) -> np.ndarray:
        """Centers of the tiles along an axis."""
        step, length = self.size[axis] + self.gap, self.canvas.shape[axis]
        return np.arange((length + self.gap) // step) * step + (self.size[axis] - 1) / 2


def tiled(tiles: np.ndarray, columns: int) -> Tiles:
    """Arrange tiles (n, h, w, 3) of 0 … 1 in rows of `columns`."""
    count, height, width, _ = tiles.shape
    # Gaps are whole pixels, so small tiles are enlarged first.
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


def as_colors(kernels: np.ndarray) -> np.ndarray:
    """Kernels (n, C, p, q) as images (n, p, q, 3): 0 is mid-gray, the largest value of each kernel black or white.

    One channel is gray, two are red and green, of more than three only the first three are used.
    """
    channels = {1: [0, 0, 0], 2: [0, 1]}.get(kernels.shape[1], [0, 1, 2])
    selected = kernels[:, channels]
    largest = np.abs(selected).max(axis=(1, 2, 3), keepdims=True)
    colors = 0.5 + 0.5 * selected / np.where(largest > 0, largest, 1)
    if len(channels) == 2:
        colors = np.concatenate([colors, np.full_like(colors[:, :1], 0.5)], axis=1)
    return colors.transpose(0, 2, 3, 1)


def filters(found: PatchFilters, theme: Theme = PAPER) -> Figure:
    """Principal components of the patch kernels, seven in a row, largest variance first."""
    return _image(tiled(as_colors(found.components), min(7, len(found.components))).canvas, 6.2)


def kernels(found: PatchFilters, theme: Theme = PAPER) -> Figure:
    """Kernels, the largest first, at most 128."""
    sizes = np.sqrt((found.kernels.astype(np.float64) ** 2).sum(axis=(1, 2, 3)))
    order = np.argsort(-sizes, kind="stable")[: _KERNELS[0] * _KERNELS[1]]
    return _image(tiled(as_colors(found.kernels[order]), min(_KERNELS[1], len(order))).canvas, 7.6)


def _image(canvas: np.ndarray, width: float) -> Figure:
    """Figure of an image without axes."""
    height = width * canvas.shape[0] / canvas.shape[1]
    figure = Figure(figsize=(width, min(height, 9.0)))
    axes = figure.subplots()
    axes.imshow(canvas, interpolation="none")
    axes.set_axis_off()
    return figure


def positions(found: PositionSimilarity, theme: Theme = PAPER) -> Figure:
    """One map for each position: its similarity to every other, in the rows and columns of the image."""
    assert found.values is not None
    values, at_rows, at_columns = _some_positions(found)
    low = min(0.0, float(np.floor(values.min() * 10) / 10))
    colors = colormaps["viridis"]((values - low) / (1 - low))[..., :3]
    tiles = tiled(colors.reshape(-1, *colors.shape[2:]), len(at_columns))
    tall, wide = tiles.canvas.shape[0] * found.patch[0], tiles.canvas.shape[1] * found.patch[1]
    width = 6.6 * min(1.0, max(0.55, 1.6 * wide / tall))
    figure = Figure(figsize=(width, min(9.0, max(2.2, (width - 1.2) * tall / wide + 0.8))))
    axes = figure.subplots()
    axes.set_facecolor("none")  # transparent gaps
    image = axes.imshow(tiles.canvas, interpolation="none", aspect=found.patch[0] / found.patch[1])
    image.set(cmap="viridis", clim=(low, 1))  # for the color bar, since the canvas has RGB values
    axes.yaxis.set_ticks(tiles.middles(0), [str(n) for n in at_rows])
    axes.xaxis.set_ticks(tiles.middles(1), [str(n) for n in at_columns])
    axes.set_xlabel("column of the patch", fontfamily=FONT, fontsize=10.5, color=theme.muted)
    axes.set_ylabel("row of the patch", fontfamily=FONT, fontsize=10.5, color=theme.muted)
    _remove_frame(axes, 9, theme)
    _bar(figure, axes, image, "similarity", theme)
    return figure


def _some_positions(found: PositionSimilarity) -> tuple[np.ndarray, list[int], list[int]]:
    """At most `MAX_TILES` evenly spaced rows and columns."""
    assert found.values is not None
    kept = [np.unique(np.linspace(0, n - 1, min(n, MAX_TILES)).round().astype(int)) for n in found.values.shape[:2]]
    values = found.values[kept[0]][:, kept[1]]
    return values, [found.at_rows[i] for i in kept[0]], [found.at_columns[i] for i in kept[1]]


# Scatter, boxes, heat map ---------------------------------------------------------------------------------------------


def distance(found: AttentionDistance, theme: Theme = PAPER) -> Figure:
    """Attention distance in pixels, one dot for each head, with lines for uniform and local attention."""
    lines = [(found.uniform, "all patches\nalike"), (found.local, "own patch and\nneighbors alike")]
    return _scatter(found.layers, found.distance, lines, "mean attention distance (pixels)", theme)


def entropy(found: AttentionDistance, theme: Theme = PAPER) -> Figure:
    """Attention entropy in nats, one dot for each head, with lines for uniform and local attention."""
    lines = [
        (float(np.log(found.keys)), "all patches\nalike"),
        (found.local_entropy, "own patch and\nneighbors alike"),
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
            text,
            (1, height),
            xycoords=("axes fraction", "data"),
            xytext=(5, 0),
            textcoords="offset points",
            ha="left",
            va="center",
            fontfamily=FONT,
            fontsize=9.5,
            color=theme.second,
        )
    for place, heads in enumerate(values):
        axes.plot(
            [place] * len(heads),
            heads,
            linestyle="",
            marker="o",
            markersize=6.5,
            color=theme.first,
            alpha=0.6,
            markeredgewidth=0,
            zorder=2,
        )
    highest = max([height for height, _ in lines] + [float(v) for v in values[np.isfinite(values)]])
    axes.set_ylim(0, 1.1 * highest if highest > 0 else 1)
    _layer_axis(axes, layers, theme)
    dress(axes, label, theme.muted, theme.line)
    return figure


def norms(found: TokenNorms, theme: Theme = PAPER) -> Figure:
    """Box plots of patch norms after each block, with outliers and the mean norms of other tokens.

    Boxes are quartiles, whiskers 5 to 95%.
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
        axes.plot(
            np.full(len(outliers), place),
            outliers,
            linestyle="",
            marker="o",
            markersize=4,
            alpha=0.5,
            color=theme.second,
            markeredgewidth=0,
            zorder=3,
            label=name,
        )
    _prefix_marks(axes, found, places, theme)
    largest = found.norms.max(axis=(1, 2))
    top = max(np.where(found.outliers > 0, largest, high).max(), found.prefix.max(initial=0))
    if top > 12 * max(float(np.median(middle)), 1e-12):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.06 * float(top) or 1)
    _layer_axis(axes, found.layers, theme)
    dress(axes, "norm of a token", theme.muted, theme.line)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=5,
        frameon=False,
        labelcolor=theme.ink,
        borderaxespad=0.2,
        handletextpad=0.5,
        columnspacing=1.4,
        prop={"family": FONT, "size": 9.5},
    )
    return figure


def _prefix_marks(axes: Axes, found: TokenNorms, places: np.ndarray, theme: Theme) -> None:
    """Draw mean norms: the class token as a diamond, the distillation token as a square, registers as crosses."""
    names = [name.split()[0] for name in found.prefix_names]
    for name, marker in (("class", "D"), ("distillation", "s"), ("register", "x")):
        columns = [i for i, one in enumerate(names) if one == name]
        for i in columns:
            text = f"{name} token{'s' if len(columns) > 1 else ''}" if i == columns[0] else None
            axes.plot(
                places,
                found.prefix[:, i],
                linestyle="",
                marker=marker,
                markersize=6,
                color=theme.ink,
                markerfacecolor="none",
                markeredgewidth=1.3,
                zorder=4,
                label=text,
            )


def likeness(found: Likeness, theme: Theme = PAPER) -> Figure:
    """CKA of all pairs of layers, starting with the input (in)."""
    figure = Figure(figsize=(5.2, 4.4))
    axes = figure.subplots()
    image = axes.imshow(found.values, cmap="cividis", vmin=0, vmax=1, origin="lower", interpolation="none")
    names = ["in" if layer == INPUT else str(layer) for layer in found.layers]
    step = -(-len(names) // 14)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(range(0, len(names), step), names[::step])
        axis.set_label_text("layer", fontfamily=FONT, fontsize=10.5, color=theme.muted)
    _remove_frame(axes, 9.5, theme)
    _bar(figure, axes, image, "CKA", theme)
    return figure


# Maps over an image --------------------------------------------------------------------------------------------------


def heads(found: HeadMaps, image: np.ndarray, theme: Theme = PAPER) -> Figure:
    """Attention of each head (columns) in some layers (rows), over the image, uint8 (H, W, C)."""
    rows, count = drawn_layers(len(found.layers)), min(found.values.shape[1], MAX_HEADS)
    small = Image.fromarray(np.ascontiguousarray(image[..., 0] if image.shape[2] < 3 else image[..., :3]))
    small.thumbnail((_TILE, _TILE), Image.Resampling.LANCZOS)
    pixels = np.asarray(small.convert("RGB")) / 255
    tiles = [tile for row in rows for tile in (pixels, *(_over(pixels, one) for one in found.values[row, :count]))]
    grid = tiled(np.stack(tiles), count + 1)
    for row in range(1, len(rows)):  # the image only in the first row
        grid.canvas[row * (grid.size[0] + grid.gap) :, : grid.size[1], 3] = 0
    tall, wide = grid.canvas.shape[:2]
    width = max(4.0, 1.1 * (count + 1) + 0.6)
    figure = Figure(figsize=(width, width * tall / wide + 0.3))
    axes = figure.subplots()
    axes.set_facecolor("none")
    axes.imshow(grid.canvas, interpolation="none")
    heads = [f"head {head}" if count <= 8 else str(head) for head in range(count)]
    axes.xaxis.tick_top()
    axes.set_xticks(grid.middles(1), ["image" if count <= 8 else "", *heads])
    names = ["MAP head" if found.layers[row] == POOL else f"layer {found.layers[row]}" for row in rows]
    axes.set_yticks(grid.middles(0), names)
    _remove_frame(axes, 9.5, theme)
    return figure


def drawn_layers(count: int) -> list[int]:
    """Indices of the layers to draw: at most four, evenly spaced, including the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, MAX_LAYERS)).round().astype(int)).tolist()


def _over(image: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Blend a map (rows, columns), scaled to its maximum, over the gray image (H, W, 3)."""
    height, width = image.shape[:2]
    top = float(values.max())
    rows, columns = (np.arange(n) * m // n for n, m in zip((height, width), values.shape, strict=True))
    level = (values / top if top > 0 else values)[rows][:, columns]
    weight = 0.25 + 0.6 * level[..., None]
    gray = image.mean(axis=-1, keepdims=True)
    return weight * colormaps["inferno"](level)[..., :3] + (1 - weight) * (0.08 + 0.6 * gray)


# Shared by drawings ---------------------------------------------------------------------------------------------------


def _layer_axis(axes: Axes, layers: Sequence[int], theme: Theme) -> None:
    count = len(layers)
    axes.set_xlim(-0.6, count - 0.4)
    axes.set_xlabel("layer", fontfamily=FONT, fontsize=10.5, color=theme.muted)
    step = -(-count // 16)
    axes.set_xticks(range(0, count, step), [str(layer) for layer in layers[::step]])


def _remove_frame(axes: Axes, labelsize: float, theme: Theme) -> None:
    axes.tick_params(colors=theme.muted, labelsize=labelsize, labelfontfamily=FONT, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _bar(figure: Figure, axes: Axes, image: Any, label: str, theme: Theme) -> None:
    # Inset axes keep the bar next to the image, even if the image is narrower than its axes.
    bar = figure.colorbar(image, cax=axes.inset_axes((1.03, 0, 0.03, 1)))
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=theme.muted, labelsize=9.5, labelfontfamily=FONT, length=0)
    bar.ax.yaxis.set_major_locator(MaxNLocator(5))
    bar.set_label(label, fontfamily=FONT, fontsize=10.5, color=theme.muted)
