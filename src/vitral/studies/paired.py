"""Paired statistics: two classifiers on the same images.

Images on which both are right, or both wrong, do not show which is better. What is left are b, on which only the
first is right, and c, on which only the second is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z95 = 1.959963984540054  # the 97.5 % point of the normal distribution
LEVEL = 0.05
"""The family-wise error rate below which a difference is claimed."""


@dataclass(frozen=True)
class Difference:
    """The accuracy of a first classifier minus that of a second, on the same images."""

    first: str
    second: str
    difference: float
    interval: tuple[float, float]
    """95 % interval of Bonett and Price (2012), "Adjusted Wald Confidence Interval for a Difference of Binomial
    Proportions Based on Paired Data", equation 5."""
    only_first: int
    """Images that only the first classifies correctly."""
    only_second: int
    agreement: float
    """Share of images with the same prediction of both, right or wrong."""
    p_value: float
    """Exact two-sided McNemar test."""
    p_adjusted: float
    """Holm's correction over all pairs that are compared."""

    @property
    def claimed(self) -> bool:
        """True if a difference can be claimed at a family-wise error rate of 5 %."""
        return self.p_adjusted < LEVEL


def mcnemar(b: int, c: int) -> float:
    """Return the exact two-sided p-value of b against c; equally good classifiers share the b + c images."""
    n, fewer = b + c, min(b, c)
    tail = sum(math.exp(_log_choose(n, k) - n * math.log(2)) for k in range(fewer + 1))
    return min(1.0, 2 * tail)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def paired_interval(b: int, c: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of (b − c) / n: on b of n images only the first is right, on c only the second."""
    p, q = (b + 1) / (n + 2), (c + 1) / (n + 2)
    half = _Z95 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return max(-1.0, p - q - half), min(1.0, p - q + half)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm 1979), valid however they depend on each other."""
    order = np.argsort(p_values, kind="stable")
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted
