"""Grad-CAM: features of a late layer, each channel weighted by its gradient's mean over the places (Selvaraju et al.,
ICCV 2017, arXiv 1610.02391, equations 1 and 2).

In a ViT the features are the tokens that enter a block, the last one by default: after it the patches of a network that
reads its class token have no gradient any more. They are taken before the block's norm, as its other inputs see them.
Weights are means over the patches alone. In a BiT they are the last features, after the final norm and ReLU, which the
head reads by their mean: there it is the map of CAM.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.capture import plain
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import BiT


@torch.enable_grad()
def grad_cam(model: nn.Module, images: Tensor, targets: Tensor, *, layer: int = -1) -> Maps:
    """Maps (B, T, rows, columns), not negative: relu(Σ_c w_c x_c), from the tokens that enter block `layer`."""
    if isinstance(model, BiT):
        with torch.no_grad():
            last = F.relu(model.norm(model.encode(images)))
        last = last.requires_grad_()
        logits = model.classify(last.mean((2, 3)))
        maps = [_weighted(last.flatten(2).mT, one.flatten(2).mT) for (one,) in gradients_of(logits, targets, [last])]
        return Maps(torch.stack(maps, dim=1).unflatten(-1, last.shape[2:]).cpu())
    network = plain(model)
    depth, prefix = len(network.blocks), network.config.prefix
    if not -depth <= layer < depth:
        raise UsageError(f"there is no layer {layer}", why=f"the network has {depth}", hint=f"--layer 0 … {depth - 1}")
    with block_inputs(network, layer % depth) as inputs:
        logits = network(images)
    tokens = inputs[0]
    found = [_weighted(tokens, one, prefix) for (one,) in gradients_of(logits, targets, [tokens])]
    return Maps(patches_of(torch.stack(found, dim=1), network, images).cpu())


def _weighted(features: Tensor, gradient: Tensor, prefix: int = 0) -> Tensor:
    """(B, N) fp32 from features and their gradient, (B, N, D)."""
    weights = gradient[:, prefix:].float().mean(1, keepdim=True)
    return (features.detach().float() * weights).sum(-1).relu()


GRAD_CAM = Method(
    "grad-cam", grad_cam, "Grad-CAM", "Selvaraju et al., arXiv 1610.02391, equations 1 and 2", any_network=True
)
