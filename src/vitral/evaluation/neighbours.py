"""k nearest neighbours on frozen features: what a network knows before anything is fitted."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import UsageError

CHUNK = 1 << 26
"""Similarities that are held at a time (256 MiB in fp32)."""


def knn(
    train_features: Tensor,
    train_labels: np.ndarray,
    test_features: Tensor,
    k: int = 20,
    temperature: float = 0.07,
    *,
    classes: int | None = None,
) -> Tensor:
    """Probabilities (m, K), fp32, of test features (m, D) from training features (n, D) and their labels (n,).

    Each of the k training pictures of the highest cosine votes for its class with weight exp(cosine / temperature); a
    class's share of all votes is its probability (DINO's protocol, arXiv 2104.14294, after arXiv 1805.01978). With
    fewer than k training pictures all vote. `classes` is K where labels may lack the last ones. It computes where the
    features lie, some test rows at a time. `UsageError` where sizes do not fit together.
    """
    labels = torch.from_numpy(np.asarray(train_labels)).to(train_features.device)
    sizes = f"train {tuple(train_features.shape)}, {len(labels)} labels, test {tuple(test_features.shape)}"
    if train_features.ndim != 2 or test_features.ndim != 2 or train_features.shape[1] != test_features.shape[1]:
        raise UsageError("features of the two sides do not fit together", why=sizes)
    if len(labels) != len(train_features) or not len(labels):
        raise UsageError("features and labels do not fit together", why=sizes)
    if k < 1 or not temperature > 0:
        raise UsageError("--knn needs at least 1 neighbour and a temperature above 0")
    count = int(labels.max()) + 1 if classes is None else classes
    k = min(k, len(labels))
    known = F.normalize(train_features.float(), dim=1)
    asked = F.normalize(test_features.float(), dim=1)
    parts = []
    for rows in asked.split(max(1, CHUNK // len(known))):
        cosine, nearest = (rows @ known.T).topk(k, dim=1)
        # the greatest is taken off: exp(1 / 0.07) is large, and shares do not change
        weights = ((cosine - cosine[:, :1]) / temperature).exp()
        votes = torch.zeros(len(rows), count, device=rows.device).scatter_add_(1, labels[nearest], weights)
        parts.append(votes / votes.sum(1, keepdim=True))
    return torch.cat(parts) if parts else torch.zeros(0, count)
