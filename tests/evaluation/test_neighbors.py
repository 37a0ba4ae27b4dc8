"""Test nearest neighbors against a double loop and against scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from vitral.errors import UsageError
from vitral.evaluation import neighbors
from vitral.evaluation.neighbors import knn


def features(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32) + 0.5


def test_votes_are_weighted_by_cosine():
    train, test, labels = features(30, 0), features(11, 1), np.arange(30) % 4
    found = knn(torch.from_numpy(train), labels, torch.from_numpy(test), k=7, temperature=0.2).numpy()
    for row, image in zip(found, test, strict=True):
        cosine = train @ image / (np.linalg.norm(train, axis=1) * np.linalg.norm(image))
        votes = np.zeros(4)
        for i in np.argsort(-cosine)[:7]:
            votes[labels[i]] += np.exp(cosine[i] / 0.2)
        assert row == pytest.approx(votes / votes.sum(), abs=1e-5)


def test_without_weights_it_is_the_textbook_classifier():
    train, test, labels = features(50, 2), features(20, 3), np.arange(50) % 3
    textbook = KNeighborsClassifier(5, metric="cosine").fit(train, labels).predict_proba(test)
    found = knn(torch.from_numpy(train), labels, torch.from_numpy(test), k=5, temperature=1e6)
    assert np.allclose(found.numpy(), textbook, atol=1e-5)


def test_chunks_change_nothing(monkeypatch):
    train, test, labels = map(torch.from_numpy, (features(30, 0), features(11, 1), np.arange(30) % 4))
    whole = knn(train, labels.numpy(), test)
    monkeypatch.setattr(neighbors, "CHUNK", 70)  # two test rows at a time
    assert torch.allclose(knn(train, labels.numpy(), test), whole, atol=1e-6)


def test_small_sets_and_missing_classes():
    train = torch.from_numpy(features(3, 0))
    found = knn(train, np.array([0, 1, 1]), train, k=20, classes=4)
    assert found.shape == (3, 4)
    assert torch.allclose(found.sum(1), torch.ones(3))
    assert (found[:, 2:] == 0).all()
    assert knn(train, np.array([0, 1, 1]), train, k=1).argmax(1).tolist() == [0, 1, 1]
    assert knn(train, np.array([0, 1, 1]), train[:0]).shape == (0, 2)


def test_small_temperatures_do_not_overflow():
    train = torch.from_numpy(features(30, 0))
    assert knn(train, np.arange(30) % 2, train, temperature=1e-4).isfinite().all()


def test_mismatched_sizes_are_refused():
    train, labels = torch.from_numpy(features(4, 0)), np.arange(4) % 2
    for bad in (
        (train, labels[:3], train),
        (train, labels, train[:, :2]),
        (train, labels, train, 0),
        (train, labels, train, 3, 0.0),
        (train[:0], labels[:0], train),
    ):
        with pytest.raises(UsageError):
            knn(*bad)
