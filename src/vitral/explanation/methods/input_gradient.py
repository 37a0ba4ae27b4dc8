"""Input × gradient: first-order change of the logit if a pixel is set to zero, for any network.

Source: Shrikumar et al., arXiv 1605.01713.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.libra import libra_backward
from vitral.explanation.methods.any_network import AnyNetwork
from vitral.explanation.methods.gradients import gradients_of, path_to
from vitral.explanation.methods.method import Maps, Method


@torch.enable_grad()
def input_gradient(model: nn.Module, images: Tensor, targets: Tensor, *, libra: bool = False) -> Maps:
    """Signed maps (B, T, rows, columns): input × gradient, summed over the channels and pixels of each patch.

    `libra` uses LibraGrad's backward pass.
    """
    if libra and isinstance(model, AnyNetwork):
        why = "LibraGrad's backward pass supports only the layers of vitral's networks"
        raise UsageError("libra cannot be used with this network", why=why, hint="leave libra out")
    path = path_to(model, images)
    with libra_backward(model) if libra else nullcontext():
        x, logits = path.at(1.0)
    gradients = [gradient.float() for (gradient,) in gradients_of(logits, targets, [x])]
    return Maps(path.products(torch.stack(gradients, dim=1)))


INPUT_GRADIENT = Method(
    "input-gradient",
    input_gradient,
    "input × gradient",
    "Shrikumar et al., arXiv 1605.01713",
    signed=True,
    any_network=True,
)
