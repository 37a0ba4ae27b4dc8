"""Statistics over seeds: intervals of a mean, and differences of recipes whose runs are paired by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

from vitral.studies.paired import LEVEL


@dataclass(frozen=True)
class Mean:
    """A mean over seeds, with Student's 95% interval; (value, value) for a single seed."""

    value: float
    interval: tuple[float, float]
    seeds: int


def mean_of(values: Sequence[float], least: float = 0.0) -> Mean:
    """Return the mean of at least one value with its interval; `least` is the smallest deviation assumed."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Mean(mean, (mean, mean), n)
    half = float(stats.t.ppf(0.975, n - 1)) * max(statistics.stdev(values), least) / math.sqrt(n)
    return Mean(mean, (mean - half, mean + half), n)


@dataclass(frozen=True)
class SeedDifference:
    """Accuracy of a first recipe minus that of a second, over pairs of runs of the same seed."""

    where: str
    """The condition under which they are compared, such as "10% of the images"."""
    first: str
    second: str
    difference: float
    interval: tuple[float, float]
    """Student's 95% interval of the paired differences."""
    pairs: int
    p_value: float
    """Two-sided paired t-test; 1 for a single seed, from which nothing can be claimed."""
    p_adjusted: float = 1.0
    """Holm's correction over all differences of the study."""

    @property
    def claimed(self) -> bool:
        """True if a difference can be claimed at a family-wise error rate of 5%."""
        return self.pairs > 1 and self.p_adjusted < LEVEL


def paired_difference(
    where: str, first: str, second: str, a: Sequence[float], b: Sequence[float], groups: int, *, claims: bool = True
) -> SeedDifference:
    """Compare accuracies of two recipes, pair by pair. `groups` is the number of held-out images, or of groups of
    them that belong together. Without `claims` the p-value is 1: pairs of a single seed do not show the effect of
    chance.

    The deviation of the differences is taken as one group at least: few seeds can agree by chance on a coarse scale,
    and would then claim any difference.
    """
    each = [x - y for x, y in zip(a, b, strict=True)]
    mean, n = statistics.fmean(each), len(each)
    if n < 2 or not claims:
        return SeedDifference(where, first, second, mean, (mean, mean), n, 1.0)
    error = max(statistics.stdev(each), 1 / max(groups, 1)) / math.sqrt(n)
    half = float(stats.t.ppf(0.975, n - 1)) * error
    p = float(2 * stats.t.sf(abs(mean) / error, n - 1))
    return SeedDifference(where, first, second, mean, (mean - half, mean + half), n, p)
