"""Gradient × attention: attention, as far as more of it would have raised the class's logit, followed through all
layers (Chefer, Gur & Wolf, ICCV 2021, arXiv 2103.15679, equations 5 and 6).

R = I; per layer Ā = mean over heads of relu(∂y/∂A ⊙ A) and R ← R + Ā R; the map is what the head reads of R − I, where
I, each token's relevance to itself, says nothing of what was gathered. Only that row is propagated, from the last layer
to the first: row ← row + row Ā, a vector times a matrix for each layer.

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
    with capture(network, graph=True) as seen, block_inputs(network):
        logits = network(images)
    pooled = network.config.pool == "map"
    layers = [*seen.layers, *([POOL] if pooled else [])]
    found = list(gradients_of(logits, targets, [seen.mixed[layer] for layer in layers]))
    with torch.no_grad():
        q = seen.q[0]
        read = wide(readout(network, q.shape[2], len(q), q.device).to(q.dtype))
        own = torch.zeros_like(read) if pooled else read  # a MAP head's query is none of the tokens
        gathered = [torch.zeros_like(read) for _ in found]
        # A layer's attention is computed once, for all targets, and dropped: never two layers' (B, heads, N, N).
        for place, layer in reversed(list(enumerate(layers))):
            attention = seen.attention(layer)
            for t, one in enumerate(found):
                weighted = _positive(attention, seen.attention_gradient(layer, one[place]))
                row = weighted if layer == POOL else (own + gathered[t])[:, None] @ weighted
                gathered[t] = gathered[t] + row[:, 0]
        return Maps(patches_of(torch.stack(gathered, dim=1), network, images).float().cpu())


def _positive(attention: Tensor, gradient: Tensor) -> Tensor:
    """Mean over heads of relu(∂y/∂A ⊙ A), (B, queries, N)."""
    return (attention * gradient).relu_().mean(1)


GENERIC = Method("generic", generic, "gradient × attention", "Chefer, Gur & Wolf, arXiv 2103.15679, equations 5 and 6")
