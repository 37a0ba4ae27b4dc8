"""Attention rollout: flow of information from patches to the head, through all layers.

Abnar & Zuidema (arXiv 2005.00928): A ← rownorm(mean over heads of A + I) for each layer, R = A_L … A_1. The map is the
row of R that the head reads. The ViT paper (D.8) says only "averaged across all heads, then recursively multiplied".

Only that row is propagated, from the last layer to the first: a vector–matrix product for each layer instead of a
matrix product. Only the head average (B, N, N) of each layer is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, Layer, capture, require_vit
from vitral.explanation.methods.method import Maps, Method, patches_of, readout
from vitral.model import ViT


@torch.no_grad()
def rollout(model: ViT, images: Tensor, targets: Tensor, *, identity: bool = True, discard: float = 0.0) -> Maps:
    """Maps (B, T, rows, columns), the same for every target.

    Without `identity`, the residual path is left out. `discard` is the fraction of the smallest attention weights of a
    layer, averaged over heads, to set to zero first.
    """
    network, layers = require_vit(model), {}

    def average(layer: Layer, attention: Tensor) -> None:
        layers[layer] = attention if layer == POOL else prepared(averaged(attention), identity, discard)

    with capture(network, reduce=average, explicit=True, prune_last_block=not discard):  # a share of the whole layer
        network(images)
    pooled = layers.pop(POOL, None)
    batch, _, tokens = layers[0].shape
    row = propagate(readout(network, tokens, batch, images.device, pooled), [layers[i] for i in sorted(layers)])
    maps = patches_of(row, network, images).cpu()
    return Maps(maps[:, None].expand(-1, targets.shape[1], -1, -1))


def averaged(attention: Tensor) -> Tensor:
    """Mean over heads, (B, N, N) in fp32 at least."""
    return attention.mean(1, dtype=torch.promote_types(attention.dtype, torch.float32))


def prepared(attention: Tensor, identity: bool, discard: float) -> Tensor:
    """Factor of one layer, (B, N, N) or its first rows, with rows that sum to 1.

    The column of the class token is never discarded.
    """
    rows, tokens = attention.shape[-2:]
    if discard > 0:
        count = int(discard * tokens * tokens)
        flat = attention.flatten(1).clone()
        protected = torch.zeros(tokens, tokens, dtype=torch.bool, device=flat.device)
        protected[:, 0] = True
        ranked = flat.masked_fill(protected.flatten(), torch.inf).argsort(dim=1)[:, :count]
        attention = flat.scatter(1, ranked, 0.0).unflatten(1, (tokens, tokens))
    if identity:
        attention = attention + torch.eye(rows, tokens, device=attention.device)
    return attention / attention.sum(-1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)


def propagate(row: Tensor, layers: list[Tensor]) -> Tensor:
    """row A_L … A_1, (B, N), for layers in execution order.

    The last layer may lack rows for which `row` is zero.
    """
    for attention in reversed(layers):
        row = (row[:, None, : attention.shape[1]].to(attention.dtype) @ attention)[:, 0]
    return row


ROLLOUT = Method(
    "rollout", rollout, "attention rollout", "Abnar & Zuidema, arXiv 2005.00928; ViT paper, D.8", routing=True
)
