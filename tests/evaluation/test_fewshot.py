"""Test few-shot least squares against the normal equations in plain float64 numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitral.errors import UsageError
from vitral.evaluation.fewshot import few_shot, least_squares


def normal_equations(x: np.ndarray, labels: np.ndarray, test: np.ndarray, classes: int, l2: float) -> np.ndarray:
    """Solve (XᵀX + λI)⁻¹Xᵀy as defined, without eigenvectors and never in the dual form."""
    mean, std = x.mean(0), x.std(0) + 1e-5
    ones, wide = np.full((len(x), 1), 100.0), np.full((len(test), 1), 100.0)
    x, test = np.hstack([(x - mean) / std, ones]), np.hstack([(test - mean) / std, wide])
    y = np.where(np.arange(classes) == labels[:, None], 1.0, -1.0)
    return test @ np.linalg.solve(x.T @ x + l2 * np.eye(x.shape[1]), x.T @ y)


def data(n: int, dim: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % classes
    centers = np.random.default_rng(99).normal(size=(classes, dim))
    return 5 + 3 * (centers[labels] + rng.normal(size=(n, dim))), labels


@pytest.mark.parametrize(("n", "dim"), [(60, 7), (8, 7), (7, 7), (12, 40), (3, 40)])
@pytest.mark.parametrize("l2", [2.0**10, 1e-2])
def test_both_forms_equal_the_normal_equations(n, dim, l2):
    """With 7 features and a constant, the dual form is solved for up to 7 images, the primal form from 8."""
    x, labels = data(n, dim, 3)
    test, _ = data(20, dim, 3, seed=1)
    wanted = normal_equations(x, labels, test, 3, l2)
    found = least_squares(torch.from_numpy(x), torch.from_numpy(labels), torch.from_numpy(test), 3, l2).numpy()
    assert np.abs(found - wanted).max() <= 1e-8 * np.abs(wanted).max()


def test_the_images_are_those_of_the_authors():
    """One generator per seed, one permutation per class in class order, and its first images for every shot."""
    x, labels = data(90, 5, 3)
    test, truth = data(40, 5, 3, seed=1)
    found = few_shot(torch.from_numpy(x).float(), labels, torch.from_numpy(test).float(), truth, 3, shots=(1, 5))
    for entry in found:
        for seed, accuracy in enumerate(entry.accuracies):
            rng = np.random.default_rng(seed)
            chosen = np.concatenate([rng.permutation(np.where(labels == k)[0])[: entry.shots] for k in range(3)])
            scores = normal_equations(x[chosen].astype(np.float32).astype(float), labels[chosen], test, 3, 1024.0)
            assert accuracy == (scores.argmax(1) == truth).mean()
    assert [entry.shots for entry in found] == [1, 5]
    assert found[1].mean > found[0].mean
    assert found[0].std == pytest.approx(np.std(found[0].accuracies, ddof=1))


def test_classes_with_too_few_images_use_all():
    x, labels = data(40, 4, 2)
    kept = np.r_[np.flatnonzero(labels == 0), np.flatnonzero(labels == 1)[:3]]
    test, truth = data(20, 4, 2, seed=1)
    one, ten = few_shot(torch.from_numpy(x[kept]), labels[kept], torch.from_numpy(test), truth, 2, shots=(1, 10))
    assert (one.short, ten.short) == (0, 1)
    assert ten.to_json()["short"] == 1
    lone = few_shot(torch.from_numpy(x[kept]), labels[kept], torch.from_numpy(test), truth, 3, shots=(1,), seeds=1)
    assert (lone[0].short, lone[0].std) == (1, None)  # the third class has no image at all


def test_mismatched_sizes_are_refused():
    x, labels = data(10, 4, 2)
    features = torch.from_numpy(x)
    for bad in (
        (features, labels, features[:, :3], labels, 2),
        (features, labels[:9], features, labels, 2),
        (features, labels, features[:0], labels[:0], 2),
        (features, labels, features, labels, 1),
        (features, labels, features, labels, 2, (0,)),
        (features, labels, features, labels, 2, (1,), 0),
    ):
        with pytest.raises(UsageError):
            few_shot(*bad)
