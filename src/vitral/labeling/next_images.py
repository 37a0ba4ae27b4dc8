"""The images to label next: those that many unlabeled, doubtful images resemble, and no labeled image does.

The order is facility location, maximized greedily (Nemhauser, Wolsey and Fisher, 1978): with labeled images L, the next
image j maximizes Σᵢ wᵢ · max(sᵢⱼ − maxₗ sᵢₗ, 0). Here sᵢⱼ is the squared cosine of two feature vectors, 0 if it is
negative, and wᵢ is 1 − the probability of the suggestion. The doubt alone is worse than a random order, because the
most doubtful images are unusual ones (benchmarks/labeling.py).
"""

from __future__ import annotations

import heapq

import numpy as np

COUNT = 200
"""Images that are put into an order; others follow by their doubt."""
MOST = 2000
"""Images that are compared. Of more, so many are drawn at random."""


def next_images(rows: np.ndarray, labeled: np.ndarray, waiting: np.ndarray, probability: np.ndarray) -> list[int]:
    """Return the numbers of up to `COUNT` waiting images, the most useful first.

    `rows` (n, D) are features, `labeled` and `waiting` are numbers of images, and `probability` (n,) is that of the
    suggestion of each. The function is submodular, so an old gain is an upper bound: only the largest is renewed.
    """
    rng = np.random.default_rng(0)
    labeled, waiting = (rng.permutation(each)[:MOST] if len(each) > MOST else each for each in (labeled, waiting))
    unit = rows.astype(np.float32)
    unit /= np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    covered = _similarity(unit[waiting], unit[labeled]).max(1, initial=0.0)
    similar = _similarity(unit[waiting], unit[waiting])  # symmetric: a row is a column
    weight = (1 - probability[waiting]).astype(np.float32)

    def gain(one: int) -> float:
        return float(weight @ np.maximum(similar[one] - covered, 0))

    gains = [(-gain(one), one) for one in range(len(waiting))]
    heapq.heapify(gains)
    order: list[int] = []
    while gains and len(order) < COUNT:
        _, one = heapq.heappop(gains)
        renewed = (-gain(one), one)
        if gains and renewed > gains[0]:
            heapq.heappush(gains, renewed)
            continue
        order.append(int(waiting[one]))
        covered = np.maximum(covered, similar[one])
    return order


def _similarity(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """(a, b) squared cosines of unit vectors (a, D) and (b, D), 0 for negative ones."""
    return np.maximum(first @ second.T, 0) ** 2
