"""Calibration on validation images: a temperature, and the scores of conformal sets.

fit_temperature(logits, labels) -> float       Guo et al. 2017, "On Calibration of Modern Neural Networks"
conformal_scores(probabilities, labels)        split conformal prediction, Sadinle et al. 2019, "Least Ambiguous
                                               Set-Valued Classifiers with Bounded Error Levels"
"""

from __future__ import annotations

import numpy as np

FEWEST = 50
"""Validation images, or groups of them, below which no temperature is fitted: it would be noise."""
LIMITS = (0.05, 20.0)
"""Lowest and highest temperature."""


def fit_temperature(logits: np.ndarray, labels: np.ndarray, groups: int | None = None) -> float:
    """Return the temperature T with the lowest cross-entropy of softmax(logits / T).

    `logits` (n, K), `labels` (n,), and the number of `groups` of images that belong together, by default n. 1 for fewer
    than `FEWEST` groups, and if all predictions are right or all wrong: no temperature is best then. The loss is convex
    in 1/T, so the minimum is unique.
    """
    from scipy.optimize import minimize_scalar  # takes a moment to import

    right = (logits.argmax(1) == labels).mean()
    if (len(labels) if groups is None else groups) < FEWEST or right in (0.0, 1.0) or logits.shape[1] < 2:
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
