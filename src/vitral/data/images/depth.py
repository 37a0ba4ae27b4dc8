"""Values of images with more than 8 bits, and the grays that are left of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from vitral.data.dataset import DataSet, Split
from vitral.data.images.decode import deep_values
from vitral.data.images.levels import FRACTIONS, LEVELS, UNSURE, Levels, Limits, check_levels, float_levels, scaled
from vitral.errors import DataError, ImageError
from vitral.wording import count

_SAMPLED, _FEW = 64, 4
_FEWEST_GRAYS = 32
"""Images whose brightest value is a darker gray than this are not trained on unasked, and no range of whole bits that
keeps fewer grays is proposed."""
_OVERSHOOT = 0.25
"""Values of 0 to 1 that resampling moved this far outside are proposed as such."""
_RANGES = (1023, 4095, 16383, LEVELS[1])
"""Largest values of 10, 12, 14 and 16 bits."""


@dataclass(frozen=True, eq=False)
class Depth:
    """Values of a sample of images with more than 8 bits."""

    values: np.ndarray
    """Distinct integers, ascending; may be empty."""
    floats: tuple[float, float] | None = None
    """The smallest and the largest float; None without floats."""

    @classmethod
    def of(cls, images: Iterable[np.ndarray | None]) -> Depth | None:
        """Combine the `distinct_values` of images; None if none has more than 8 bits."""
        deep = [values for values in images if values is not None]
        if not deep:
            return None
        floats = [(float(values[0]), float(values[-1])) for values in deep if values.dtype.kind == "f"]
        whole = [values for values in deep if values.dtype.kind != "f"]
        limits = (min(low for low, _ in floats), max(high for _, high in floats)) if floats else None
        return cls(np.unique(np.concatenate([np.empty(0, np.int64), *whole])), limits)

    @property
    def range(self) -> Levels:
        """The smallest and the largest integer."""
        return int(self.values[0]), int(self.values[-1])

    def levels_of_floats(self, source: str) -> Levels | None:
        """Levels of a set of floats, 0 to 1 or 0 to 255; None without floats.

        Raises `DataError` for floats of neither range, and for a set that has integers of more than 8 bits, too.
        """
        if self.floats is None:
            return None
        low, high = self.floats
        what = f"floats from {low:.4g} to {high:.4g}"
        if len(self.values):
            why = f"other images have integers up to {self.range[1]:,}, and a set has one scale"
            raise DataError(f"{what} beside integers", where=source, why=why, hint="--levels BLACK WHITE")
        try:
            return float_levels(Limits(low, high))
        except ValueError as error:
            overshoot = low >= -_OVERSHOOT and high <= 1 + _OVERSHOOT
            levels = "0 1" if overshoot else f"{math.floor(low)} {math.ceil(high)}"
            hint = f"--levels {levels}, or values from before standardization"
            raise DataError(what, where=source, why=UNSURE, hint=hint) from error

    def grays(self, levels: Levels | None) -> int:
        """Count the grays, of 256, that these values become."""
        return len(np.unique(scaled(self.values, levels or LEVELS)))

    @property
    def proposal(self) -> Levels:
        """Levels for these values: those of 10, 12, 14 or 16 bits, or their own range if that leaves few grays."""
        low, high = self.range
        whole = 0, next((most for most in _RANGES if high <= most), high)
        return whole if low == high or (low >= 0 and self.grays(whole) >= _FEWEST_GRAYS) else (low, high)

    def note(self, levels: Levels | None) -> str:
        """Describe what 8 bits keep."""
        if not len(self.values):
            low, high = self.floats or (0.0, 0.0)
            black, white = levels or FRACTIONS
            return f"floats from {low:.4g} to {high:.4g}: {black:,} is black, {white:,} white, for all images"
        (low, high), (black, white) = self.range, levels or LEVELS
        grays = self.grays(levels)
        note = (
            f"16 bits are scaled to 8: values {low:,} to {high:,} of {black:,} to {white:,} are {count(grays, 'gray')}"
        )
        if low < black or high > white:
            return f"{note}; values outside are black or white"
        if levels is None and self.grays(self.proposal) > 1.5 * grays:
            return f"{note}; {self._hint}"
        return note

    def survey(self, levels: Levels | None, source: str) -> tuple[Levels | None, tuple[str, ...]]:
        """Return the levels of a set, by default those of floats, and a note: of what 8 bits keep, or on levels that
        must be stated.
        """
        try:
            levels = levels or self.levels_of_floats(source)
        except DataError as error:
            return None, (f"{error.what}: {error.why}; {error.hint}",)
        return levels, (self.note(levels),)

    @property
    def _hint(self) -> str:
        black, white = self.proposal
        return f"--levels {black} {white} keeps {self.grays(self.proposal)}"

    def check(self, levels: Levels | None, source: str) -> None:
        """Raise `DataError` if 8 bits keep almost nothing, as of 12-bit values in 16 bits, and no levels are stated."""
        if levels is None and int(scaled(self.values[-1:], LEVELS)[0]) + 1 < _FEWEST_GRAYS:
            what = f"16-bit images of which 8 bits keep {count(self.grays(None), 'gray')}"
            why = f"values reach {self.range[1]:,} of {LEVELS[1]:,}, and images are computed in 8 bits"
            raise DataError(what, where=source, why=why, hint=f"{self._hint}; for windows examples/medical.py")


def depth_of(split: Split) -> Depth | None:
    """Return the values of up to 64 evenly spaced images, those that have more than 8 bits; None if none has."""
    return Depth.of(_sampled(split, _SAMPLED))


def _sampled(split: Split, count: int) -> Iterator[np.ndarray | None]:
    for index in np.linspace(0, len(split) - 1, min(len(split), count)).astype(int):
        with contextlib.suppress(ImageError):  # another step reports it
            yield distinct_values(split.raw(int(index)))


def leveled(dataset: DataSet, levels: Levels | None = None) -> DataSet:
    """Give all images these levels, and by default those of floats to a set of floats: an image alone may be darker.

    Raises `DataError` for floats of neither range, and for floats beside integers of more than 8 bits, `UsageError`
    for levels that are none.
    """
    check_levels(levels)
    first = next(iter(dataset.splits.values()))
    few = Depth.of(_sampled(first, _FEW)) if levels is None and first.levels is None else None
    if few and few.floats and (depth := depth_of(first)):
        levels = depth.levels_of_floats(dataset.source)
    splits = {name: split.with_levels(levels) for name, split in dataset.splits.items()}
    return dataset if levels is None else replace(dataset, splits=splits)


def distinct_values(image: bytes | np.ndarray) -> np.ndarray | None:
    """Return the distinct integers of an image with more than 8 bits, or the limits of floats, ascending; None for any
    other. `ImageError` if unreadable.
    """
    values = deep_values(image)
    if values is None or values.dtype.kind != "f":
        return None if values is None else np.unique(values)
    finite = values[np.isfinite(values)]
    return np.array([finite.min(), finite.max()], np.float64) if finite.size else None
