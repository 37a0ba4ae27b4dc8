"""Linear classifiers on features of a frozen network, for `--recipe linear-probe`, `data check --labels` and `label`.

LinearFits(x, labels, classes)(C)      logistic regressions by L-BFGS.
out_of_fold(features, labels, …)       each image predicted by logistic regressions on the other folds.
discriminant(features, labels, …)      likewise by linear discriminant analysis, in closed form.
mixed(one, other)                      the geometric mean of the two, which ranks labels better than either.
fitted(features, labels, …)            the mean of both, fitted to all labels, for further images.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from vitral.errors import DataError

STRENGTHS = (0.001, 0.01, 0.1, 1.0)
"""Inverse strengths of the regularization, of which the lowest out-of-fold loss chooses."""
SHRINKAGE = 0.5
"""Share of a multiple of the identity in the covariance of the discriminant analysis."""
_MOST_STEPS = 300
_LEAST_DEVIATION = 1e-5  # a feature that hardly varies is not scaled up
_ABSENT = 20.0  # logit below all others of a class without images

Linear = tuple[np.ndarray, np.ndarray]
"""Weights (K, D) and bias (K,) of logits."""


class LinearFits:
    """Logistic regressions on standardized features (n, D), each initialized with the previous solution."""

    def __init__(self, x: np.ndarray, labels: np.ndarray, classes: int, balanced: bool = False, steps: int = 1000):
        from sklearn.linear_model import LogisticRegression  # takes a second to import

        self.x, self.labels, self.classes = x, labels, classes
        self.present = np.unique(labels)
        if len(self.present) < 2:
            raise DataError("the training images are all of one class", hint="use a larger --train-share")
        weights = "balanced" if balanced else None
        self.model = LogisticRegression(max_iter=steps, warm_start=True, class_weight=weights)

    def __call__(self, strength: float) -> tuple[np.ndarray, np.ndarray, int]:
        """Fit one strength; return weights (K, D) and bias (K,), both fp64, and the number of iterations."""
        from sklearn.exceptions import ConvergenceWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the metrics contain the iterations
            self.model.set_params(C=strength).fit(self.x, self.labels)
        coefficients, intercepts = self.model.coef_, self.model.intercept_
        if len(self.present) == 2:  # one row, the second class against the first
            coefficients = np.concatenate([-coefficients, coefficients]) / 2
            intercepts = np.concatenate([-intercepts, intercepts]) / 2
        weight = np.zeros((self.classes, self.x.shape[1]))
        bias = np.full(self.classes, intercepts.min() - _ABSENT)  # a class without training images is never predicted
        weight[self.present], bias[self.present] = coefficients, intercepts
        return weight, bias, int(self.model.n_iter_.max())


@dataclass(frozen=True, eq=False)
class Scale:
    """Mean and standard deviation of features, each (D,)."""

    mean: np.ndarray
    deviation: np.ndarray

    @classmethod
    def of(cls, features: np.ndarray) -> Scale:
        """Measure features (n, D)."""
        deviation = features.std(0)
        return cls(features.mean(0), np.where(deviation < _LEAST_DEVIATION, 1.0, deviation))

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return standardized features (m, D)."""
        return (features - self.mean) / self.deviation

    def folded(self, weight: np.ndarray, bias: np.ndarray) -> Linear:
        """Return weights (K, D) and bias (K,) that give for features the logits of these for standardized ones."""
        weight = weight / self.deviation
        return weight, bias - weight @ self.mean


def standardized(features: np.ndarray) -> np.ndarray:
    """Return features (n, D) with a mean of 0 and a standard deviation of 1 in each column."""
    return Scale.of(features)(features)


def probabilities_of(rows: np.ndarray, linear: Linear) -> np.ndarray:
    """Return the probabilities (n, K) of rows (n, D)."""
    logits = rows @ linear[0].T + linear[1]
    values = np.exp(logits - logits.max(1, keepdims=True))
    return values / values.sum(1, keepdims=True)


def out_of_fold(
    features: np.ndarray,
    labels: np.ndarray,
    classes: int,
    folds: np.ndarray,
    strengths: Sequence[float] = STRENGTHS,
    *,
    ready: bool = False,
) -> tuple[np.ndarray, float]:
    """Predict each image (n, K) by a logistic regression on the other folds; return the strength with the lowest loss.

    An image whose class has no image in the other folds gets a probability of 1 for its label: nothing is known.
    Features that are standardized already are `ready`.
    """
    rows = features if ready else standardized(features)
    best, chosen, lowest = np.zeros((len(labels), classes)), strengths[0], np.inf
    for strength in strengths:

        def fit(x: np.ndarray, y: np.ndarray, c: float = strength) -> Linear:
            return regression(x, y, classes, c)

        found = predicted_by_others(rows, labels, classes, folds, fit)
        loss = -np.log(np.maximum(found[np.arange(len(labels)), labels], 1e-12)).mean()
        if loss < lowest:
            best, chosen, lowest = found, strength, loss
    return best, chosen


def discriminant(
    features: np.ndarray, labels: np.ndarray, classes: int, folds: np.ndarray, *, ready: bool = False
) -> np.ndarray:
    """Predict each image (n, K) by linear discriminant analysis on the other folds.

    An image whose class has no image in the other folds gets a probability of 1 for its label: nothing is known.
    Features that are standardized already are `ready`.
    """
    rows = features if ready else standardized(features)
    return predicted_by_others(rows, labels, classes, folds, lambda x, y: _discriminant(x, y, classes))


def predicted_by_others(
    rows: np.ndarray,
    labels: np.ndarray,
    classes: int,
    folds: np.ndarray,
    fit: Callable[[np.ndarray, np.ndarray], Linear],
    used: np.ndarray | None = None,
) -> np.ndarray:
    """Predict each of the rows (n, D) by a fit to the other folds.

    With a mask `used`, only its images are fitted to, and a class without any is never predicted.
    """
    found = np.zeros((len(labels), classes))
    for fold in np.unique(folds):
        inside = folds == fold
        others = ~inside if used is None else ~inside & used
        found[inside] = probabilities_of(rows[inside], fit(rows[others], labels[others]))
        if used is None:
            unknown = inside & ~np.isin(labels, labels[others])
            found[unknown] = labels[unknown, None] == np.arange(classes)
    return found


def mixed(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the normalized geometric mean of probabilities (n, K)."""
    values = np.sqrt(one * other) + 1e-12
    return values / values.sum(1, keepdims=True)


@dataclass(frozen=True, eq=False)
class Fitted:
    """Both classifiers, fitted to standardized features."""

    scale: Scale
    regression: Linear
    discriminant: Linear

    def __call__(self, features: np.ndarray) -> np.ndarray:
        """Return the probabilities (m, K) of features (m, D)."""
        rows = self.scale(features)
        return mixed(probabilities_of(rows, self.regression), probabilities_of(rows, self.discriminant))

    def head(self) -> Linear:
        """Return weights and bias on features as they are: the softmax of their logits is the geometric mean of both.

        The logit of a class without images is below all others, but finite.
        """
        weight = (self.regression[0] + self.discriminant[0]) / 2
        bias = (self.regression[1] + self.discriminant[1]) / 2
        bias = np.maximum(bias, bias[np.isfinite(bias)].min() - _ABSENT)
        return self.scale.folded(weight, bias)


def fitted(rows: np.ndarray, labels: np.ndarray, classes: int, strength: float, scale: Scale) -> Fitted:
    """Fit both classifiers to rows (n, D), which `scale` standardized."""
    return Fitted(scale, regression(rows, labels, classes, strength), _discriminant(rows, labels, classes))


def regression(rows: np.ndarray, labels: np.ndarray, classes: int, strength: float) -> Linear:
    """Fit a logistic regression to standardized rows (n, D); with one class, that class is certain."""
    if len(present := np.unique(labels)) < 2:
        return np.zeros((classes, rows.shape[1])), np.where(np.arange(classes) == present[0], 0.0, -np.inf)
    return LinearFits(rows, labels, classes, steps=_MOST_STEPS)(strength)[:2]


def _discriminant(rows: np.ndarray, labels: np.ndarray, classes: int) -> Linear:
    known = np.unique(labels)
    means = np.stack([rows[labels == label].mean(0) for label in known])
    rest = rows - means[np.searchsorted(known, labels)]
    covariance = (1 - SHRINKAGE) * rest.T @ rest / len(rest)
    covariance += (SHRINKAGE * np.square(rest).mean() + 1e-6) * np.eye(len(covariance))
    solved = np.linalg.solve(covariance, means.T)
    weight, bias = np.zeros((classes, rows.shape[1])), np.full(classes, -np.inf)
    weight[known], bias[known] = solved.T, -0.5 * (means.T * solved).sum(0)
    return weight, bias
