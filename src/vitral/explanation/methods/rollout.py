"""Attention rollout: how information could flow from patches to what the head reads, through all layers.

Abnar & Zuidema (arXiv 2005.00928): A ← rownorm(mean over heads of A + I) for each layer, R = A_L … A_1; what is shown
is the row that the head reads. The ViT paper (D.8) says only "averaged across all heads, then recursively multiplied".

Only that row is propagated, from the last layer to the first: a vector times a matrix for each layer instead of a
product of matrices, and the averaged (B, N, N) of a layer is all that is kept of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, capture, plain
from vitral.explanation.methods.method import Maps, Method, patches_of, readout
from vitral.model import ViT


@torch.no_grad()
def rollout(model: ViT, images: Tensor, targets: Tensor, *, identity: bool = True, discard: float = 0.0) -> Maps:
    """Maps (B, T, rows, columns), the same for every target. Without `identity` the residual path is left out (raw);
    `discard` is the share of the smallest attentions of a layer, averaged over heads, that is set to zero first.
    """
    network, layers = plain(model), {}

    def average(layer: int, attention: Tensor) -> None:
        layers[layer] = attention if layer == POOL else prepared(averaged(attention), identity, discard)

    with capture(network, reduce=average, once=True, lean=not discard):  # a share of a layer is of all of it
        network(images)
    pooled = layers.pop(POOL, None)
    batch, _, tokens = layers[0].shape
    row = propagate(readout(network, tokens, batch, images.device, pooled), [layers[i] for i in sorted(layers)])
    maps = patches_of(row, network, images).cpu()
    return Maps(maps[:, None].expand(-1, targets.shape[1], -1, -1))


def averaged(attention: Tensor) -> Tensor:
    """The mean over heads, (B, N, N) in fp32 at least."""
    return attention.mean(1, dtype=torch.promote_types(attention.dtype, torch.float32))


def prepared(attention: Tensor, identity: bool, discard: float) -> Tensor:
    """One layer's (B, N, N), or its first rows, as rollout multiplies it: rows sum to 1. The class token's column is
    never discarded.
    """
    rows, tokens = attention.shape[-2:]
    if discard > 0:
        count = int(discard * tokens * tokens)
        flat = attention.flatten(1).clone()
        spared = torch.zeros(tokens, tokens, dtype=torch.bool, device=flat.device)
        spared[:, 0] = True
        ranked = flat.masked_fill(spared.flatten(), torch.inf).argsort(dim=1)[:, :count]
        attention = flat.scatter(1, ranked, 0.0).unflatten(1, (tokens, tokens))
    if identity:
        attention = attention + torch.eye(rows, tokens, device=attention.device)
    return attention / attention.sum(-1, keepdim=True).clamp_min(torch.finfo(attention.dtype).tiny)


def propagate(row: Tensor, layers: list[Tensor]) -> Tensor:
    """row A_L … A_1, (B, N), for layers in the order in which they run; of the last one, rows that `row` has nothing
    for may be absent.
    """
    for attention in reversed(layers):
        row = (row[:, None, : attention.shape[1]] @ attention)[:, 0]
    return row


ROLLOUT = Method(
    "rollout", rollout, "attention rollout", "Abnar & Zuidema, arXiv 2005.00928; ViT paper, D.8", routing=True
)
