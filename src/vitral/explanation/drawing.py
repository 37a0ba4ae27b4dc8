"""Draw heat maps: overlays, pages that compare methods or classes, contact sheets.

Needs no display and none of matplotlib's global state. Colors are color-blind safe: inferno for unsigned maps; from
blue (against the class) over white to red (for it) for signed maps, symmetric around 0. Maps that are not believable
are gray. Output is deterministic.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from vitral import fonts
from vitral.atomic import replacing
from vitral.drawing import png, svg
from vitral.errors import UsageError
from vitral.explanation.attribution import Attribution
from vitral.explanation.methods import method_named

SUFFIXES = (".png", ".svg", ".json")
SHEET_IMAGES = 200
"""Largest number of images on a contact sheet; more could not be viewed at a glance."""

_OPACITY = 0.72  # of the strongest patch, so that the image under it stays visible
_MIN_SIZE = 448  # pixels, longer side of an overlay
_PIXELATED_BELOW = 96  # pixels; smaller images are enlarged by nearest neighbor, as in the report
_COLORS = {True: "RdBu_r", False: "inferno"}  # by signed
_DPI = 150
_INK, MUTED, WARNING = "#1a1a1a", "#5a5a5a", "#a33b00"

# Inches. A strip is a map, its overlay and its color bar, below two or three lines of text.
_PANEL, GAP, _BAR, _HEAD, MARGIN = 2.3, 0.12, 0.62, 0.62, 0.2
LINE = 0.185


# One overlay ---------------------------------------------------------------------------------------------------------


def overlay(heatmap: Attribution, size: int | None = None, *, smooth: bool = True) -> Image.Image:
    """Gray image with the map over it, RGB. Strong patches are opaque, weak ones transparent.

    `size` is the longer side in pixels, by default as in the image, but at least 448. Without `smooth` each patch is
    one square. A map that is not believable is gray and labeled.
    """
    if size is not None and size < 1:
        raise UsageError(f"an overlay of {size} pixels cannot be drawn")
    image = enlarged(heatmap.image, size)
    base = np.asarray(image.convert("L"), dtype=np.float32)[..., None] / 255
    base = 0.15 + 0.8 * base  # so that dark colors show on black
    strength = _resized(_scaled(heatmap), image.size, smooth)
    # Weak values are transparent, so they need no pale colors. Values dwarfed by an outlier must stay visible.
    signed = _signed(heatmap)
    colors = colormaps[_colors(heatmap)](_place(strength, signed))[..., :3]
    opacity = _OPACITY * np.abs(strength)[..., None] ** _power(signed)
    mixed = base * (1 - opacity) + colors * opacity
    drawn = Image.fromarray((mixed * 255).round().astype(np.uint8))
    if heatmap.checks.get("believable") is False:
        _write_below(drawn, "no better than random")
    return drawn


def _place(strength: np.ndarray, signed: bool) -> np.ndarray:
    """Positions of scaled values on the color map of an overlay."""
    return 0.5 + np.sign(strength) * (0.3 + 0.08 * np.abs(strength)) if signed else strength


def _power(signed: bool) -> float:
    """Exponent of the opacity."""
    return 0.8 if signed else 0.6


def style(method: str) -> dict[str, object]:
    """Return plain data for a program that draws overlays itself, as `web/overlay.js`: sizes, opacity, and a color
    (red, green, blue; 0 to 255) for each of 256 steps from the least to the greatest scaled value.
    """
    signed = method_named(method).signed
    steps = (np.arange(256) + 0.5) / 256
    place = _place(2 * steps - 1, signed) if signed else steps
    colors = (255 * colormaps[_COLORS[signed]](place)[:, :3]).round().astype(int).tolist()
    return {
        "signed": signed,
        "opacity": _OPACITY,
        "power": _power(signed),
        "colors": colors,
        "size": _MIN_SIZE,
        "pixelated": _PIXELATED_BELOW,
    }


def enlarged(pixels: np.ndarray, size: int | None = None) -> Image.Image:
    """Resize uint8 (H, W, C) to `size` pixels along the longer side, by default its own, at least 448."""
    image = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] < 3 else pixels[..., :3]))
    longer = max(image.size)
    target = size or max(longer, _MIN_SIZE)
    shape = (max(1, round(image.width * target / longer)), max(1, round(image.height * target / longer)))
    small = longer < _PIXELATED_BELOW and target > longer
    return image.resize(shape, Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS).convert("RGB")


def _signed(heatmap: Attribution) -> bool:
    """True if the map needs signed colors: for negative values, and for all maps of a signed method."""
    return method_named(heatmap.method).signed or bool((heatmap.values < 0).any())


def _limits(heatmap: Attribution) -> tuple[float, float]:
    """Values at the ends of the color bar."""
    low, high = float(heatmap.values.min()), float(heatmap.values.max())
    if not np.isfinite([low, high]).all():
        raise UsageError("a map with values that are not finite cannot be drawn", where=heatmap.name or None)
    return (-max(-low, high), max(-low, high)) if _signed(heatmap) else (low, high)


def _scaled(heatmap: Attribution) -> np.ndarray:
    """Values scaled to 0 … 1, or −1 … 1 if signed; a constant map is 0."""
    low, high = _limits(heatmap)
    base = 0.0 if _signed(heatmap) else low
    return np.asarray((heatmap.values - base) / max(high - base, float(np.finfo(np.float32).tiny)))


def _colors(heatmap: Attribution) -> str:
    if heatmap.checks.get("believable") is False:
        return "gray"
    return _COLORS[_signed(heatmap)]


def _resized(values: np.ndarray, size: tuple[int, int], smooth: bool) -> np.ndarray:
    """Resize a map to the pixels of an image of (width, height)."""
    resample = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    resized = np.asarray(Image.fromarray(values.astype(np.float32)).resize(size, resample))
    return resized.clip(values.min(), values.max())  # bicubic interpolation overshoots


def _write_below(image: Image.Image, text: str) -> None:
    """Write a line in a dark band at the lower edge, in the largest font that fits."""
    draw = ImageDraw.Draw(image)
    for points in (max(9, image.height // 20), 9):
        font = fonts.pillow_font(text, points)
        if draw.textlength(text, font) <= image.width - 4:
            break
    height = points + points // 2
    draw.rectangle((0, image.height - height, image.width, image.height), fill=(24, 24, 24))
    draw.text((image.width / 2, image.height - height / 2), text, (255, 255, 255), font, anchor="mm")


# Pages ---------------------------------------------------------------------------------------------------------------


def check_suffix(path: str | Path) -> Path:
    """Return the path; `UsageError` if heat maps cannot be written with its suffix."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        why = f"its suffix is '{path.suffix}'" if path.suffix else "it has no suffix"
        raise UsageError("heat maps are written as .png, .svg or .json", where=path, why=why, hint=path.stem + ".png")
    return path


def save(heatmaps: Sequence[Attribution], path: str | Path, *, recommended: str = "") -> Path:
    """Write heat maps to one page: each image once, next to its maps with overlay and color bar. Among several methods,
    the `recommended` one is marked.

    The suffix selects the format: .png, .svg, or .json for the values. Raises `UsageError` for other suffixes and if
    there are no maps.
    """
    path = check_suffix(path)
    if not heatmaps:
        raise UsageError("there is no heat map to save", where=path)
    if path.suffix.lower() == ".json":
        return write_bytes(path, (json.dumps([one.to_json() for one in heatmaps], indent=2) + "\n").encode())
    return write(page(heatmaps, recommended), path)


def contact_sheet(
    heatmaps: Sequence[Attribution], path: str | Path, *, left_out: int = 0, classes: Collection[str] = ()
) -> Path:
    """Write the overlays of many images as one grid, each with class and probability: .png, .svg or .json.

    At most 200 are drawn. The number of others, including `left_out` that were not passed, is written below. An image
    whose folder is another one of `classes` is marked: the prediction is wrong.
    """
    path = check_suffix(path)
    if path.suffix.lower() == ".json" or not heatmaps:
        return save(heatmaps, path)
    drawn = heatmaps[:SHEET_IMAGES]
    columns = min(len(drawn), 8, max(3, round(len(drawn) ** 0.5 * 1.3)))
    rows, cell, text = -(-len(drawn) // columns), 1.7, 3 * LINE
    wrong = [Path(one.name).parent.name in {*classes} - {one.label} for one in drawn]
    foot = _foot(drawn, len(heatmaps) - len(drawn) + left_out)
    if any(wrong):
        foot.insert(1, f"✗ wrong: {sum(wrong)}; the folder of the image names another class")
    width = max(columns * (cell + GAP) - GAP, 3.6) + 2 * MARGIN
    sheet = Sheet(width, rows * (cell + text + GAP) + 2 * MARGIN + LINE * len(foot))
    for number, one in enumerate(drawn):
        left = MARGIN + number % columns * (cell + GAP)
        top = MARGIN + number // columns * (cell + text + GAP)
        sheet.image(left, top, cell, np.asarray(overlay(one, 320)))
        title = f"{'✗ ' if wrong[number] else ''}{fit_title(one, cell - 0.2, 8.5)}"
        sheet.text(left, top + cell + 0.04, title, 8.5, WARNING if wrong[number] else _INK, weight="bold")
        sheet.text(left, top + cell + 0.04 + LINE, fit("/".join(Path(one.name).parts[-2:]), cell - 0.06, 7), 7, MUTED)
    for number, line in enumerate(foot):
        sheet.text(MARGIN, sheet.height - MARGIN - (len(foot) - number) * LINE, line, 8, MUTED)
    return write(sheet.figure, path)


def _foot(heatmaps: Sequence[Attribution], left_out: int) -> list[str]:
    methods = list(dict.fromkeys(one.method for one in heatmaps))
    lines = ["Method: " + ", ".join(method_named(name).title for name in methods)]
    if any(map(_signed, heatmaps)):
        lines.append("red: for the named class; blue: against it")
    if not all(map(_signed, heatmaps)):
        lines.append("bright: more; dark: less")
    lines += dict.fromkeys(one.note for one in heatmaps if method_named(one.method).routing and one.note)
    return lines + ([f"and {left_out:,} more images"] if left_out else [])


def page(heatmaps: Sequence[Attribution], recommended: str = "") -> Figure:
    """A block for each image: the image, and next to it the strips of its maps."""
    blocks: dict[tuple[str, bytes], list[Attribution]] = {}
    for one in heatmaps:
        blocks.setdefault((one.name, one.image.tobytes()), []).append(one)
    rows = [_rows(own) for own in blocks.values()]
    heights = [_panel_height(own) + _HEAD + 0.2 for own in blocks.values()]
    columns, strip = max(len(row) for block in rows for row in block), 2 * _PANEL + _BAR + 2 * GAP
    height = sum(len(block) * tall for block, tall in zip(rows, heights, strict=True)) + 2 * MARGIN
    sheet, top = Sheet(2 * MARGIN + _PANEL + columns * (strip + 2 * GAP), height), MARGIN
    for block, tall in zip(rows, heights, strict=True):
        first = block[0][0]
        sheet.text(MARGIN, top, fit(Path(first.name).name or "image", _PANEL, 9), 9, _INK)
        seen = f"the network sees {first.image.shape[1]} × {first.image.shape[0]}"
        sheet.text(MARGIN, top + LINE, fit(seen, _PANEL, 9), 9, MUTED)
        sheet.image(MARGIN, top + _HEAD, _PANEL, np.asarray(enlarged(first.image)))
        for row in block:
            for column, one in enumerate(row):
                left = MARGIN + _PANEL + 2 * GAP + column * (strip + 2 * GAP)
                _draw_strip(sheet, left, top, one, one.method == recommended)
            top += tall
    return sheet.figure


def _rows(maps: Sequence[Attribution]) -> list[list[Attribution]]:
    """Arrange strips in rows: one method per row if there are several methods and classes, otherwise by number."""
    of_method: dict[str, list[Attribution]] = {}
    for one in maps:
        of_method.setdefault(one.method, []).append(one)
    if len(of_method) > 1 and 1 < max(map(len, of_method.values())) <= 4:
        return list(of_method.values())
    columns = 1 if len(maps) <= 3 else 2 if len(maps) <= 8 else 3
    return [list(maps[i : i + columns]) for i in range(0, len(maps), columns)]


def _panel_height(heatmaps: Sequence[Attribution]) -> float:
    """Height in inches of a panel of these images, of fixed width, and of the color bar beside it."""
    height, width = heatmaps[0].image.shape[:2]
    return max(_PANEL * min(height / width, 2.5), _LOWEST_BAR)


_LOWEST_BAR = 0.9
"""Height in inches of the color bar beside a very wide image."""


def _draw_strip(sheet: Sheet, left: float, top: float, one: Attribution, recommended: bool) -> None:
    """Draw title, method and note, and below them the map, the overlay and the color bar."""
    width, below = 2 * _PANEL + GAP, top + _HEAD
    sheet.text(left, top, fit_title(one, width, 9.5), 9.5, weight="bold")
    method = f"recommended: {_method_of(one)}" if recommended else _method_of(one)
    sheet.text(left, top + LINE, fit(method, width, 8.5), 8.5, _INK if recommended else MUTED)
    if one.note:
        sheet.text(left, top + 2 * LINE, fit(one.note, width, 8.5), 8.5, WARNING)
    place = (_scaled(one) + 1) / 2 if _signed(one) else _scaled(one)  # on the color map, 0 … 1
    colors = colormaps[_colors(one)](place, bytes=True)[..., :3]
    size = enlarged(one.image).size
    tiles = np.asarray(Image.fromarray(np.ascontiguousarray(colors)).resize(size, Image.Resampling.NEAREST))
    sheet.image(left, below, _PANEL, tiles)
    tall = sheet.image(left + _PANEL + GAP, below, _PANEL, np.asarray(overlay(one)))
    sheet.color_bar(left + 2 * (_PANEL + GAP), below, tall, one)


def _method_of(one: Attribution) -> str:
    """Title of the method, and the checks of the map, if any."""
    return " · ".join([method_named(one.method).title, *checks_text(one)])


def checks_text(one: Attribution) -> list[str]:
    """Checks of a map as text; empty without checks."""
    texts = []
    if isinstance(srg := one.checks.get("srg"), int | float):
        random = one.checks.get("random_srg")
        baseline = f" (random {round(random, 2) + 0.0:.2f})" if isinstance(random, int | float) else ""
        believable = one.checks.get("believable")
        verdict = "" if believable is None else "beats random maps: " if believable else "does not beat random maps: "
        texts.append(f"{verdict}SRG {srg:.2f}{baseline}")
    return texts


class Sheet:
    """Figure with coordinates in inches from the upper left corner."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")

    def image(self, left: float, top: float, width: float, pixels: np.ndarray) -> float:
        """Place an image and return its height. Very tall images are made narrower."""
        tall = width * pixels.shape[0] / pixels.shape[1]
        if tall > 2.5 * width:
            tall, width = 2.5 * width, 2.5 * width * pixels.shape[1] / pixels.shape[0]
        self._axes(left, top, width, tall).imshow(pixels, interpolation="lanczos", aspect="auto")
        return tall

    def text(
        self, left: float, top: float, text: str, points: float, color: str = _INK, weight: str = "normal"
    ) -> None:
        self.figure.text(
            left / self.width,
            1 - top / self.height,
            text,
            fontsize=points,
            color=color,
            fontfamily=fonts.families(),
            fontweight=weight,
            va="top",
            parse_math=False,
        )

    def color_bar(self, left: float, top: float, tall: float, one: Attribution) -> None:
        """Draw the color bar, with values and labels at its ends."""
        tall = max(tall, _LOWEST_BAR)
        low, high = _limits(one)
        axes = self._axes(left, top + 0.16, 0.12, tall - 0.32)
        ramp = colormaps[_colors(one)](np.linspace(1, 0, 256), bytes=True)[:, None, :3]
        axes.imshow(ramp, aspect="auto", interpolation="nearest")
        words = (one.label, one.against) if one.against else ("for", "against") if low < 0 else ("more", "less")
        self.text(left, top, fit(words[0], _BAR + 0.1, 7), 7, MUTED)
        self.text(left, top + tall - 0.12, fit(words[1], _BAR + 0.1, 7), 7, MUTED)
        ends = [(0.16, high), (tall - 0.28, low)] + ([(tall / 2 - 0.05, 0.0)] if low < 0 else [])
        for down, value in ends:
            self.text(left + 0.16, top + down, f"{value:.2g}", 7, _INK)

    def _axes(self, left: float, top: float, width: float, tall: float) -> Axes:
        axes = self.figure.add_axes(
            (left / self.width, 1 - (top + tall) / self.height, width / self.width, tall / self.height)
        )
        axes.set_axis_off()
        return axes


def fit_title(one: Attribution, inches: float, points: float) -> str:
    """Fit a title in bold. In a contrast, each name is shortened by itself, so that both are seen."""
    between = " rather than "
    if not one.against or fonts.width(one.title, points, bold=True) <= inches:
        return fit(one.title, inches, points, bold=True)
    each = (inches - fonts.width(between, points, bold=True)) / 2
    return between.join(fit(name, each, points, bold=True) for name in (one.label, one.against))


def fit(text: str, inches: float, points: float, *, bold: bool = False) -> str:
    """Fit any text into one line of this width. It is cut in the middle, since names differ at their ends."""
    text = "".join(c if c.isprintable() or c in "\u200c\u200d" else "�" for c in text)
    return fonts.shortened(text, lambda cut: fonts.width(cut, points, bold=bold) <= inches)


def write(figure: Figure, path: Path) -> Path:
    with warnings.catch_warnings(), fonts.quiet():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # characters missing in the font are drawn as boxes
        data = svg(figure).encode() if path.suffix.lower() == ".svg" else png(figure, _DPI)
    return write_bytes(path, data)


def write_bytes(path: Path, data: bytes) -> Path:
    with replacing(path) as temporary:
        temporary.write_bytes(data)
    return path
