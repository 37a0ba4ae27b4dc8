"""Scores by which images of no known class are detected; the higher, the less an image is like those trained on.

confidence    1 - p of the predicted class    Hendrycks & Gimpel 2017, "A Baseline for Detecting Misclassified and
                                              Out-of-Distribution Examples in Neural Networks"
energy        -log Σ exp(logits)              Liu et al. 2020, "Energy-based Out-of-distribution Detection"
distance      Mahalanobis distance of the     Lee et al. 2018, "A Simple Unified Framework for Detecting
              features to the nearest class   Out-of-Distribution Samples and Adversarial Attacks"
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.weights.native import digest

SCORES = ("confidence", "energy", "distance")
Statistics = Mapping[str, Tensor]
"""`means` (K', D) of the features of each class, and `whitening` (D, D), which makes their covariance the identity."""
Features = Callable[[], Tensor]
"""The input of the head (B, D), computed if it is needed."""


def scored(name: str, probabilities: Tensor, logits: Tensor, features: Features, statistics: Statistics) -> Tensor:
    """Return a score (B,) fp32 of images with these probabilities (B, K), logits (B, K) and features."""
    if name == "confidence":
        return 1 - probabilities.float().amax(1)
    if name == "energy":
        return -logits.float().logsumexp(1)
    return mahalanobis(features(), statistics)


def mahalanobis(features: Tensor, statistics: Statistics) -> Tensor:
    """Return the squared Mahalanobis distance (B,) of features (B, D) to the nearest class."""
    means, whitening = statistics["means"].to(features.device), statistics["whitening"].to(features.device)
    return torch.cdist(features.float() @ whitening, means @ whitening).amin(1).square()


def fit_statistics(features: np.ndarray, labels: np.ndarray) -> Statistics:
    """Fit the statistics of features (n, D) with labels (n,): the mean of each class, and one covariance for all.

    The covariance is shrunk (Ledoit & Wolf 2004), so that it has an inverse for fewer images than features.
    """
    from sklearn.covariance import ledoit_wolf  # takes a moment to import

    values = features.astype(np.float64)
    there = np.unique(labels)
    means = np.stack([values[labels == one].mean(0) for one in there])
    covariance, _ = ledoit_wolf(values - means[np.searchsorted(there, labels)], assume_centered=True)
    scales, axes = np.linalg.eigh(covariance)
    whitening = axes / np.sqrt(scales.clip(np.finfo(np.float32).eps))
    return {"means": torch.from_numpy(means).float(), "whitening": torch.from_numpy(whitening).float()}


@dataclass(frozen=True, eq=False)
class Detector:
    """A score, and the threshold above which an image is unknown. Saved with the weights."""

    score: str
    threshold: float
    statistics: Statistics = field(default_factory=dict)
    """Empty unless the score is a distance."""

    def appended(self, values: Tensor, logits: Tensor, features: Features) -> Tensor:
        """Append the score of each image as a last column to probabilities (B, K)."""
        found = scored(self.score, values, logits, features, self.statistics)
        return torch.cat([values, found.to(values)[:, None]], 1)

    def to_json(self) -> dict[str, object]:
        """The fields to save; the statistics are tensors of the file."""
        known = {"statistics": digest(self.statistics)} if self.statistics else {}
        return {"score": self.score, "threshold": self.threshold, **known}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], statistics: Statistics) -> Detector:
        """Invert `to_json`. Raises `ValueError` for an unknown score, and for statistics that do not belong to it."""
        score, threshold = saved["score"], float(saved["threshold"])
        if score not in SCORES or not math.isfinite(threshold):
            raise ValueError(f"a threshold of {threshold} for the score {score!r}")
        if score != "distance":
            return cls(score, threshold)
        if saved.get("statistics") != digest(statistics) or set(statistics) != {"means", "whitening"}:
            raise ValueError("the statistics of its features are missing or of another run")
        copied = {name: tensor.clone() for name, tensor in statistics.items()}  # the file may be replaced while served
        return cls(score, threshold, copied)
