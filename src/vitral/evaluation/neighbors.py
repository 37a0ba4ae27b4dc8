"""k nearest neighbors on frozen features, without any fitting."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import UsageError

CHUNK = 1 << 26
"""Similarities in memory at a time (256 MiB in fp32)."""


def knn(
    train_features: Tensor,
    train_labels: np.ndarray,
    test_features: Tensor,
    k: int = 20,
    temperature: float = 0.07,
    *,
    classes: int | None = None,
) -> Tensor:
    """Predict probabilities (m, K), fp32, of test features (m, D) from training features (n, D) with labels (n,).

    Each of the k training images with the highest cosine votes for its class with weight exp(cosine / temperature); a
    class's share of all votes is its probability (DINO's protocol, arXiv 2104.14294, after arXiv 1805.01978). With
    fewer than k training images all vote. `classes` is K, for labels without the last classes. Computes on the device
    of the features; test rows are processed in chunks. Raises `UsageError` if sizes do not match.
    """
    labels = torch.from_numpy(np.asarray(train_labels)).to(train_features.device)
    sizes = f"train {tuple(train_features.shape)}, {len(labels)} labels, test {tuple(test_features.shape)}"
    if train_features.ndim != 2 or test_features.ndim != 2 or train_features.shape[1] != test_features.shape[1]:
        raise UsageError("training and test features do not match", why=sizes)
    if len(labels) != len(train_features) or not len(labels):
        raise UsageError("features and labels do not match", why=sizes)
    if k < 1 or not temperature > 0:
        raise UsageError("--knn needs at least 1 neighbor and a temperature above 0")
    count = int(labels.max()) + 1 if classes is None else classes
    k = min(k, len(labels))
    train = F.normalize(train_features.float(), dim=1)
    test = F.normalize(test_features.float(), dim=1)
    parts = []
    for rows in test.split(max(1, CHUNK // len(train))):
        cosine, nearest = (rows @ train.T).topk(k, dim=1)
        # subtract the maximum, since exp(1 / 0.07) is large; the shares do not change
        weights = ((cosine - cosine[:, :1]) / temperature).exp()
        votes = torch.zeros(len(rows), count, device=rows.device).scatter_add_(1, labels[nearest], weights)
        parts.append(votes / votes.sum(1, keepdim=True))
    return torch.cat(parts) if parts else torch.zeros(0, count)
