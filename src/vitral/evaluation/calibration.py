"""Calibration on validation images: a temperature, the scores of conformal sets, and the cuts of sure answers.

fit_temperature(logits, labels) -> float       Guo et al. 2017, "On Calibration of Modern Neural Networks"
conformal_scores(probabilities, labels)        split conformal prediction, Sadinle et al. 2019, "Least Ambiguous
                                               Set-Valued Classifiers with Bounded Error Levels"
cuts_of(probabilities, labels, groups)         selective classification, Geifman and El-Yaniv 2017, "Selective
                                               Classification for Deep Neural Networks"
"""

from __future__ import annotations

import numpy as np

from vitral.evaluation.enough import FOR_A_FIT
from vitral.evaluation.intervals import Groups, count_groups, proportion_interval
from vitral.inference.sure import Cut

LIMITS = (0.05, 20.0)
"""Lowest and highest temperature."""


def fit_temperature(logits: np.ndarray, labels: np.ndarray, groups: int | None = None) -> float:
    """Return the temperature T with the lowest cross-entropy of softmax(logits / T).

    `logits` (n, K), `labels` (n,), and the number of `groups` of images that belong together, by default n. 1 for fewer
    than `FOR_A_FIT` groups, and if all predictions are right or all wrong: no temperature is best then. The loss is
    convex in 1/T, so the minimum is unique.
    """
    from scipy.optimize import minimize_scalar  # takes a moment to import

    right = (logits.argmax(1) == labels).mean()
    if (len(labels) if groups is None else groups) < FOR_A_FIT or right in (0.0, 1.0) or logits.shape[1] < 2:
        return 1.0
    logits = logits.astype(np.float64)
    own = logits[np.arange(len(labels)), labels]

    def loss(inverse: float) -> float:
        scaled = inverse * (logits - logits.max(1, keepdims=True))
        return float((np.log(np.exp(scaled).sum(1)) - inverse * (own - logits.max(1))).mean())

    found = minimize_scalar(loss, bounds=(1 / LIMITS[1], 1 / LIMITS[0]), method="bounded", options={"xatol": 1e-6})
    return float(f"{1 / found.x:.6g}")


def conformal_scores(probabilities: np.ndarray, labels: np.ndarray) -> tuple[float, ...]:
    """Return the scores 1 - p of the labels, ascending, each rounded up: sets become larger by it, never smaller."""
    scores = np.sort(1 - probabilities[np.arange(len(labels)), labels].astype(np.float64))
    return tuple((np.ceil(scores * 1e6) / 1e6).round(6).tolist())


_STEP = 1e-3
"""Share by which each cut promises more than the one before it: at most a thousand are saved with the weights."""


def cuts_of(probabilities: np.ndarray, labels: np.ndarray, groups: Groups = None) -> tuple[Cut, ...]:
    """Return the cuts among which `--right` chooses, in descending order of their images.

    `probabilities` (n, K), `labels` (n,) and `groups` (n,), equal for images that belong together. A cut that promises
    hardly more than one with more images is left out. Among many thresholds, the best one looks better than it is. Each
    therefore counts one more of its images, or a group of mean size, as wrong. Without this correction, the fraction of
    correct answers on new images is too low on average.
    """
    confidence, right = probabilities.max(1).astype(np.float64), probabilities.argmax(1) == labels
    order = np.argsort(-confidence, kind="stable")
    ranked, counts, hits = confidence[order], np.arange(1, len(order) + 1), np.cumsum(right[order])
    promised = hits / (counts + len(order) / max(count_groups(groups, len(order)), 1))
    cuts: list[Cut] = []
    for last in np.append(np.flatnonzero(np.diff(ranked)), len(order) - 1)[::-1]:
        if cuts and promised[last] < cuts[-1].promised + _STEP:
            continue
        inside = order[: last + 1]
        below = ranked[last + 1] if last + 1 < len(order) else ranked[last]  # halfway: engines differ by rounding
        low, high = proportion_interval(right[inside], None if groups is None else np.asarray(groups)[inside])
        cuts.append(
            Cut(float(ranked[last] + below) / 2, len(inside), int(hits[last]), float(promised[last]), low, high)
        )
    return tuple(cuts)
