"""Gradient × attention: attention, as far as more of it would have raised the class's logit, followed through all
layers (Chefer, Gur & Wolf, ICCV 2021, arXiv 2103.15679, equations 5 and 6).

R = I; per layer Ā = mean over heads of relu(∂y/∂A ⊙ A) and R ← R + Ā R; the map is what the head reads of R − I, where
I, each token's relevance to itself, says nothing of what was gathered. Only that row is propagated, from the last layer
to the first, as the backward pass goes: row ← row + row Ā, a vector times a matrix for each layer.

What the head reads: the class token's row, as in the paper (with a distillation token the mean of both rows); where
it takes a mean, the same mean of the rows. A MAP head's query is one more token, which gathers by an attention of its
own: the row begins as mean over heads of relu(∂y/∂A ⊙ A) of that attention (the paper's rule for cross-attention).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, capture, plain, wide
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of, readout
from vitral.model import ViT


@torch.enable_grad()
def generic(model: ViT, images: Tensor, targets: Tensor) -> Maps:
    """Maps (B, T, rows, columns), not negative."""
    network = plain(model)
    rows: list[Tensor] = []
    """What is gathered so far, (B, N), of each target; the last one is being followed."""

    def gather(layer: int, product: Tensor) -> None:
        raising = product.relu_()
        if layer == POOL:
            rows[-1] = wide(raising)[:, :, 0].mean(1)
        else:  # each head by itself, and the mean of the rows: no mean of matrices is ever made
            row = (own + rows[-1])[:, None, None, : raising.shape[2]].to(raising.dtype)
            rows[-1] = rows[-1] + wide(row @ raising)[:, :, 0].mean(1)

    with capture(network, backward=gather, lean=True) as seen, block_inputs(network):
        logits = network(images)
        values = seen.v[0]
        read = readout(network, values.shape[2], len(values), images.device).to(wide(logits).dtype)
        own = torch.zeros_like(read) if network.config.pool == "map" else read  # a MAP head's query is none of them
        gradients = gradients_of(logits, targets, [values])
        for _ in range(targets.shape[1]):
            rows.append(torch.zeros_like(read))
            next(gradients)
    return Maps(patches_of(torch.stack(rows, dim=1), network, images).float().cpu())


GENERIC = Method("generic", generic, "gradient × attention", "Chefer, Gur & Wolf, arXiv 2103.15679, equations 5 and 6")
