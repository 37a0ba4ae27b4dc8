"""Confident learning agrees with a plain reading of the paper's definitions, image by image."""

from __future__ import annotations

import numpy as np
import pytest

from vitral.evaluation.label_errors import ODDS, calibrated_joint, confident_joint, estimate, thresholds


def flipped(seed: int, images: int = 400, classes: int = 5, sure: float = 3.0) -> tuple[np.ndarray, ...]:
    """Draw labels of which a tenth is wrong, and probabilities of a classifier that is mostly right."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, classes, images)
    wrong = rng.random(images) < 0.1
    labels = np.where(wrong, (truth + rng.integers(1, classes, images)) % classes, truth)
    logits = rng.normal(0, 1, (images, classes)) + sure * np.eye(classes)[truth]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return labels, probabilities, wrong


def plain_joint(labels: np.ndarray, probabilities: np.ndarray) -> list[list[int]]:
    """Count one image at a time (equations 1 and 2 of the paper)."""
    classes = probabilities.shape[1]
    limit = []
    for name in range(classes):
        own = [row[name] for row, label in zip(probabilities, labels, strict=True) if label == name]
        limit.append(sum(own) / len(own) if own else 1.0)
    joint = [[0] * classes for _ in range(classes)]
    for row, label in zip(probabilities, labels, strict=True):
        able = [name for name in range(classes) if row[name] >= limit[name]]
        if able:
            joint[label][max(able, key=lambda name: row[name])] += 1
    return joint


@pytest.mark.parametrize("seed", range(4))
def test_the_confident_joint_is_the_papers(seed: int) -> None:
    labels, probabilities, _ = flipped(seed)
    assert confident_joint(labels, probabilities).tolist() == plain_joint(labels, probabilities)
    joint = calibrated_joint(labels, probabilities)
    assert joint.sum(1) == pytest.approx(np.bincount(labels, minlength=5))


def test_most_wrong_labels_come_first_and_their_number_is_estimated() -> None:
    labels, probabilities, wrong = flipped(7, images=5000, sure=5.0)
    found = estimate(labels, probabilities)
    first = found.order[: int(wrong.sum() * 1.2)]
    assert wrong[first].sum() > 0.95 * wrong.sum()
    assert found.errors == pytest.approx(wrong.sum(), rel=0.15)
    assert wrong[found.wrong].mean() > 0.9
    assert (probabilities.max(1) > ODDS * found.confidence)[found.wrong].all()
    assert (found.suggested != labels).all()
    assert (np.diff(found.confidence[found.order]) >= 0).all()


def test_a_class_without_images_or_a_perfect_set_is_no_error() -> None:
    labels = np.array([0, 0, 1, 1])
    probabilities = np.array([[0.9, 0.1, 0], [0.8, 0.2, 0], [0.1, 0.9, 0], [0.3, 0.7, 0]])
    assert thresholds(labels, probabilities) == pytest.approx([0.85, 0.8, 1.0])
    found = estimate(labels, probabilities)
    assert found.errors == 0
    assert not found.wrong.any()
    assert not np.isnan(calibrated_joint(labels, probabilities)).any()
