"""The order in which labels teach most."""

from __future__ import annotations

import numpy as np
import pytest

from vitral.labeling import next_images as module
from vitral.labeling.next_images import next_images


def clusters(sizes: tuple[int, ...], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features around one direction for each cluster, and the cluster of each image."""
    rng = np.random.default_rng(seed)
    of = np.repeat(np.arange(len(sizes)), sizes)
    return np.eye(len(sizes), 8)[of] + 0.05 * rng.standard_normal((len(of), 8)), of


def test_each_large_cluster_without_a_label_comes_first() -> None:
    rows, of = clusters((40, 30, 20, 5))
    found = next_images(rows, np.array([0, 1]), np.arange(2, len(rows)), np.full(len(rows), 0.5))
    assert of[found[:3]].tolist() == [1, 2, 3]
    assert len(set(found)) == len(found) == len(rows) - 2


def test_images_of_which_the_suggestion_is_certain_come_last() -> None:
    rows, of = clusters((20, 20))
    probability = np.where(of == 0, 1.0, 0.5)
    found = next_images(rows, np.empty(0, int), np.arange(len(rows)), probability)
    assert of[found[:20]].tolist() == [1] * 20


def test_it_is_the_greedy_maximum() -> None:
    rng = np.random.default_rng(1)
    rows, probability = rng.standard_normal((60, 6)), rng.random(60)
    labeled, waiting = np.arange(5), np.arange(5, 60)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    similar = np.maximum(unit @ unit.T, 0) ** 2
    covered, expected = similar[:, labeled].max(1), []
    for _ in range(20):
        gains = {
            one: ((1 - probability) * np.maximum(similar[one] - covered, 0))[waiting].sum()
            for one in waiting
            if one not in expected
        }
        expected.append(max(gains, key=lambda one: gains[one]))
        covered = np.maximum(covered, similar[expected[-1]])
    assert next_images(rows, labeled, waiting, probability)[:20] == expected


def test_many_images_are_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 30)
    rows, _ = clusters((50, 50))
    found = next_images(rows, np.arange(40), np.arange(40, 100), np.full(100, 0.5))
    assert len(found) == 30
    assert set(found) <= {*range(40, 100)}
