"""AttCAT: token × gradient, weighted by the attention that the token receives, with LibraGrad's backward pass.

Sources: Qiang et al., NeurIPS 2022; Mehri et al., CVPR 2025, arXiv 2411.16760.

The map is Σ_l α_l ⊙ CAT_l: CAT_l = Σ_c x ∂y/∂x of the input tokens x of block l, and α_l the attention that each of
them receives in that block, the mean over heads and queries. (Tokens are taken before the block, because after the last
block patches have no gradient if the head reads the class token.)
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, Layer, capture, require_vit
from vitral.explanation.libra import libra_backward
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import ViT


@torch.enable_grad()
def attcat(model: ViT, images: Tensor, targets: Tensor, *, libra: bool = True) -> Maps:
    """Signed maps (B, T, rows, columns); without `libra`, by the plain gradient."""
    network, received = require_vit(model), []

    def keep(layer: Layer, attention: Tensor) -> None:
        if layer != POOL:
            received.append(attention.mean((1, 2)))

    with (
        capture(network, reduce=keep),
        libra_backward(network) if libra else nullcontext(),
        block_inputs(network) as inputs,
    ):
        logits = network(images)
    maps = [
        torch.stack([a * (x * g).float().sum(-1) for a, x, g in zip(received, inputs, gradients, strict=True)]).sum(0)
        for gradients in gradients_of(logits, targets, inputs)
    ]
    return Maps(patches_of(torch.stack(maps, dim=1).detach(), network, images).float().cpu())


ATTCAT = Method(
    "attcat", attcat, "AttCAT with LibraGrad", "Qiang et al., NeurIPS 2022; Mehri et al., arXiv 2411.16760", signed=True
)
