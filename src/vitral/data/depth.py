"""Values of images with more than 8 bits, and the grays that are left of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from vitral.data.dataset import Split
from vitral.data.decode import deep_values
from vitral.data.pixels import LEVELS, Levels, scaled_integers
from vitral.errors import DataError, ImageError

_SAMPLED = 64
_FEWEST_GRAYS = 32
"""Images whose brightest value is a darker gray than this are not trained on unasked, and no range of whole bits that
keeps fewer grays is proposed."""
_RANGES = (1023, 4095, 16383, LEVELS[1])
"""Largest values of 10, 12, 14 and 16 bits."""


@dataclass(frozen=True, eq=False)
class Depth:
    """Values of a sample of images with more than 8 bits."""

    values: np.ndarray
    """Distinct ones, ascending."""

    @classmethod
    def of(cls, images: Iterable[np.ndarray | None]) -> Depth | None:
        """Combine the `distinct_values` of images; None if none has more than 8 bits."""
        deep = [values for values in images if values is not None]
        return cls(np.unique(np.concatenate(deep))) if deep else None

    @property
    def range(self) -> Levels:
        """The smallest and the largest value."""
        return int(self.values[0]), int(self.values[-1])

    def grays(self, levels: Levels | None) -> int:
        """Count the grays, of 256, that these values become."""
        return len(np.unique(scaled_integers(self.values, levels or LEVELS)))

    @property
    def proposal(self) -> Levels:
        """Levels for these values: those of 10, 12, 14 or 16 bits, or their own range if that leaves few grays."""
        low, high = self.range
        whole = 0, next((most for most in _RANGES if high <= most), high)
        return whole if low == high or (low >= 0 and self.grays(whole) >= _FEWEST_GRAYS) else (low, high)

    def note(self, levels: Levels | None) -> str:
        """Describe what 8 bits keep."""
        (low, high), (black, white) = self.range, levels or LEVELS
        grays = self.grays(levels)
        note = f"16 bits are scaled to 8: values {low:,} to {high:,} of {black:,} to {white:,} are {_counted(grays)}"
        if low < black or high > white:
            return f"{note}; values outside are black or white"
        if levels is None and self.grays(self.proposal) > 1.5 * grays:
            return f"{note}; {self._hint}"
        return note

    @property
    def _hint(self) -> str:
        black, white = self.proposal
        return f"--levels {black} {white} keeps {self.grays(self.proposal)}"

    def check(self, levels: Levels | None, source: str) -> None:
        """Raise `DataError` if 8 bits keep almost nothing, as of 12-bit values in 16 bits, and no levels are stated."""
        if levels is None and scaled_integers(self.values[-1:], LEVELS)[0] + 1 < _FEWEST_GRAYS:
            what = f"16-bit images of which 8 bits keep {_counted(self.grays(None))}"
            why = f"values reach {self.range[1]:,} of {LEVELS[1]:,}, and images are computed in 8 bits"
            raise DataError(what, where=source, why=why, hint=f"{self._hint}; for windows examples/medical.py")


def depth_of(split: Split) -> Depth | None:
    """Return the values of up to 64 evenly spaced images, those that have more than 8 bits; None if none has."""
    found = []
    for index in np.linspace(0, len(split) - 1, min(len(split), _SAMPLED)).astype(int):
        with contextlib.suppress(ImageError):  # another step reports it
            found.append(distinct_values(split.raw(int(index))))
    return Depth.of(found)


def distinct_values(image: bytes | np.ndarray) -> np.ndarray | None:
    """Return the distinct values of an image with more than 8 bits; None for any other. `ImageError` if unreadable."""
    values = deep_values(image)
    return None if values is None else np.unique(values)


def _counted(grays: int) -> str:
    return f"{grays} gray{'s' * (grays > 1)}"
