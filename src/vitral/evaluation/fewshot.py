"""Few-shot accuracy in closed form: least squares on frozen features of a few images per class.

The definition follows the authors' code (big_vision `evaluators/fewshot_lsr.py`), with images drawn by the same
generator in the same order. It needs no learning rate and no stopping criterion, so it compares networks in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import UsageError

SHOTS = (1, 5, 10, 25)
CONSTANT = 100.0
"""The constant feature appended for the bias, so large that λ hardly regularizes it."""


@dataclass(frozen=True)
class FewShot:
    """Accuracy from `shots` images of each class; fractions from 0 to 1."""

    shots: int
    accuracies: tuple[float, ...]
    """One per seed."""
    short: int
    """Number of classes with fewer training images than `shots`, of which all are used (possibly none)."""

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.accuracies))

    @property
    def std(self) -> float | None:
        """Standard deviation over the seeds (n - 1); None for a single seed."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else None

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {**asdict(self), "accuracies": list(self.accuracies), "mean": self.mean, "std": self.std}


def few_shot(
    train_features: Tensor,
    train_labels: np.ndarray,
    test_features: Tensor,
    test_labels: np.ndarray,
    classes: int,
    shots: Sequence[int] = SHOTS,
    seeds: int = 3,
    l2: float = 2.0**10,
) -> list[FewShot]:
    """Measure accuracy on test features (m, D) from a few training features (n, D) of each class, per number of shots.

    For each seed the images of each class are permuted once, and the first `shots` of them are the support. A class
    with fewer images uses all of them, and `FewShot.short` counts it. Raises `UsageError` if sizes do not match.
    """
    _check(train_features, train_labels, test_features, test_labels, classes, shots, seeds)
    accuracies: dict[int, list[float]] = {count: [] for count in shots}
    truth = torch.from_numpy(np.asarray(test_labels))
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        permuted = [rng.permutation(np.flatnonzero(train_labels == label)) for label in range(classes)]
        for count in accuracies:
            chosen = np.concatenate([indices[:count] for indices in permuted])
            targets = torch.from_numpy(np.asarray(train_labels)[chosen])
            scores = least_squares(train_features[chosen], targets, test_features, classes, l2)
            accuracies[count].append(float((scores.argmax(1) == truth).double().mean()))
    sizes = np.bincount(train_labels, minlength=classes)
    return [FewShot(count, tuple(values), int((sizes < count).sum())) for count, values in accuracies.items()]


def least_squares(support: Tensor, labels: Tensor, test: Tensor, classes: int, l2: float) -> Tensor:
    """Compute scores (m, K), fp64, of test features (m, D) from a support (n, D) with labels (n,).

    Features are standardized by mean and standard deviation (+ 1e-5) of the support, and a constant is appended;
    targets are ±1. The weights (XᵀX + λI)⁻¹Xᵀy are computed from the eigenvectors of XᵀX (D + 1 square) or, for fewer
    images than features, of XXᵀ (n square): Xᵀ(XXᵀ + λI)⁻¹y is the same matrix.
    """
    x = support.double()
    mean, std = x.mean(0), x.std(0, correction=0) + 1e-5
    x = F.pad((x - mean) / std, (0, 1), value=CONSTANT)
    y = 2.0 * F.one_hot(labels, classes).double() - 1.0
    primal = x.shape[0] >= x.shape[1]
    values, vectors = torch.linalg.eigh(x.T @ x if primal else x @ x.T)
    solved = vectors @ ((vectors.T @ (x.T @ y if primal else y)) / (values + l2)[:, None])
    weights = solved if primal else x.T @ solved
    return F.pad((test.double() - mean) / std, (0, 1), value=CONSTANT) @ weights


def _check(
    train: Tensor,
    train_labels: np.ndarray,
    test: Tensor,
    test_labels: np.ndarray,
    classes: int,
    shots: Sequence[int],
    seeds: int,
) -> None:
    sizes = f"{tuple(train.shape)} with {len(train_labels)} labels, {tuple(test.shape)} with {len(test_labels)} labels"
    if train.ndim != 2 or test.ndim != 2 or train.shape[1] != test.shape[1]:
        raise UsageError("training and test features do not match", why=sizes)
    if len(train) != len(train_labels) or len(test) != len(test_labels) or not len(train) or not len(test):
        raise UsageError("features and labels do not match", why=sizes)
    if max(int(np.max(train_labels)), int(np.max(test_labels))) >= classes:
        raise UsageError("label out of range", why=f"labels of {classes} classes are 0 to {classes - 1}")
    if not shots or min(shots) < 1 or seeds < 1:
        raise UsageError("shots and seeds must be at least 1", hint="--few-shot 1,5,10,25")
