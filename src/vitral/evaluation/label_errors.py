"""Label errors: how likely each label is wrong, given probabilities of networks that have not seen it.

A label y of an image with probabilities p (out of fold) is either drawn from p, or with the rate ε from the other
classes at random:

    P(y) = (1 - ε) p_y + ε (1 - p_y) / (K - 1)

The rate, and the temperature that calibrates p, maximize the likelihood of all labels. The probability that a label is
wrong is the second term divided by P(y). A hard image, whose label the network merely finds unlikely, is not called
wrong as long as the network is as often wrong about such images.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

LIKELY = 0.5
"""Probability above which a label is called wrong."""
_TEMPERATURES = np.geomspace(0.5, 4.0, 25)
_STEPS, _CLOSE = 200, 1e-7  # of expectation-maximization
_BLOCK = 4_000_000  # probabilities that are computed at once, so that thousands of classes fit into memory


@dataclass(frozen=True, eq=False)
class Estimate:
    """Labels ranked by the probability that they are wrong."""

    order: np.ndarray
    """(n,) image numbers, the most likely error first."""
    confidence: np.ndarray
    """(n,) probability of each image's label."""
    suggested: np.ndarray
    """(n,) the most probable class other than the label."""
    doubt: np.ndarray
    """(n,) probability that the label is wrong."""
    rate: float
    """Share of labels that are wrong."""

    @property
    def wrong(self) -> np.ndarray:
        """(n,) True for labels that are called wrong."""
        return self.doubt > LIKELY

    @property
    def errors(self) -> int:
        """Estimated number of wrong labels, called so or not."""
        return round(self.rate * len(self.order))

    @property
    def precision(self) -> float:
        """Expected share of wrong ones among the labels that are called wrong; 1 without any."""
        return float(self.doubt[self.wrong].mean()) if self.wrong.any() else 1.0


def estimate(labels: np.ndarray, probabilities: np.ndarray) -> Estimate:
    """Rank labels (n,) by out-of-fold probabilities (n, K) of at least two classes."""
    place = np.arange(len(labels))
    fits = [_fit(own, probabilities.shape[1]) for own in _at_temperatures(labels, probabilities)]
    _, rate, doubt = max(fits, key=lambda one: one[0])
    order = np.lexsort((probabilities[place, labels], -doubt))
    return Estimate(order, probabilities[place, labels], _suggested(labels, probabilities), doubt, rate)


def _suggested(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the most probable class (n,) other than the label."""
    found = np.empty(len(labels), np.int64)
    for rows in _blocks(probabilities):
        other = probabilities[rows].copy()
        other[np.arange(len(other)), labels[rows]] = -1.0
        found[rows] = other.argmax(1)
    return found


def _blocks(probabilities: np.ndarray) -> Iterator[slice]:
    """Yield slices of the rows, with at most `_BLOCK` values each."""
    rows = max(1, _BLOCK // probabilities.shape[1])
    for start in range(0, len(probabilities), rows):
        yield slice(start, start + rows)


def _at_temperatures(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Probabilities of the labels (T, n), with the logits divided by each temperature."""
    found = np.empty((len(_TEMPERATURES), len(labels)))
    for rows in _blocks(probabilities):
        own = labels[rows]
        logits = np.log(np.maximum(probabilities[rows], 1e-12))
        logits -= logits.max(1, keepdims=True)
        for t, temperature in enumerate(_TEMPERATURES):
            scaled = np.exp(logits / temperature)
            found[t, rows] = scaled[np.arange(len(own)), own] / scaled.sum(1)
    return found


def _fit(own: np.ndarray, classes: int) -> tuple[float, float, np.ndarray]:
    """Fit the rate of errors to probabilities of labels (n,): the log likelihood, the rate, and the doubt (n,)."""
    rate, by_chance = 0.05, (1 - own) / (classes - 1)
    for _ in range(_STEPS):
        wrong = rate * by_chance
        total = (1 - rate) * own + wrong
        doubt = wrong / np.maximum(total, 1e-300)
        before, rate = rate, max(float(doubt.mean()), 1e-9)
        if abs(rate - before) < _CLOSE:
            break
    return float(np.log(np.maximum(total, 1e-300)).sum()), rate, doubt
