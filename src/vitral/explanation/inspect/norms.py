"""Token norms of each layer, with outliers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitral.explanation.capture import Captured, Layer, wide
from vitral.explanation.inspect.plain import PlainData
from vitral.model import ViT

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


@dataclass(frozen=True, eq=False)
class TokenNorms(PlainData):
    """Token norms after each block."""

    layers: tuple[int, ...]
    quantiles: np.ndarray
    """(L, 7): `QUANTILES` of the patches' norms."""
    prefix: np.ndarray
    """(L, prefix): mean norm of each token before the patches."""
    prefix_names: tuple[str, ...]
    threshold: np.ndarray
    """(L,): norm above which a patch is an outlier."""
    outliers: np.ndarray
    """(L,): number of outliers."""
    where: np.ndarray
    """(L, rows, columns): number of images with an outlier at this position."""
    rule: str
    images: int
    norms: np.ndarray
    """(L, B, N): norm of every patch; not in `to_json`."""

    _left_out = ("norms",)

    @property
    def outlier_share(self) -> np.ndarray:
        """(L,): share of outliers among all patches of all images."""
        return self.outliers / self.norms[0].size


RULE = "norm > 2 × median and > median + 6 × MAD of the layer's patches (MAD: median distance from the median)"


class NormsObserver:
    """Collect the norms of all tokens."""

    def __init__(self, network: ViT, grid: tuple[int, int]):
        self.network, self.grid = network, grid
        self.parts: dict[int, list[Tensor]] = {}

    def attention(self, layer: Layer, attention: Tensor) -> None:
        """Ignored: only tokens count."""

    def tokens(self, captured: Captured) -> None:
        """Add a batch."""
        for layer in captured.layers:
            self.parts.setdefault(layer, []).append(wide(captured.tokens[layer]).norm(dim=-1).cpu())

    def result(self, layers: tuple[int, ...], images: int) -> TokenNorms:
        """Statistics of the collected norms."""
        config = self.network.config
        every = torch.stack([torch.cat(self.parts[layer]) for layer in layers]).double().numpy()
        prefix, norms = every[:, :, : config.prefix], every[:, :, config.prefix :]
        flat = norms.reshape(len(layers), -1)
        median = np.median(flat, axis=1)
        spread = np.median(np.abs(flat - median[:, None]), axis=1)
        threshold = np.maximum(2 * median, median + 6 * spread)
        above = norms > threshold[:, None, None]
        where = above.sum(axis=1).reshape(-1, *self.grid)
        return TokenNorms(
            layers,
            np.quantile(flat, QUANTILES, axis=1).T,
            prefix.mean(axis=1),
            prefix_names(self.network),
            threshold,
            above.sum(axis=(1, 2)),
            where,
            RULE,
            images,
            norms.astype(np.float32),
        )


def prefix_names(network: ViT) -> tuple[str, ...]:
    """Names of the tokens before the patches, in order."""
    config = network.config
    registers = tuple(f"register {i + 1}" for i in range(config.registers))
    return ("class",) * config.cls_token + ("distillation",) * config.dist_token + registers
