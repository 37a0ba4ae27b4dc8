"""Similarity of layers by linear CKA."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitral.device import to_float64
from vitral.explanation.capture import INPUT, Captured, Layer, wide
from vitral.explanation.inspect.plain import PlainData

LEAST_FOR_CKA = 4
"""Images: the unbiased estimator divides by n − 3."""


@dataclass(frozen=True, eq=False)
class Likeness(PlainData):
    """Linear CKA between the representations of layers."""

    layers: tuple[Layer, ...]
    """`INPUT`, the input of the first block, then numbers of blocks."""
    values: np.ndarray
    """(L + 1, L + 1): linear CKA; NaN if a layer is constant over images."""
    images: int
    batch: int
    measure: str = "linear CKA, unbiased minibatch estimate, over all tokens"


class LikenessObserver:
    """Accumulate HSIC of all pairs of layers over batches."""

    def __init__(self) -> None:
        self.sums: np.ndarray | None = None
        self.images, self.batch = 0, 0

    def attention(self, layer: Layer, attention: Tensor) -> None:
        """Ignored: only tokens count."""

    def tokens(self, captured: Captured) -> None:
        """Add a batch."""
        count = len(captured.tokens[INPUT])
        if count < LEAST_FOR_CKA:
            return
        kernels = torch.stack([gram(captured.tokens[layer]) for layer in (INPUT, *captured.layers)])
        sums = hsic(kernels).numpy()
        self.sums = sums if self.sums is None else self.sums + sums
        self.images, self.batch = self.images + count, max(self.batch, count)

    def result(self, layers: tuple[int, ...], images: int) -> Likeness:
        """CKA from the accumulated HSIC."""
        assert self.sums is not None
        own = np.diagonal(self.sums)
        size = np.sqrt(np.where(own > 0, own, np.nan))
        return Likeness((INPUT, *layers), self.sums / (size[:, None] * size[None]), self.images, self.batch)


def gram(tokens: Tensor) -> Tensor:
    """Gram matrix X Xᵀ (B, B) in fp64, on the CPU, of centered representations (B, …); computed on the device unless it
    is mps. Centering only reduces rounding errors.
    """
    x = wide(tokens).flatten(1)
    x = to_float64(x - x.mean(0))
    return (x @ x.T).cpu()


def hsic(kernels: Tensor) -> Tensor:
    """Unbiased HSIC (L, L) of all pairs of kernels (L, n, n), n ≥ 4; Song et al. 2012, equation 5."""
    n = kernels.shape[-1]
    off = kernels * (1 - torch.eye(n, dtype=kernels.dtype, device=kernels.device))
    rows = off.sum(-1)
    totals = rows.sum(-1)
    traces = off.flatten(1) @ off.flatten(1).T  # tr(K L) of symmetric kernels
    both = torch.outer(totals, totals) / ((n - 1) * (n - 2))
    return (traces + both - 2 / (n - 2) * (rows @ rows.T)) / (n * (n - 3))
