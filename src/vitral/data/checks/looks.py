"""Images that look unlike the others of a set: blurred, of one color, text among photographs, far larger or smaller.

    look(pixels) -> Look                                the measures of one image
    unusual(places, looks, sizes) -> list[Found]        the images that are far from the set's own values

Each limit has two parts, and an image must be beyond both: an absolute one, below which nobody would object, and one in
robust standard deviations (median and median absolute deviation) of the set. docs/log/checks.md has how many planted
images they find in ten sets, and how many others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image

from vitral.data.checks.findings import Found, Place

SIDE = 256
"""Longer side in pixels of the view that is measured; smaller images are measured as they are."""
LEAST_SIDE = 64
"""Shorter side of an image below which blur is not judged: a digit has wide edges at any sharpness."""
ONE_COLOR = 12
"""Range of levels, of 255, within which an image counts as one color. Noise and compression have smaller ones."""
BLURRED = 6.0
"""Width of the sharpest edges, in pixels of the view, from which an image may be called blurred."""
FLAT, STEEP = 2.0, 32.0
"""Steps of gray between neighboring pixels, of 255: at most FLAT in an area of one color, above STEEP at an edge."""
ONE_TONE, LEVEL, SHARP = 0.2, 0.5, 0.5
"""Limits of text and screenshots: the share of the most frequent color, the share of flat steps, and the share of steep
steps among those that are steep or slight (up to 16). A photograph has many slight steps."""
MOST_GRAPHICS = 0.1
"""Share of text and screenshots in a set, above which they belong to it."""
RATIO = 4.0
"""Ratio of an image's side to the median side, from which its size may be called unusual."""
DEVIATIONS = 4.0
"""Robust standard deviations of the logarithm, from which a value is far from the set's own."""
_LEAST_DEVIATION = 0.1  # of a logarithm: sets of one camera vary less, and their outliers are no faults
_FEWEST = 12  # images from which the set has values of its own


class Look(NamedTuple):
    """Measures of one image."""

    spread: float
    """Range of levels, from the 0.5th to the 99.5th percentile, of the channel with the widest one."""
    edge: float
    """Width of the sharpest edges in pixels: the range of gray divided by its steepest slopes. NaN if not judged."""
    graphic: float
    """Share of the most frequent color in an image that is mostly text or a screenshot; otherwise 0."""


def look(pixels: np.ndarray) -> Look:
    """Measure an image, uint8 (H, W, C)."""
    height, width, channels = pixels.shape
    image = Image.fromarray(pixels[:, :, 0] if channels == 1 else pixels)
    if (factor := max(height, width) / SIDE) > 1:
        size = max(1, round(width / factor)), max(1, round(height / factor))
        image = image.resize(size, Image.Resampling.BOX, reducing_gap=None)
    values = np.asarray(image, np.float32).reshape(image.height, image.width, -1)
    low, high = np.percentile(values[::2, ::2], (0.5, 99.5), axis=(0, 1))
    spread = float((high - low).max())
    if min(height, width) < LEAST_SIDE or spread <= ONE_COLOR:
        return Look(spread, float("nan"), 0.0)
    gray = values.mean(2)
    return Look(spread, edge_width(gray), _graphic(values, gray))


def _graphic(values: np.ndarray, gray: np.ndarray) -> float:
    """Return the share of the most frequent color of text or a screenshot, and 0 for a photograph."""
    steps = np.maximum(np.abs(np.diff(gray, axis=1))[:-1], np.abs(np.diff(gray, axis=0))[:, :-1])
    steep, slight = float((steps > STEEP).mean()), float(((steps > FLAT) & (steps <= 16)).mean())
    if (steps <= FLAT).mean() < LEVEL or steep < SHARP * (steep + slight + 0.01):
        return 0.0
    colors = (values.astype(np.int64) >> 3) @ (32 ** np.arange(values.shape[2]))
    most = float(np.bincount(colors.ravel()).max() / colors.size)
    return most if most >= ONE_TONE else 0.0


def edge_width(gray: np.ndarray) -> float:
    """Return the width of the sharpest edges of a gray image (H, W), in pixels."""
    slopes = np.concatenate([np.abs(np.diff(gray, axis=axis)).ravel() for axis in (0, 1)])
    place = int(0.995 * len(slopes))
    steepest = float(np.partition(slopes, place)[place])
    low, high = np.percentile(gray, (1, 99))
    return float((high - low) / max(steepest, 0.5))


def unusual(places: Sequence[Place], looks: Sequence[Look], sizes: Sequence[tuple[int, int]]) -> list[Found]:
    """Return the images that are far from the others of the set; `sizes` are (height, width) in pixels."""
    found = [
        Found("one-color", place, f"all levels within {one.spread:.0f} of 255")
        for place, one in zip(places, looks, strict=True)
        if one.spread <= ONE_COLOR
    ]
    edges = np.array([one.edge for one in looks])
    middle, z = _robust(np.log(edges))
    for i in np.flatnonzero((edges >= BLURRED) & (z >= DEVIATIONS)).tolist():
        why = f"its sharpest edges are {edges[i]:.0f} pixels wide, {np.exp(middle):.1f} in the median image"
        found.append(Found("blurred", places[i], why))
    for i in _strange_graphics(places, looks):
        why = f"{looks[i].graphic:.0%} of it has one color, and hardly any edge is soft"
        found.append(Found("graphic", places[i], why))
    sides = np.sqrt(np.prod(np.array(sizes, np.float64).reshape(-1, 2), axis=1))
    middle, z = _robust(np.log(sides))
    far = np.abs(np.log(sides) - middle) >= np.log(RATIO)
    for i in np.flatnonzero(far & (np.abs(z) >= DEVIATIONS)).tolist():
        height, width = sizes[i]
        than = "larger" if z[i] > 0 else "smaller"
        ratio = np.exp(abs(np.log(sides[i]) - middle))
        found.append(Found("size", places[i], f"{height} × {width}: {ratio:.0f} times {than} than the median side"))
    return found


def _strange_graphics(places: Sequence[Place], looks: Sequence[Look]) -> list[int]:
    """Return the text and screenshots of a set of photographs, by number; none of a class that consists of them."""
    drawn = [i for i, one in enumerate(looks) if one.graphic]
    if len(looks) < _FEWEST or len(drawn) > max(1, MOST_GRAPHICS * len(looks)):
        return []
    images, graphics = Counter(place.label for place in places), Counter(places[i].label for i in drawn)
    return [i for i in drawn if 2 * graphics[places[i].label] <= images[places[i].label]]


def _robust(values: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the median, and each value's distance from it in robust standard deviations; 0 for few values and NaN."""
    known = values[~np.isnan(values)]
    if len(known) < _FEWEST:
        return 0.0, np.zeros(len(values))
    middle = float(np.median(known))
    deviation = max(1.4826 * float(np.median(np.abs(known - middle))), _LEAST_DEVIATION)
    return middle, np.nan_to_num((values - middle) / deviation)
