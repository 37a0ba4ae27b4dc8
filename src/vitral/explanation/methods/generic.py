"""Gradient × attention, propagated through all layers.

Source: Chefer, Gur & Wolf, ICCV 2021, arXiv 2103.15679, equations 5 and 6.

R = I; for each layer Ā = mean over heads of relu(∂y/∂A ⊙ A) and R ← R + Ā R. The map is the row of R − I that the head
reads; I is each token's relevance to itself, which carries no information. Only that row is propagated, from the last
layer to the first, in the order of the backward pass: row ← row + row Ā, a vector–matrix product for each layer.

The row belongs to the class token, as in the paper. With a distillation token, it is the mean of both rows, and with
mean pooling the same mean of rows. The query of a MAP head is one more token with its own attention: the row starts as
mean over heads of relu(∂y/∂A ⊙ A) of that attention (the paper's rule for cross-attention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, Layer, capture, require_vit, wide
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of, readout
from vitral.model import ViT


@torch.enable_grad()
def generic(model: ViT, images: Tensor, targets: Tensor) -> Maps:
    """Non-negative maps (B, T, rows, columns)."""
    network = require_vit(model)
    rows: list[Tensor] = []
    """Accumulated row (B, N) of each target; the last one is in progress."""

    def propagate(layer: Layer, product: Tensor) -> None:
        positive = product.relu_()
        if layer == POOL:
            rows[-1] = wide(positive)[:, :, 0].mean(1)
        else:  # head by head, then the mean of rows, so that no mean of matrices is computed
            row = (own + rows[-1])[:, None, None, : positive.shape[2]].to(positive.dtype)
            rows[-1] = rows[-1] + wide(row @ positive)[:, :, 0].mean(1)

    with capture(network, backward=propagate, prune_last_block=True) as captured, block_inputs(network):
        logits = network(images)
        values = captured.v[0]
        read = readout(network, values.shape[2], len(values), images.device).to(wide(logits).dtype)
        own = torch.zeros_like(read) if network.config.pool == "map" else read  # whose query is no token
        gradients = gradients_of(logits, targets, [values])
        for _ in range(targets.shape[1]):
            rows.append(torch.zeros_like(read))
            next(gradients)
    return Maps(patches_of(torch.stack(rows, dim=1), network, images).float().cpu())


GENERIC = Method("generic", generic, "gradient × attention", "Chefer, Gur & Wolf, arXiv 2103.15679, equations 5 and 6")
