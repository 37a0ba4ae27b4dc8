"""Separate images of unknown classes from images of known classes by a score: AUROC with its interval, and a threshold.

auroc_interval(auroc, m, n)        Newcombe 2006, "Confidence intervals for an effect size measure based on the
                                   Mann–Whitney statistic", part 2, method 5

Images in groups count as fewer by the design effect of their placements, the fraction of the other images that have a
lower score (Obuchowski 1997, "Nonparametric Analysis of Clustered ROC Curve Data").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from vitral.evaluation.intervals import Z95, Groups, design_effect


@dataclass(frozen=True)
class Separation:
    """Separation of unknown images, whose score is higher, from known ones by one score."""

    auroc: float
    """Probability that an unknown image has a higher score than a known one; ties count half."""
    auroc_interval: tuple[float, float]
    """95% interval."""
    threshold: float | None = None
    """Images with a higher score are unknown; None without validation images to choose it on."""
    unknown_found: float | None = None
    """Share of the unknown images above the threshold."""
    known_kept: float | None = None
    """Share of the known images up to the threshold."""

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {**vars(self), "auroc_interval": list(self.auroc_interval)}


def separate(
    known: np.ndarray, unknown: np.ndarray, threshold: float | None = None, groups: tuple[Groups, Groups] = (None, None)
) -> Separation:
    """Measure how well the scores of known (m,) and unknown (n,) images differ, and the shares at a threshold.

    `groups` (m,) and (n,) are equal for images that belong together.
    """
    from sklearn.metrics import roc_auc_score  # takes a moment to import

    truth = np.repeat([0, 1], [len(known), len(unknown)])
    auroc = float(roc_auc_score(truth, np.concatenate([known, unknown])))
    effect = design_effect(placements(known, unknown), groups[0])
    other = design_effect(placements(unknown, known), groups[1])
    interval = auroc_interval(auroc, len(known) / effect, len(unknown) / other)
    if threshold is None:
        return Separation(auroc, interval)
    found, kept = float((unknown > threshold).mean()), float((known <= threshold).mean())
    return Separation(auroc, interval, threshold, found, kept)


def placements(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Share of the others below each score, of which equal ones count half."""
    ranked = np.sort(others)
    below, up_to = (np.searchsorted(ranked, scores, side) for side in ("left", "right"))
    return (below + up_to) / (2 * len(others))


def auroc_interval(auroc: float, known: float, unknown: float) -> tuple[float, float]:
    """Return the 95% interval of an AUROC from these numbers of independent images.

    Like Wilson's interval of a rate it takes the variance at the ends of the interval, so it is also valid near 1.
    """
    from scipy.optimize import brentq  # takes a moment to import

    half = (known + unknown) / 2 - 1

    def spread(value: float) -> float:
        pairs = 1 + half * ((1 - value) / (2 - value) + value / (1 + value))
        return Z95 * math.sqrt(value * (1 - value) * pairs / (known * unknown))

    end = 1e-9  # at 0 and 1 the variance is 0, which solves both equations
    low = brentq(lambda value: value + spread(value) - auroc, 0, min(auroc, 1 - end)) if auroc > 0 else 0.0
    high = brentq(lambda value: value - spread(value) - auroc, max(auroc, end), 1) if auroc < 1 else 1.0
    return float(low), float(high)


def threshold_of(scores: np.ndarray, share: float) -> float:
    """Return the lowest of these scores that keeps at least `share` of the images up to it."""
    return float(np.quantile(scores, share, method="inverted_cdf"))
