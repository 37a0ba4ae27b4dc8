"""Mean attention distance of each head (Figure 7, right; appendix D.7)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from vitral.explanation.capture import POOL, Captured, Layer
from vitral.explanation.inspect.plain import PlainData, to_plain
from vitral.model import ViT

Prefix = Literal["drop", "keep"]
PREFIXES = ("drop", "keep")
"""Treatment of prefix tokens in attention distance and entropy; see `attention_distance`."""


@dataclass(frozen=True, eq=False)
class AttentionDistance(PlainData):
    """Mean attention distance and entropy of each head."""

    layers: tuple[int, ...]
    distance: np.ndarray
    """(L, heads) pixels: mean over queries and images of Σ_j a_ij ‖p_i − p_j‖."""
    entropy: np.ndarray
    """(L, heads) nats: mean over queries and images of −Σ_j a_ij ln a_ij."""
    keys: int
    """Number of keys; ln(keys) is the maximum entropy."""
    uniform: float
    """Pixels: distance of a head with uniform attention."""
    local: float
    """Pixels: distance of a head with uniform attention to its own patch and the (up to 8) neighbors."""
    local_entropy: float
    """Nats: entropy of that local head."""
    prefix: Prefix
    grid: tuple[int, int]
    patch: tuple[int, int]
    images: int

    @property
    def entropy_share(self) -> np.ndarray:
        """(L, heads): entropy divided by the maximum ln(keys); 0 for a single key."""
        return self.entropy / math.log(self.keys) if self.keys > 1 else np.zeros_like(self.entropy)

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return super().to_json() | {"entropy_share": to_plain(self.entropy_share)}


class AttentionObserver:
    """Accumulate distance and entropy over queries, for each layer and head."""

    def __init__(self, network: ViT, grid: tuple[int, int], prefix: Prefix):
        self.network, self.grid, self.prefix = network, grid, prefix
        self.sums: dict[Layer, Tensor] = {}  # layer → (3, heads): distance, entropy, queries
        self.distances: Tensor | None = None

    def attention(self, layer: Layer, attention: Tensor) -> None:
        """Add the attention (B, heads, N, N) of a layer."""
        if layer == POOL:
            return
        if self.distances is None:
            self.distances = patch_distances(self.grid, self.network.config.patch).to(attention)
        first = self.network.config.prefix
        rows = attention[:, :, first:]
        patches = rows[..., first:]
        far = (patches * self.distances).sum(-1)
        if self.prefix == "keep":
            counted, spread = torch.ones_like(far), torch.special.entr(rows).sum(-1)
        else:  # entropy of a/s is Σ −a ln a / s + ln s
            total = patches.sum(-1)
            counted = (total > torch.finfo(total.dtype).tiny).to(total.dtype)
            total = torch.where(counted > 0, total, 1.0)
            far, spread = far / total, torch.special.entr(patches).sum(-1) / total + total.log()
        sums = torch.stack([(x * counted).cpu().double().sum((0, 2)) for x in (far, spread, torch.ones_like(far))])
        self.sums[layer] = self.sums.get(layer, torch.zeros_like(sums)) + sums

    def tokens(self, captured: Captured) -> None:
        """Ignored: only attention counts."""

    def result(self, layers: tuple[int, ...], images: int) -> AttentionDistance:
        """Means over all queries."""
        sums = torch.stack([self.sums[layer] for layer in layers]).numpy()
        config = self.network.config
        queries = np.where(sums[:, 2] > 0, sums[:, 2], np.nan)
        keys = self.grid[0] * self.grid[1] + (config.prefix if self.prefix == "keep" else 0)
        local, spread = local_attention(self.grid, config.patch)
        return AttentionDistance(
            layers,
            sums[:, 0] / queries,
            sums[:, 1] / queries,
            keys,
            uniform_attention(self.grid, config.patch),
            local,
            spread,
            self.prefix,
            self.grid,
            config.patch,
            images,
        )


def patch_distances(grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Distances (N, N) in pixels between the centers of patches, fp32."""
    sides = [torch.arange(n, dtype=torch.float32) * side for n, side in zip(grid, patch, strict=True)]
    centers = torch.cartesian_prod(*sides)
    return torch.cdist(centers, centers, compute_mode="donot_use_mm_for_euclid_dist")


def uniform_attention(grid: tuple[int, int], patch: tuple[int, int]) -> float:
    """Mean attention distance in pixels of uniform attention.

    Σ over offsets (u, v) of the number of pairs, (rows − |u|)(columns − |v|), times their distance √((u p)² + (v q)²),
    divided by N².
    """
    pairs, offsets = zip(*((n - np.abs(u), u) for n in grid for u in [np.arange(1 - n, n)]), strict=True)
    far = np.hypot(offsets[0][:, None] * patch[0], offsets[1][None] * patch[1])
    return float(pairs[0] @ far @ pairs[1]) / (grid[0] * grid[1]) ** 2


def local_attention(grid: tuple[int, int], patch: tuple[int, int]) -> tuple[float, float]:
    """Mean distance in pixels and mean entropy in nats of uniform attention to a patch and its neighbors."""
    far, near = np.zeros(grid), np.zeros(grid)
    rows, columns = np.arange(grid[0])[:, None], np.arange(grid[1])[None]
    for u in (-1, 0, 1):
        for v in (-1, 0, 1):
            inside = (rows + u >= 0) & (rows + u < grid[0]) & (columns + v >= 0) & (columns + v < grid[1])
            far += inside * math.hypot(u * patch[0], v * patch[1])
            near += inside
    return float((far / near).mean()), float(np.log(near).mean())
