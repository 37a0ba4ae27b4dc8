"""Attention maps of single heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.capture import POOL, Layer, capture, require_vit
from vitral.explanation.inspect.measure import check_images
from vitral.explanation.inspect.plain import PlainData
from vitral.explanation.methods.method import quiet, readout


@dataclass(frozen=True, eq=False)
class HeadMaps(PlainData):
    """Attention of each head from the tokens that the network's head reads to the patches of one image."""

    layers: tuple[Layer, ...]
    """Numbers of the blocks; `POOL` is a MAP head."""
    values: np.ndarray
    """(L, heads, rows, columns): attention to each patch."""
    elsewhere: np.ndarray
    """(L, heads): attention to prefix tokens; with `values` the sum is 1."""
    query: str
    """Description of the queries."""


@torch.no_grad()
def head_maps(model: nn.Module, image: Tensor, layers: int | Sequence[int] | None = None) -> HeadMaps:
    """Attention maps of each head for one standardized image (C, H, W) or (1, C, H, W), by default of all layers.

    The queries are the tokens that the network's head reads: the class token (with a distillation token, the mean of
    both), the mean of the pooled tokens, or the mean weighted by the attention of a MAP head. That attention is
    included as the last layer, `POOL`.
    """
    network = require_vit(model)
    images = image[None] if image.ndim == 3 else image
    check_images(images)
    if len(images) != 1:
        raise UsageError(f"{len(images)} images", why="head maps are of one image at a time")
    weight = next(network.parameters())
    with quiet(network), capture(network, [layers] if isinstance(layers, int) else layers) as captured:
        network(images.to(weight.device, weight.dtype))
    pooled = captured.attention(POOL) if POOL in captured.q else None
    tokens = captured.q[captured.layers[0]].shape[2]
    read = readout(network, tokens, 1, weight.device, pooled)[0]
    attention = [captured.attention(layer)[0] for layer in captured.layers]
    rows = [torch.einsum("i,hij->hj", read.to(one), one) for one in attention]
    recorded: tuple[Layer, ...] = captured.layers
    if pooled is not None:
        rows, recorded = [*rows, pooled[0, :, 0]], (*recorded, POOL)
    values = torch.stack([row.float() for row in rows]).cpu()
    first = network.config.prefix
    maps = values[..., first:].unflatten(-1, captured.grid).numpy()
    return HeadMaps(recorded, maps, values[..., :first].sum(-1).numpy(), _QUERIES[network.config.pool])


_QUERIES = {
    "cls": "the class token",
    "cls-mean": "the class token and the mean of all patches",
    "mean": "the mean of all patches",
    "mean-all": "the mean of all tokens",
    "map": "the tokens, weighted as the MAP head reads them",
}
