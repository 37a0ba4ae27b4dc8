"""Paired statistics: two classifiers on the same images.

Images on which both are right, or both wrong, do not show which is better. What is left are b, on which only the
first is right, and c, on which only the second is. Images of a group are not independent of each other: a group counts
once, by the difference of its two numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitral.evaluation.intervals import Z95, Groups, Interval, design_effect

LEVEL = 0.05
"""The family-wise error rate below which a difference is claimed."""


@dataclass(frozen=True)
class Difference:
    """The accuracy of a first classifier minus that of a second, on the same images."""

    first: str
    second: str
    difference: float
    interval: Interval
    """95% interval of Bonett and Price (2012), "Adjusted Wald Confidence Interval for a Difference of Binomial
    Proportions Based on Paired Data", equation 5; of n / design effect images if they are in groups."""
    only_first: int
    """Images that only the first classifies correctly."""
    only_second: int
    agreement: float
    """Share of images with the same prediction of both, right or wrong."""
    p_value: float
    """Exact two-sided McNemar test, by groups."""
    p_adjusted: float
    """Holm's correction over all pairs that are compared."""

    @property
    def claimed(self) -> bool:
        """True if a difference can be claimed at a family-wise error rate of 5%."""
        return self.p_adjusted < LEVEL


def mcnemar(differences: np.ndarray) -> float:
    """Return the exact two-sided p-value of differences (G,), b - c of every group, an image alone or several.

    Of equally good classifiers either one may be the first, group by group: the sum is compared with the sums under all
    choices of the signs (Fisher's randomization test). For groups of one image this is McNemar's exact test.
    """
    sizes = np.abs(differences)
    ones, larger = int((sizes == 1).sum()), np.sort(sizes[sizes > 1])
    share = np.array([math.exp(_log_choose(ones, k) - ones * math.log(2)) for k in range(ones + 1)])
    for size in larger.tolist():  # share[k]: probability that the first wins k images
        share = (np.pad(share, (0, size)) + np.pad(share, (size, 0))) / 2
    fewer = min(int(sizes[differences > 0].sum()), int(sizes[differences < 0].sum()))
    return min(1.0, 2 * math.fsum(share[: fewer + 1]))


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def paired_interval(differences: np.ndarray, groups: Groups = None) -> Interval:
    """Return the 95% interval of the mean of differences (n,): 1 if only the first is right, -1 if only the second."""
    count, b, c = len(differences), int((differences > 0).sum()), int((differences < 0).sum())
    p, q = (b + 0.5) / (count + 1), (c + 0.5) / (count + 1)
    effect = design_effect(differences, groups, p + q - (p - q) ** 2)
    n = count / effect
    p, q = (b / effect + 1) / (n + 2), (c / effect + 1) / (n + 2)
    half = Z95 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    return max(-1.0, p - q - half), min(1.0, p - q + half)


def sums_of(differences: np.ndarray, groups: Groups) -> np.ndarray:
    """Return the sum of the differences (n,) of every group."""
    if groups is None:
        return differences
    place = np.unique(groups, return_inverse=True)[1]
    sums = np.zeros(int(place.max()) + 1, np.int64)
    np.add.at(sums, place, differences)
    return sums


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm 1979), valid however they depend on each other."""
    order = np.argsort(p_values, kind="stable")
    adjusted, largest = [0.0] * len(p_values), 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        adjusted[index] = largest
    return adjusted
