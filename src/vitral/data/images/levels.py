"""Scales of pixel values: which values are black and white, and their conversion to uint8.

`float_levels` is the one rule for floats: of arrays, tensors, PIL images, TIFF files and whole sets (docs/data.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from vitral.errors import UsageError

Levels = tuple[int, int]
"""Values that are black and white."""
LEVELS = (0, 65535)
"""Those of 16 bits, unless others are stated."""
FRACTIONS, BYTES = (0, 1), (0, 255)
"""Those of floats: one of the two for a set, unless others are stated."""
UNSURE = "which are not surely 0 to 1 or 0 to 255"
_ROUNDING = 1e-3
_DARKEST = 32
"""Floats of 0 to 255 whose brightest is darker may be on another scale, such as standardized ones."""
_DARKEST_BELOW_ZERO = 128
"""The same for an image with negative values, of which resampling makes few, and standardization many."""
_SMALL = 16
"""Floats that are all this near to 0 may be fractions, or standardized, where levels count more steps."""


def check_levels(levels: object) -> None:
    """Raise `UsageError` unless these are levels, or None."""
    whole = isinstance(levels, tuple) and len(levels) == 2 and all(type(n) is int and abs(n) < 2**31 for n in levels)
    if levels is not None and not (whole and levels[0] < levels[1]):  # type: ignore[index]  # a tuple
        raise UsageError(f"levels {levels} are not two whole numbers, black below white")


class Limits(NamedTuple):
    """The least and the greatest value of an image or a set."""

    low: float
    high: float
    whole: bool = False
    """True if all are whole numbers."""

    @classmethod
    def of(cls, parts: Iterable[np.ndarray]) -> Limits:
        """Limits of the finite values of all parts; `ValueError` for floats without a finite value."""
        found = [limits for part in parts if (limits := _finite_limits(part)) is not None]
        if not found:
            raise ValueError("floats without a finite value")
        return cls(min(n.low for n in found), max(n.high for n in found), all(n.whole for n in found))


def _finite_limits(values: np.ndarray) -> Limits | None:
    finite = values[np.isfinite(values)] if values.dtype.kind == "f" else values
    if not finite.size:
        return None
    whole = values.dtype.kind != "f" or bool((finite == np.rint(finite)).all())
    return Limits(float(finite.min()), float(finite.max()), whole)


def float_levels(limits: Limits, known: Levels | None = None) -> Levels:
    """Levels of floats with these limits. `known`: those of their set, of the network or of the user.

    Without known levels, floats are 0 to 1, or 0 to 255 if the brightest is at least 32, or 128 beside negative values.
    With them, resampling may have moved values somewhat outside, and an image may be dark.

    Raises `ValueError` for other floats, of which it is not sure what is black and white.
    """
    low, high, whole = limits
    what = f"floats from {low:.4g} to {high:.4g}"
    if known is None:
        if low >= -_ROUNDING and high <= 1 + _ROUNDING:
            return FRACTIONS
        if high >= (_DARKEST_BELOW_ZERO if low < 0 else _DARKEST) and _fits(limits, BYTES):
            return BYTES
        raise ValueError(f"{what}, {UNSURE}: take them before standardization, pass uint8, or add --levels")
    black, white = known
    if known in (FRACTIONS, BYTES) and not _fits(limits, known):
        raise ValueError(f"values from {low:g} to {high:g} in a set of {black} to {white}; add --levels")
    if known == BYTES and low < -_ROUNDING and high < _DARKEST:
        raise ValueError(f"{what} in a set of {black} to {white}: a dark image has no negative values")
    small = min(_SMALL, (white - black) / 16)  # of fewer than 32 steps, fractions may be meant
    other_scale = _fits(limits, FRACTIONS) or (max(-low, high) <= small and not whole)
    if known != BYTES and white - black > 32 and low < high and other_scale:
        why = f"{what} where {black:,} is black and {white:,} white"
        raise ValueError(f"{why}: keep the values as they were stored")
    return known


def _fits(limits: Limits, levels: Levels) -> bool:
    """True with a margin, since resampling overshoots."""
    low, high = (-0.5, 1.5) if levels == FRACTIONS else (-45, 300)
    return low <= limits.low and limits.high <= high


def array_levels(limits: Limits, known: Levels | None) -> Levels | None:
    """Levels of floats that a program passes in an array, with these limits; `known` is that of the network.

    A program may compute on any scale. So where a network knows floats of 0 to 1 or 0 to 255, an array must surely be
    of the same. Raises `ValueError` otherwise.
    """
    if known not in (None, FRACTIONS, BYTES):
        return known  # checked by `to_uint8`
    found = float_levels(limits)
    if known in (None, found) or limits.low == limits.high == 0:
        return known or found
    names = {FRACTIONS: "0 to 1", BYTES: "0 to 255"}
    why = f"floats from {limits.low:.4g} to {limits.high:.4g} are read as {names[found]}"
    raise ValueError(f"{why}, and the network was trained on floats of {names[known]}: pass uint8")


def integer_levels(limits: Limits, known: Levels | None) -> Levels:
    """Levels of gray integers of 16 bits; `ValueError` if they are outside those of a set of floats."""
    if known == BYTES and not _fits(limits, known):
        raise ValueError(f"values from {limits.low:g} to {limits.high:g} in a set of 0 to 255; add --levels")
    return LEVELS if known in (None, FRACTIONS) else known


def file_levels(limits: Limits, known: Levels | None, states_white: bool) -> Levels:
    """Levels of a file's 32-bit integers; `ValueError` if they are ambiguous. `states_white`: the file has a maximum,
    by which they were scaled to 16 bits.
    """
    if known is None and not states_white and (limits.low < 0 or limits.high > 65535 or 0 < limits.high <= 255):
        why = f"32-bit integers from {limits.low:g} to {limits.high:g} state no range"
        raise ValueError(f"{why}: add --levels, or save as 8 or 16 bits")
    return integer_levels(limits, known)


def to_uint8(values: np.ndarray, levels: Levels | None = None) -> np.ndarray:
    """An array as uint8: bool, 8 and 16 bits by their type, other integers as 0..255, floats as `float_levels` has it.
    With `levels`, floats and integers of 16 bits and more are black at the first and white at the second.

    `ValueError` for values outside these ranges. A scale taken from each image's own limits would differ between
    images of one set.
    """
    if values.dtype == np.uint8:
        return values
    if values.dtype == np.bool_:
        return values.astype(np.uint8) * 255
    kind, width = values.dtype.kind, values.dtype.itemsize
    if kind not in "iuf":
        raise ValueError(f"values of type {values.dtype} are not an image")
    limits = Limits.of([values])
    if kind == "f":
        return scaled(values, float_levels(limits, levels))
    if width > 1 and (levels not in (None, FRACTIONS) or (kind, width) == ("u", 2)):
        return scaled(values, integer_levels(limits, levels))
    if limits.low < 0 or limits.high > 255:
        why = f"integers from {limits.low:g} to {limits.high:g}: 8 bits have 0 to 255"
        raise ValueError(f"{why}; for 16 bits pass an array of uint16")
    return values.astype(np.uint8)


def scaled(values: np.ndarray, levels: Levels) -> np.ndarray:
    """Floats or integers from black to white as 0..255, the nearest; what is outside is black or white, and so is what
    is not finite: black.
    """
    black, white = levels
    if values.dtype.kind == "f":
        finite = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
        return np.rint((finite - black) * 255 / (white - black)).clip(0, 255).astype(np.uint8)
    if values.dtype == np.uint64:
        values = np.minimum(values, np.uint64(2**62))  # int64 has half its range
    fits = values.dtype.itemsize <= 2 and abs(black) + abs(white) < 2**23  # products of 255 in 32 bits: half the memory
    steps = values.astype(np.int32 if fits else np.int64).clip(black, white) - black
    return ((steps * 255 + (white - black) // 2) // (white - black)).astype(np.uint8)
