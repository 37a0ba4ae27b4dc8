"""Grad-CAM: features of a late layer, each channel weighted by its mean gradient.

Source: Selvaraju et al., ICCV 2017, arXiv 1610.02391, equations 1 and 2.

In a ViT, features are the input tokens of a block, by default the last one: after it, patches have no gradient if the
head reads the class token. They are taken before the block's norm. Weights are means over patches only. In a BiT,
features are the last ones, after the final norm and ReLU; the head reads their mean, so the map equals CAM. In a
network of another library, they are the output of the named layer: maps, or tokens, of which the first `prefix` are no
patches.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.capture import require_vit
from vitral.explanation.methods.any_network import AnyNetwork, to_grid
from vitral.explanation.methods.gradients import block_inputs, gradients_of
from vitral.explanation.methods.method import Maps, Method, patches_of
from vitral.model import BiT


@torch.enable_grad()
def grad_cam(
    model: nn.Module, images: Tensor, targets: Tensor, *, layer: int | str = -1, prefix: int | None = None
) -> Maps:
    """Non-negative maps (B, T, rows, columns): relu(Σ_c w_c x_c).

    x are the input tokens of block `layer`; in an `AnyNetwork`, the output of the layer of this name without the first
    `prefix` tokens.
    """
    if isinstance(model, AnyNetwork):
        return _of_layer(model, images, targets, layer, prefix)
    if isinstance(model, BiT):
        with torch.no_grad():
            last = F.relu(model.norm(model.encode(images)))
        last = last.requires_grad_()
        logits = model.classify(last.mean((2, 3)))
        maps = [_weighted(last.flatten(2).mT, one.flatten(2).mT) for (one,) in gradients_of(logits, targets, [last])]
        return Maps(torch.stack(maps, dim=1).unflatten(-1, last.shape[2:]).cpu())
    network = require_vit(model)
    depth, prefix = len(network.blocks), network.config.prefix
    if isinstance(layer, str):
        raise UsageError(f"there is no layer '{layer}'", why="blocks go by their numbers", hint=f"layer={depth - 1}")
    if not -depth <= layer < depth:
        raise UsageError(f"there is no layer {layer}", why=f"the network has {depth}", hint=f"--layer 0 … {depth - 1}")
    with block_inputs(network, layer % depth) as inputs:
        logits = network(images)
    tokens = inputs[0]
    maps = [_weighted(tokens, one, prefix) for (one,) in gradients_of(logits, targets, [tokens])]
    return Maps(patches_of(torch.stack(maps, dim=1), network, images).cpu())


def _of_layer(model: AnyNetwork, images: Tensor, targets: Tensor, layer: int | str, prefix: int | None) -> Maps:
    """Maps of a named layer, on its own grid."""
    if not isinstance(layer, str):
        ends = model.layers_with_maps(images)[-3:]
        why = f"{model.title} has, among others, {', '.join(ends)}" if ends else f"{model.title} has layers by name"
        raise UsageError("grad-cam needs the name of a layer", why=why, hint=f"layer={(ends or ['NAME'])[-1]!r}")
    with model.begin_at(layer) as outputs:
        logits = model(images)
    if not outputs:
        raise UsageError(f"layer '{layer}' computed nothing", why="the network does not call it")
    features, grid = to_grid(outputs[-1], images, prefix)
    try:
        gradients = [to_grid(one, images, prefix)[0] for (one,) in gradients_of(logits, targets, [outputs[-1]])]
    except RuntimeError as error:
        if "graph" not in str(error) and "grad" not in str(error):
            raise
        raise UsageError(f"the logits do not depend on layer '{layer}'", why="it has no gradient") from None
    if outputs[-1].ndim == 3 and not any(bool(one.any()) for one in gradients):
        why = "the head reads another token, or nothing of this layer"
        raise UsageError(f"no gradient reaches the patches of layer '{layer}'", why=why, hint="choose an earlier layer")
    maps = [_weighted(features, one) for one in gradients]
    return Maps(torch.stack(maps, dim=1).unflatten(-1, grid).cpu())


def _weighted(features: Tensor, gradient: Tensor, prefix: int = 0) -> Tensor:
    """relu(Σ_c w_c x_c), (B, N) fp32, of features and their gradient (B, N, D)."""
    weights = gradient[:, prefix:].float().mean(1, keepdim=True)
    return (features.detach().float() * weights).sum(-1).relu()


GRAD_CAM = Method(
    "grad-cam", grad_cam, "Grad-CAM", "Selvaraju et al., arXiv 1610.02391, equations 1 and 2", any_network=True
)
