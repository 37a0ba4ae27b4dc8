"""The rate of wrong labels, which ones they are, and how sure that is: of drawn labels, where all of it is known."""

from __future__ import annotations

import numpy as np
import pytest

from vitral.evaluation import label_errors
from vitral.evaluation.label_errors import LIKELY, estimate

CLASSES = 5


def drawn(seed: int, rate: float, sure: float, temperature: float = 1.0, images: int = 4000) -> tuple[np.ndarray, ...]:
    """Draw truths from probabilities, change a share of the labels, and return what a classifier says that is off by a
    temperature: labels, probabilities, True for wrong labels.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1, (images, CLASSES)) + sure * np.eye(CLASSES)[rng.integers(0, CLASSES, images)]
    truth = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    wrong = rng.random(images) < rate
    labels = np.where(wrong, (truth + rng.integers(1, CLASSES, images)) % CLASSES, truth)
    said = np.exp(logits / temperature)
    return labels, said / said.sum(1, keepdims=True), wrong


@pytest.mark.parametrize("temperature", [0.6, 1.0, 2.0])
@pytest.mark.parametrize("rate", [0.02, 0.1])
def test_the_rate_and_the_share_of_right_claims_are_the_true_ones(rate: float, temperature: float) -> None:
    labels, probabilities, wrong = drawn(1, rate, 6.0, temperature)
    found = estimate(labels, probabilities)
    assert found.rate == pytest.approx(wrong.mean(), rel=0.2)
    assert found.errors == pytest.approx(wrong.sum(), rel=0.2)
    assert found.precision > LIKELY
    assert wrong[found.wrong].mean() == pytest.approx(found.precision, abs=0.08)
    assert (found.wrong & wrong).sum() > 0.6 * wrong.sum()
    for low, high in ((0.1, 0.5), (0.5, 0.9)):
        inside = (found.doubt > low) & (found.doubt <= high)
        assert wrong[inside].mean() == pytest.approx(found.doubt[inside].mean(), abs=0.25), (
            "probabilities mean what they say"
        )


def test_hard_images_are_not_called_wrong() -> None:
    """A classifier that is right for half of the images says so: its errors are no errors of the labels."""
    labels, probabilities, _ = drawn(2, 0.0, 1.0)
    assert (probabilities.argmax(1) == labels).mean() < 0.7
    found = estimate(labels, probabilities)
    assert found.rate < 0.01
    assert found.wrong.sum() <= 4


def test_the_order_is_by_doubt_and_another_class_is_suggested() -> None:
    labels, probabilities, wrong = drawn(3, 0.05, 6.0)
    found = estimate(labels, probabilities)
    assert (np.diff(found.doubt[found.order]) <= 0).all()
    assert (found.suggested != labels).all()
    assert wrong[found.order[: wrong.sum()]].mean() > 0.7
    assert np.array_equal(found.confidence, probabilities[np.arange(len(labels)), labels])


def test_a_class_without_images_or_a_perfect_set_is_no_error() -> None:
    labels = np.array([0, 0, 1, 1])
    probabilities = np.array([[0.9, 0.1, 0], [0.8, 0.2, 0], [0.1, 0.9, 0], [0.3, 0.7, 0]])
    found = estimate(labels, probabilities)
    assert found.errors == 0
    assert not found.wrong.any()
    assert found.precision == 1
    certain = estimate(labels, np.eye(3)[labels])
    assert certain.errors == 0


def test_many_classes_are_computed_in_blocks_with_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    labels, probabilities, *_ = drawn(3, 0.05, 4.0, images=500)
    whole = label_errors.estimate(labels, probabilities)
    monkeypatch.setattr(label_errors, "_BLOCK", 7 * probabilities.shape[1])
    parts = label_errors.estimate(labels, probabilities)
    assert parts.rate == whole.rate
    assert (parts.order == whole.order).all()
    assert (parts.suggested == whole.suggested).all()
