"""Intervals of rates and means: 95%, of images that are independent or in groups.

    proportion_interval(right, groups)     the only interval of a fraction of images
    mean_interval(values, groups)          of a mean, by Student's t
    expected_right(rate, trials)           how many of ten new images will be right
    design_effect(values, groups)          by how much groups multiply the variance of a mean

Copies, rows of one file, frames of a video and photographs of one patient say less than as many independent images.
The variance of a mean over G groups of n_g images, n in all, is the variance for independent images times the design
effect (Kish 1965, "Survey Sampling"). It is 1 if images of a group are no more alike than others, and at most m = Σ
n_g² / n, if they are all the same. Wilson's interval of n / design effect images then holds the truth as often as it
states (Korn and Graubard 1998, "Confidence Intervals for Proportions with Small Expected Number of Positive Counts
Estimated from Survey Data"; compared with others by Dean and Pagano 2015, "Evaluating Confidence Interval Methods for
Binomial Proportions in Clustered Surveys"). `python -m benchmarks intervals` measures how often.

There are two estimates of the design effect, of which the larger one counts. v is the variance of a value:

    1 + ρ (m - 1)       with the likeness ρ = 1 - W / ((n - G) v) of images of a group (Fleiss and Cuzick 1979, "The
                        Reliability of Dichotomous Judgments: Unequal Numbers of Judges per Subject"); W is the sum of
                        the squared deviations from the means of the groups
    G / (G - 1) · Σ n_g² (x_g - x)² / (n v)
                        the linearized variance (Cochran 1977, "Sampling Techniques", equation 11.30), which also holds
                        where large groups are harder than small ones
"""

from __future__ import annotations

import math

import numpy as np

Z95 = 1.959963984540054  # the 97.5 % point of the normal distribution
Interval = tuple[float, float]
Groups = np.ndarray | None
"""(n,) integers, equal for images that belong together; None if every image is a group of its own."""


def proportion_interval(right: np.ndarray, groups: Groups = None) -> Interval:
    """Return the 95% interval of the fraction of `right`, (n,) booleans, of at least one image.

    Without groups it is Wilson's interval (1927). Images of a single group do not show how groups differ: of their
    share nothing is known, and the interval is 0 to 1.
    """
    right = np.asarray(right, np.float64)
    count = len(right)
    if (number := count_groups(groups, count)) == count:
        return wilson_interval(float(right.sum()), count)
    if number == 1:
        return 0.0, 1.0
    share = (right.sum() + 0.5) / (count + 1)  # if all are right, a variance of 0 would hide how alike groups are
    trials = count / design_effect(right, groups, share * (1 - share))
    return wilson_interval(float(right.mean()) * trials, trials)


def wilson_interval(successes: float, trials: float, z: float = Z95) -> Interval:
    """Return Wilson's interval of so many independent trials; unlike p ± zσ it is valid for few, and near 0 and 1."""
    rate, z2 = successes / trials, z**2
    center = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    half = z / (1 + z2 / trials) * math.sqrt(max(0.0, rate * (1 - rate)) / trials + z2 / (4 * trials**2))
    # At the ends the bounds are exactly 0 and 1, without rounding errors.
    low = 0.0 if successes == 0 else max(0.0, center - half)
    high = 1.0 if successes == trials else min(1.0, center + half)
    return low, high


def expected_right(rate: float, trials: int, new: int = 10, share: float = 0.8) -> tuple[int, int]:
    """Return the least and the most of `new` images that a classifier of this measured rate will classify correctly.

    The central numbers whose probability is at least `share`, by the beta-binomial distribution that follows from
    Jeffreys' prior and `trials` independent images.
    """
    a, b = rate * trials + 0.5, (1 - rate) * trials + 0.5

    def log_beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    chance = [
        math.comb(new, right) * math.exp(log_beta(right + a, new - right + b) - log_beta(a, b))
        for right in range(new + 1)
    ]
    below = np.cumsum(chance)
    tail = (1 - share) / 2
    return int(np.searchsorted(below, tail, side="right")), int(np.searchsorted(below, 1 - tail))


def mean_interval(values: np.ndarray, groups: Groups = None) -> Interval:
    """Return the 95% interval of the mean of values (n,) by Student's t, with a degree of freedom less than groups.

    Both ends are the mean for a single group.
    """
    from scipy.stats import t  # takes a moment to import

    count, mean = len(values), float(np.mean(values))
    if (number := count_groups(groups, count)) < 2:
        return mean, mean
    variance = float(np.var(values)) * number / (number - 1)
    half = float(t.ppf(0.975, number - 1)) * math.sqrt(variance * design_effect(values, groups) / count)
    return mean - half, mean + half


def design_effect(values: np.ndarray, groups: Groups, variance: float | None = None) -> float:
    """Return the factor by which groups multiply the variance of the mean of `values` (n,): from 1 to m.

    `variance` belongs to a single value, and is measured by default. A variance of 0 does not show how alike the images
    of
    a group are; the factor is then m, as if they were all the same.
    """
    values, count = np.asarray(values, np.float64), len(values)
    number = count_groups(groups, count)
    if groups is None or number == count:
        return 1.0
    _, place, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    most = float((sizes.astype(np.float64) ** 2).sum()) / count
    measured = float(np.var(values))
    if number == 1 or measured <= 0:
        return most
    sums = np.bincount(place, values)
    within = float(np.square(values - (sums / sizes)[place]).sum())
    alike = 1 - within / ((count - number) * (measured if variance is None else variance))
    linearized = number / (number - 1) * float(np.square(sums - sizes * values.mean()).sum()) / (count * measured)
    return min(max(1.0, 1 + alike * (most - 1), linearized), most)


def count_groups(groups: Groups, count: int) -> int:
    """Return the number of groups of `count` images: as many if there are no groups."""
    return count if groups is None else len(np.unique(groups))
