"""Input × gradient: what the logit would lose, to first order, if a pixel went to zero, for any network (Shrikumar et
al., arXiv 1605.01713).
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from vitral.explanation.libra import libra as balanced
from vitral.explanation.methods.gradients import gradients_of, way_to
from vitral.explanation.methods.method import Maps, Method


@torch.enable_grad()
def input_gradient(model: nn.Module, images: Tensor, targets: Tensor, *, libra: bool = False) -> Maps:
    """Maps (B, T, rows, columns): input × gradient, signed, summed over the channels and pixels of each patch; with
    `libra` with LibraGrad's backward pass.
    """
    way = way_to(model, images)
    with balanced(model) if libra else nullcontext():
        x, logits = way.at(1.0)
    found = [gradient.float() for (gradient,) in gradients_of(logits, targets, [x])]
    return Maps(way.products(torch.stack(found, dim=1)))


INPUT_GRADIENT = Method(
    "input-gradient",
    input_gradient,
    "input × gradient",
    "Shrikumar et al., arXiv 1605.01713",
    signed=True,
    any_network=True,
)
