"""Find images that are unlike all others of a data set, by features of a network.

The distance of an image is that to its second nearest other image, so that a copy of a stranger does not hide it.
Of the distances tried, raw cosines ranked planted strangers best; docs/log/checks.md has the figures. The ranking is
good where a claim is not possible: most strangers are among the first 12, few are beyond the limit of a claim.
"""

from __future__ import annotations

import numpy as np

from vitral.data.checks.findings import Found
from vitral.workflows.checks.set_features import SetFeatures

NEIGHBORS = 2
"""Number of the nearest image whose distance counts."""
FAR = 8.0
"""Robust standard deviations above the median distance, from which an image is unlike all others."""
FEWEST = 30
"""Images from which a set has distances of its own."""
_BLOCK = 1024


def strangers(found: SetFeatures) -> list[Found]:
    """Return the images that are unlike all others, the farthest first: a claim about each of them."""
    return [one for one, deviations in _ranked(found) if deviations >= FAR]


def least_alike(found: SetFeatures, most: int) -> list[Found]:
    """Return the images that resemble the others least, the farthest first, without a claim about any of them."""
    return [one for one, _ in _ranked(found)[:most]]


def _ranked(found: SetFeatures) -> list[tuple[Found, float]]:
    """Return all images, the farthest first, with their distances in robust standard deviations."""
    if len(found.values) < FEWEST:
        return []
    distance = neighbor_distances(found.values)
    middle = float(np.median(distance))
    spread = max(1.4826 * float(np.median(np.abs(distance - middle))), 1e-6)
    ranked = []
    for i in np.argsort(-distance, kind="stable").tolist():
        why = f"{distance[i] / max(middle, 1e-6):.1f} times as far from similar images as the median image"
        ranked.append((Found("stranger", found.places[i], why), float((distance[i] - middle) / spread)))
    return ranked


def neighbor_distances(features: np.ndarray, neighbors: int = NEIGHBORS) -> np.ndarray:
    """Return the distance (n,), 1 - cosine, from each row of features (n, D) to its k-th nearest other one."""
    rows = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-12)
    rows = rows.astype(np.float32)
    distances = []
    for start in range(0, len(rows), _BLOCK):
        cosines = rows[start : start + _BLOCK] @ rows.T
        cosines[np.arange(len(cosines)), start + np.arange(len(cosines))] = -2  # with itself
        distances.append(1 - np.partition(cosines, -neighbors, axis=1)[:, -neighbors])
    return np.concatenate(distances)
