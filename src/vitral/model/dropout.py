"""Structured dropout: of residual branches (stochastic depth) and of patches."""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.kernels import random


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    """Stochastic depth (arXiv 1603.09382): drop the branch of an image at random, scale up the others."""
    if rate == 0.0 or not training:
        return x
    keep = random.kept(torch.rand(random.total(x.shape[0]), 1, 1, device=x.device)) >= rate
    return x * (keep.to(x.dtype) / (1 - rate))


def random_places(x: Tensor, rate: float, prefix: int) -> Tensor:
    """Drop a random share of each image's patches (PatchDropout, arXiv 2208.07220) from tokens (B, N, D).

    Returns the indices (B, n) of the remaining tokens, which are the prefix and at least one patch.
    """
    B, N, _ = x.shape
    count = max(1, round((N - prefix) * (1 - rate)))
    drawn = random.kept(torch.rand(random.total(B), N - prefix, device=x.device)).argsort(1)[:, :count]
    return with_prefix(drawn, prefix)


def with_prefix(patches: Tensor, prefix: int) -> Tensor:
    """Indices of tokens (B, prefix + n) from indices of patches (B, n). The prefix tokens come first."""
    first = torch.arange(prefix, device=patches.device).expand(len(patches), -1)
    return torch.cat([first, patches + prefix], dim=1)


def tokens_at(x: Tensor, places: Tensor) -> Tensor:
    """Select tokens (B, n, D) from (B, N, D) by their indices (B, n) in each image."""
    B, N, D = x.shape
    rows = places + N * torch.arange(B, device=x.device)[:, None]  # of (B × N, D): selecting rows is fastest
    return x.flatten(0, 1).index_select(0, rows.flatten()).view(B, -1, D)
