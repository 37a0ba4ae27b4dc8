"""AttCAT: token × gradient, weighted by how much the token is attended to, with LibraGrad's backward pass.

Sources: Qiang et al., NeurIPS 2022; Mehri et al., CVPR 2025, arXiv 2411.16760.

Σ_l α_l ⊙ CAT_l: CAT_l = Σ_c x ∂y/∂x of the tokens x that enter block l, and α_l the attention that each of them
receives in that block, a mean over heads and queries. (After the last block the patches of a network that reads its
class token have no gradient, so tokens are taken where attention meets them, before the block.)
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from vitral.explanation.capture import POOL, capture, plain
from vitral.explanation.libra import libra as balanced
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import ViT


@torch.enable_grad()
def attcat(model: ViT, images: Tensor, targets: Tensor, *, libra: bool = True) -> Maps:
    """Maps (B, T, rows, columns), signed; without `libra` by the plain gradient."""
    network, received = plain(model), []

    def keep(layer: int, attention: Tensor) -> None:
        if layer != POOL:
            received.append(attention.mean((1, 2)))

    with (
        capture(network, reduce=keep),
        balanced(network) if libra else nullcontext(),
        block_inputs(network) as inputs,
    ):
        logits = network(images)
    found = [
        torch.stack([a * (x * g).float().sum(-1) for a, x, g in zip(received, inputs, gradients, strict=True)]).sum(0)
        for gradients in gradients_of(logits, targets, inputs)
    ]
    return Maps(patches_of(torch.stack(found, dim=1).detach(), network, images).float().cpu())


ATTCAT = Method(
    "attcat", attcat, "AttCAT with LibraGrad", "Qiang et al., NeurIPS 2022; Mehri et al., arXiv 2411.16760", signed=True
)
