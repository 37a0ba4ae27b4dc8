"""Heat maps as pictures: overlays, pages that set methods or classes side by side, contact sheets.

Drawn without a display and without matplotlib's global state. Colours are safe for the colour-blind: a map without
signs goes from dark to light (inferno), a signed one from blue (against the class) over white to red (for it), always
symmetric around 0. What cannot be believed is grey. The same input gives the same bytes.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from vitral.errors import UsageError
from vitral.explanation.heatmap import Heatmap
from vitral.explanation.methods import METHODS
from vitral.weights.files import replacing

SUFFIXES = (".png", ".svg", ".json")
SHEET_PICTURES = 200
"""As many as a contact sheet shows; more would no longer be seen at a glance."""

_OPAQUE = 0.72  # of the strongest patch: what lies under it must still be seen
_READABLE = 448  # pixels, the longer side of an overlay whose picture is smaller
_PIXELATED_BELOW = 96  # pixels; smaller pictures are enlarged pixel by pixel, as in the report
_FONT = "DejaVu Sans"  # comes with matplotlib: the same letters on every machine
_DPI = 150
_INK, _MUTED, _WARNING = "#1a1a1a", "#5a5a5a", "#a33b00"

# Inches: a strip is a map, its overlay and its colour bar, under two or three lines of text.
_PANEL, _GAP, _BAR, _HEAD, _MARGIN = 2.3, 0.12, 0.62, 0.62, 0.2
_LINE = 0.185


def contrast(a: Heatmap, b: Heatmap) -> Heatmap:
    """What speaks for the class of `a` rather than that of `b`: the difference of two maps of one picture and method.

    Each map is first divided by the sum of its absolute values: methods differ in what their numbers count, and so do
    classes. Where one of the two cannot be believed, neither can the difference. Raises `UsageError` for maps of
    different pictures or methods.
    """
    if a.method != b.method or a.values.shape != b.values.shape or not np.array_equal(a.image, b.image):
        raise UsageError("two maps can be contrasted where picture and method are the same")
    tiny = float(np.finfo(np.float32).tiny)
    shares = [one.values / max(float(np.abs(one.values).sum()), tiny) for one in (a, b)]
    doubted = any(one.checks.get("believable") is False for one in (a, b))
    return dataclasses.replace(
        a, values=(shares[0] - shares[1]).astype(np.float32), against=b.label,
        checks={"believable": False} if doubted else {},
    )  # fmt: skip


# One overlay ---------------------------------------------------------------------------------------------------------


def overlay(heatmap: Heatmap, size: int | None = None, *, smooth: bool = True) -> Image.Image:
    """The picture in grey with the map over it, RGB; strong patches are opaque, weak ones let the picture through.

    `size` is the longer side in pixels; by default that of the picture, at least 448. Without `smooth` each patch is
    one square, as the network sees it. A map that cannot be believed is drawn in grey, and says so.
    """
    if size is not None and size < 1:
        raise UsageError(f"an overlay of {size} pixels cannot be drawn")
    picture = enlarged(heatmap.image, size)
    base = np.asarray(picture.convert("L"), dtype=np.float32)[..., None] / 255
    base = 0.15 + 0.8 * base  # so that dark colours show on black
    strength = _resized(_scaled(heatmap), picture.size, smooth)
    # Nothing is transparent, so weak values need no pale colours; and what an outlier dwarfs must still be seen.
    place = 0.5 + np.sign(strength) * (0.3 + 0.08 * np.abs(strength)) if _signed(heatmap) else strength
    colours = colormaps[_colours(heatmap)](place)[..., :3]
    opacity = _OPAQUE * np.abs(strength)[..., None] ** (0.8 if _signed(heatmap) else 0.6)
    mixed = base * (1 - opacity) + colours * opacity
    drawn = Image.fromarray((mixed * 255).round().astype(np.uint8))
    if heatmap.checks.get("believable") is False:
        _write_below(drawn, "no better than random")
    return drawn


def enlarged(pixels: np.ndarray, size: int | None = None) -> Image.Image:
    """uint8 (H, W, C) as a picture of `size` pixels along the longer side, by default its own, at least 448."""
    image = Image.fromarray(np.ascontiguousarray(pixels[..., 0] if pixels.shape[2] < 3 else pixels[..., :3]))
    longer = max(image.size)
    wanted = size or max(longer, _READABLE)
    shape = (max(1, round(image.width * wanted / longer)), max(1, round(image.height * wanted / longer)))
    small = longer < _PIXELATED_BELOW and wanted > longer
    return image.resize(shape, Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS).convert("RGB")


def _signed(heatmap: Heatmap) -> bool:
    """Whether the map is drawn in the two colours: also one without a value below 0, of a method that can have them."""
    return METHODS[heatmap.method].signed or bool((heatmap.values < 0).any())


def _limits(heatmap: Heatmap) -> tuple[float, float]:
    """The values at the ends of the colour bar."""
    low, high = float(heatmap.values.min()), float(heatmap.values.max())
    if not np.isfinite([low, high]).all():
        raise UsageError("a map with values that are not finite cannot be drawn", where=heatmap.name or None)
    return (-max(-low, high), max(-low, high)) if _signed(heatmap) else (low, high)


def _scaled(heatmap: Heatmap) -> np.ndarray:
    """Values as 0 … 1, or −1 … 1 where they have signs; a map that is the same everywhere is 0."""
    low, high = _limits(heatmap)
    base = 0.0 if _signed(heatmap) else low
    return np.asarray((heatmap.values - base) / max(high - base, float(np.finfo(np.float32).tiny)))


def _colours(heatmap: Heatmap) -> str:
    if heatmap.checks.get("believable") is False:
        return "gray"
    return "RdBu_r" if _signed(heatmap) else "inferno"


def _position(heatmap: Heatmap, strength: np.ndarray) -> np.ndarray:
    """Where on its scale of colours a strength lies."""
    return (strength + 1) / 2 if _signed(heatmap) else strength


def _resized(values: np.ndarray, size: tuple[int, int], smooth: bool) -> np.ndarray:
    """A map on all pixels of a picture of (width, height)."""
    how = Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST
    found = np.asarray(Image.fromarray(values.astype(np.float32)).resize(size, how))
    return found.clip(values.min(), values.max())  # a cubic overshoots


def _write_below(image: Image.Image, text: str) -> None:
    """A line in a dark band at the lower edge, as large as fits."""
    draw = ImageDraw.Draw(image)
    for points in (max(9, image.height // 20), 9):
        font = ImageFont.load_default(points)
        if draw.textlength(text, font) <= image.width - 4:
            break
    height = points + points // 2
    draw.rectangle((0, image.height - height, image.width, image.height), fill=(24, 24, 24))
    draw.text((image.width / 2, image.height - height / 2), text, (255, 255, 255), font, anchor="mm")


# Pages ---------------------------------------------------------------------------------------------------------------


def check_suffix(path: str | Path) -> Path:
    """The path as it is, where its end is one that we write."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        why = f"its name ends in '{path.suffix}'" if path.suffix else "its name has no end"
        raise UsageError("heat maps are written as .png, .svg or .json", where=path, why=why, hint=path.stem + ".png")
    return path


def save(heatmaps: Sequence[Heatmap], path: str | Path) -> Path:
    """Write heat maps side by side: each picture once, beside it every map of it with overlay and colour bar.

    The name's end says how: .png, .svg, or .json for the numbers. Raises `UsageError` for another end and for no maps.
    """
    path = check_suffix(path)
    if not heatmaps:
        raise UsageError("there is no heat map to save", where=path)
    if path.suffix.lower() == ".json":
        return _put(path, (json.dumps([one.to_json() for one in heatmaps], indent=2) + "\n").encode())
    return _write(_page(heatmaps), path)


def contact_sheet(heatmaps: Sequence[Heatmap], path: str | Path, *, left_out: int = 0) -> Path:
    """Write the overlays of many pictures as one grid, each with class and probability: .png or .svg, or .json.

    At most 200 are shown; how many there are besides, and `left_out` that were not even handed over, is written below.
    """
    path = check_suffix(path)
    if path.suffix.lower() == ".json" or not heatmaps:
        return save(heatmaps, path)
    shown = heatmaps[:SHEET_PICTURES]
    columns = min(len(shown), 8, max(3, round(len(shown) ** 0.5 * 1.3)))
    rows, cell, text = -(-len(shown) // columns), 1.7, 3 * _LINE
    foot = _foot(shown, len(heatmaps) - len(shown) + left_out)
    width = max(columns * (cell + _GAP) - _GAP, 3.6) + 2 * _MARGIN
    sheet = _Sheet(width, rows * (cell + text + _GAP) + 2 * _MARGIN + _LINE * len(foot))
    for number, one in enumerate(shown):
        left = _MARGIN + number % columns * (cell + _GAP)
        top = _MARGIN + number // columns * (cell + text + _GAP)
        sheet.picture(left, top, cell, np.asarray(overlay(one, 320)))
        sheet.text(left, top + cell + 0.04, _fit(one.title, cell, 8.5), 8.5, weight="bold")
        sheet.text(left, top + cell + 0.04 + _LINE, _fit(Path(one.name).name, cell, 7), 7, _MUTED)
    for number, line in enumerate(foot):
        sheet.text(_MARGIN, sheet.height - _MARGIN - (len(foot) - number) * _LINE, line, 8, _MUTED)
    return _write(sheet.figure, path)


def _foot(shown: Sequence[Heatmap], left_out: int) -> list[str]:
    methods = list(dict.fromkeys(one.method for one in shown))
    lines = ["Method: " + ", ".join(METHODS[name].title for name in methods)]
    if any(map(_signed, shown)):
        lines.append("red: for the class that is named; blue: against it")
    if not all(map(_signed, shown)):
        lines.append("bright: more; dark: less")
    lines += dict.fromkeys(one.note for one in shown if METHODS[one.method].routing and one.note)
    return lines + ([f"and {left_out:,} more pictures"] if left_out else [])


def _page(heatmaps: Sequence[Heatmap]) -> Figure:
    """A block for each picture: the picture, and beside it the strips of its maps."""
    blocks: dict[tuple[str, bytes], list[Heatmap]] = {}
    for one in heatmaps:
        blocks.setdefault((one.name, one.image.tobytes()), []).append(one)
    rows = [_rows(own) for own in blocks.values()]
    talls = [_tallness(own) + _HEAD + 0.2 for own in blocks.values()]
    columns, strip = max(len(row) for block in rows for row in block), 2 * _PANEL + _BAR + 2 * _GAP
    height = sum(len(block) * tall for block, tall in zip(rows, talls, strict=True)) + 2 * _MARGIN
    sheet, top = _Sheet(2 * _MARGIN + _PANEL + columns * (strip + 2 * _GAP), height), _MARGIN
    for block, tall in zip(rows, talls, strict=True):
        for number, line in enumerate(_heading(block[0][0])):
            sheet.text(_MARGIN, top + number * _LINE, _fit(line, _PANEL, 9), 9, _MUTED if number else _INK)
        sheet.picture(_MARGIN, top + _HEAD, _PANEL, np.asarray(enlarged(block[0][0].image)))
        for row in block:
            for column, one in enumerate(row):
                _draw_strip(sheet, _MARGIN + _PANEL + 2 * _GAP + column * (strip + 2 * _GAP), top, one)
            top += tall
    return sheet.figure


def _rows(maps: Sequence[Heatmap]) -> list[list[Heatmap]]:
    """Which strips stand side by side: the classes of one method where classes and methods are several, else what
    looks well.
    """
    of_method: dict[str, list[Heatmap]] = {}
    for one in maps:
        of_method.setdefault(one.method, []).append(one)
    if len(of_method) > 1 and 1 < max(map(len, of_method.values())) <= 4:
        return list(of_method.values())
    columns = 1 if len(maps) <= 3 else 2 if len(maps) <= 8 else 3
    return [list(maps[i : i + columns]) for i in range(0, len(maps), columns)]


def _tallness(heatmaps: Sequence[Heatmap]) -> float:
    """Inches of a panel of these pictures; the width is always the same."""
    height, width = heatmaps[0].image.shape[:2]
    return _PANEL * min(height / width, 2.5)


def _heading(one: Heatmap) -> list[str]:
    height, width = one.image.shape[:2]
    return [Path(one.name).name or "picture", f"the network sees {width} × {height}"]


def _draw_strip(sheet: _Sheet, left: float, top: float, one: Heatmap) -> None:
    """Title, class and what to mind; below them the map, the overlay and the colour bar."""
    width, below = 2 * _PANEL + _GAP, top + _HEAD
    sheet.text(left, top, _fit(one.title, width, 9.5), 9.5, weight="bold")
    sheet.text(left, top + _LINE, _fit(_method_of(one), width, 8.5), 8.5, _MUTED)
    if one.note:
        sheet.text(left, top + 2 * _LINE, _fit(one.note, width, 8.5), 8.5, _WARNING)
    colours = colormaps[_colours(one)](_position(one, _scaled(one)), bytes=True)[..., :3]
    size = enlarged(one.image).size
    tiles = np.asarray(Image.fromarray(np.ascontiguousarray(colours)).resize(size, Image.Resampling.NEAREST))
    sheet.picture(left, below, _PANEL, tiles)
    tall = sheet.picture(left + _PANEL + _GAP, below, _PANEL, np.asarray(overlay(one)))
    sheet.colour_bar(left + 2 * (_PANEL + _GAP), below, tall, one)


def _method_of(one: Heatmap) -> str:
    """The method's title and what was measured about this map, as far as it was."""
    return " · ".join([METHODS[one.method].title, *told_checks(one)])


def told_checks(one: Heatmap) -> list[str]:
    """The checks of a map in words, as far as it has them."""
    told = []
    if isinstance(srg := one.checks.get("srg"), int | float):
        random = one.checks.get("random_srg")
        beside = f" (random {round(random, 2) + 0.0:.2f})" if isinstance(random, int | float) else ""
        believed = one.checks.get("believable")
        verdict = "" if believed is None else "beats random maps: " if believed else "does not beat random maps: "
        told.append(f"{verdict}SRG {srg:.2f}{beside}")
    return told


class _Sheet:
    """A figure on which everything is placed in inches from the upper left corner."""

    def __init__(self, width: float, height: float):
        self.width, self.height = width, height
        self.figure = Figure(figsize=(width, height), dpi=_DPI, facecolor="white")

    def picture(self, left: float, top: float, width: float, pixels: np.ndarray) -> float:
        """Place a picture and return its height. Very tall ones are narrower."""
        tall = width * pixels.shape[0] / pixels.shape[1]
        if tall > 2.5 * width:
            tall, width = 2.5 * width, 2.5 * width * pixels.shape[1] / pixels.shape[0]
        self._axes(left, top, width, tall).imshow(pixels, interpolation="lanczos", aspect="auto")
        return tall

    def text(
        self, left: float, top: float, text: str, points: float, colour: str = _INK, weight: str = "normal"
    ) -> None:
        self.figure.text(
            left / self.width, 1 - top / self.height, text, fontsize=points, color=colour, fontfamily=_FONT,
            fontweight=weight, va="top", parse_math=False,
        )  # fmt: skip

    def colour_bar(self, left: float, top: float, tall: float, one: Heatmap) -> None:
        """What the colours say, with the values at the ends and in words."""
        low, high = _limits(one)
        axes = self._axes(left, top + 0.16, 0.12, tall - 0.32)
        ramp = colormaps[_colours(one)](np.linspace(1, 0, 256), bytes=True)[:, None, :3]
        axes.imshow(ramp, aspect="auto", interpolation="nearest")
        words = (one.label, one.against) if one.against else ("for", "against") if low < 0 else ("more", "less")
        self.text(left, top, _fit(words[0], _BAR + 0.1, 7), 7, _MUTED)
        self.text(left, top + tall - 0.12, _fit(words[1], _BAR + 0.1, 7), 7, _MUTED)
        ends = [(0.16, high), (tall - 0.28, low)] + ([(tall / 2 - 0.05, 0.0)] if low < 0 else [])
        for down, value in ends:
            self.text(left + 0.16, top + down, f"{value:.2g}", 7, _INK)

    def _axes(self, left: float, top: float, width: float, tall: float) -> Axes:
        axes = self.figure.add_axes(
            (left / self.width, 1 - (top + tall) / self.height, width / self.width, tall / self.height)
        )
        axes.set_axis_off()
        return axes


def _fit(text: str, inches: float, points: float) -> str:
    """A text that may be anything, in one line that is not wider: cut in the middle, where names are alike least."""
    text = "".join(c if c.isprintable() else "�" for c in text)
    most = max(6, int(inches * 72 / (points * 0.56)))
    return text if len(text) <= most else f"{text[: most - most // 2 - 1]}…{text[-(most // 2) :]}"


def _write(figure: Figure, path: Path) -> Path:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # names in letters that the font lacks are drawn as boxes
        data = _svg(figure) if path.suffix.lower() == ".svg" else _png(figure)
    return _put(path, data)


def _put(path: Path, data: bytes) -> Path:
    with replacing(path) as temporary:
        temporary.write_bytes(data)
    return path


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def _svg(figure: Figure) -> bytes:
    buffer = io.StringIO()
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    # matplotlib salts its ids at random; numbered in order they are the same every time.
    ids = {name: f"v{i}" for i, name in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]*)"', text)))}
    text = re.sub(r'\bid="([^"]*)"', lambda m: f'id="{ids[m[1]]}"', text)
    text = re.sub(r'href="#([^"]*)"', lambda m: f'href="#{ids[m[1]]}"', text)
    return re.sub(r"url\(#([^)]*)\)", lambda m: f"url(#{ids[m[1]]})", text).encode()
