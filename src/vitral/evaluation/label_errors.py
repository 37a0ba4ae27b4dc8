"""Label errors by confident learning (arXiv 1911.00068).

    confident_joint(labels, probabilities) -> (K, K)      images by label and confidently predicted class
    calibrated_joint(labels, probabilities) -> (K, K)     the same, scaled to the images of each label
    estimate(labels, probabilities) -> Estimate           the ranked labels, and those that are likely wrong

The probabilities must come from networks that have not seen the image with its label (out of fold). Our own
implementation of the published definitions; tests compare it with a plain one, image by image.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Estimate:
    """Labels ranked by their likelihood of being wrong."""

    order: np.ndarray
    """(n,) image numbers, the most likely error first: by self-confidence, the probability of the label."""
    confidence: np.ndarray
    """(n,) probability of each image's label."""
    suggested: np.ndarray
    """(n,) the most probable class other than the label."""
    wrong: np.ndarray
    """(n,) True for likely errors: another class is confident, and `ODDS` times as probable as the label."""
    errors: int
    """Estimated number of errors: the off-diagonal sum of the calibrated confident joint."""


_TOLERANCE = 1e-6  # a probability this little below its threshold is at it

ODDS = 10.0
"""Odds of the suggested class against the label from which, of those that confident learning finds, a label is called
wrong."""


def thresholds(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Mean probability of each class over the images with its label, (K,); 1 for a class without images."""
    count = np.bincount(labels, minlength=probabilities.shape[1])
    own = np.bincount(labels, probabilities[np.arange(len(labels)), labels], minlength=probabilities.shape[1])
    return np.where(count > 0, own / np.maximum(count, 1), 1.0)


def confident_joint(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Count images by label (rows) and confident class (columns), (K, K) int64.

    The confident class is the most probable one among those at or above their threshold; an image without one is not
    counted.
    """
    classes = probabilities.shape[1]
    confident = _confident(labels, probabilities)
    counted = confident >= 0
    return np.bincount(labels[counted] * classes + confident[counted], minlength=classes**2).reshape(classes, classes)


def _confident(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Confident class of each image, (n,); -1 for none."""
    above = np.where(probabilities >= thresholds(labels, probabilities) - _TOLERANCE, probabilities, -1.0)
    return np.where(above.max(1) >= 0, above.argmax(1), -1)


def calibrated_joint(labels: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Estimate the images by label and true class, (K, K): the confident joint, rows scaled to each label's images."""
    joint = confident_joint(labels, probabilities).astype(np.float64)
    count = np.bincount(labels, minlength=len(joint))
    empty = joint.sum(1) == 0
    joint[empty, empty] = 1.0
    return joint / joint.sum(1, keepdims=True) * count[:, None]


def estimate(labels: np.ndarray, probabilities: np.ndarray) -> Estimate:
    """Rank labels (n,) by out-of-fold probabilities (n, K)."""
    place = np.arange(len(labels))
    own, other = probabilities[place, labels], probabilities.copy()
    other[place, labels] = -1.0
    confident = _confident(labels, probabilities)
    wrong = (confident >= 0) & (confident != labels) & (other.max(1) > ODDS * own)
    joint = calibrated_joint(labels, probabilities)
    errors = round(float(joint.sum() - np.trace(joint)))
    return Estimate(np.argsort(own, kind="stable"), own, other.argmax(1), wrong, errors)
