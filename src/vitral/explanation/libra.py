"""LibraGrad: a backward pass that neither loses nor invents attribution (Mehri et al., CVPR 2025, arXiv 2411.16760).

Where a network multiplies what it computed by something that also depends on the picture (attention weights, one over
a standard deviation, a gate), the plain gradient counts both factors, and input × gradient plus bias × gradient no
longer adds up to the logit: behind a LayerNorm it is close to nothing (Proposition 3). Here one factor is a constant of
the backward pass, so that the network is the linear function that it is at this picture, and the sum is the logit:

    attention      softmax(q kᵀ) is constant: gradients flow through the values alone
    norms          1/σ is constant; the mean is linear and stays (LayerNorm, GroupNorm)
    GELU, SiLU     x · gate(x) with the gate constant
    SwiGLU         a product of two such branches: each receives half of the gradient (Theorem 4)
    tanh           x · (tanh(x) / x) with the quotient constant (before the head, or on the logits)

ReLU, the maximum of a root and standardised kernels are linear at a picture already. What the network computes is
unchanged up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vitral.explanation.capture import wide
from vitral.model import ViT
from vitral.model.vit import MLP, Attention, AttentionPool


@contextmanager
def libra(model: nn.Module) -> Iterator[None]:
    """While this is open, `model` (a ViT or a BiT) computes the same with LibraGrad's backward pass.

    Where both are wanted, open it inside `capture`: it puts back what it found.
    """
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.GroupNorm):
                _replace(undo, module, "forward", _norm(module))
            elif isinstance(module, MLP):
                _replace(undo, module, "forward", _mlp(module))
            elif isinstance(module, Attention | AttentionPool):
                _replace(undo, module, "attend", _attend(module.attend))
            elif isinstance(module, ViT):
                _replace(undo, module, "classify", _classify(module))
        yield


def _replace(undo: ExitStack, owner: nn.Module, name: str, function: Callable[..., Tensor]) -> None:
    own = vars(owner)
    if name in own:
        undo.callback(setattr, owner, name, own[name])
    else:
        undo.callback(own.pop, name, None)
    setattr(owner, name, function)


def _norm(module: nn.LayerNorm | nn.GroupNorm) -> Callable[[Tensor], Tensor]:
    def layer_norm(x: Tensor) -> Tensor:
        return scaled(x, module.weight, module.bias)

    def group_norm(x: Tensor) -> Tensor:
        groups = x.unflatten(1, (module.num_groups, -1)).flatten(2)
        shape = (-1, *[1] * (x.ndim - 2))
        normalised = scaled(groups, None, None).view_as(x)
        return normalised * module.weight.view(shape) + module.bias.view(shape)

    def scaled(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        y = wide(x)
        variance = y.detach().var(-1, correction=0, keepdim=True)
        y = (y - y.mean(-1, keepdim=True)) * (variance + module.eps).rsqrt()
        if weight is not None:
            y = y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    return layer_norm if isinstance(module, nn.LayerNorm) else group_norm


def _mlp(module: MLP) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        x = module.fc1(x)
        if module.activation == "swiglu":
            gate, value = x.chunk(2, dim=-1)
            product = gated(gate, torch.sigmoid) * value
            x = (product + product.detach()) / 2  # half the gradient, all of the value
        else:
            x = gated(x, _tanh_gate if module.activation == "gelu-tanh" else torch.special.ndtr)
        return module.fc2(x)

    return forward


def gated(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """x · gate(x), the gate constant in the backward pass."""
    y = wide(x)
    return (y * gate(y.detach())).to(x.dtype)


def _tanh_gate(x: Tensor) -> Tensor:
    """The tanh approximation of the normal distribution function."""
    return 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def _tanh(x: Tensor) -> Tensor:
    return gated(x, lambda y: torch.where(y == 0, 1.0, torch.tanh(y) / torch.where(y == 0, 1.0, y)))


def _attend(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return original(q.detach(), k.detach(), v, mask)

    return attend


def _classify(network: ViT) -> Callable[[Tensor], Tensor]:
    config, original = network.config, network.classify

    def classify(x: Tensor) -> Tensor:
        parts: Any = network
        if config.dist_token or not (config.pre_logits or config.logits_tanh):
            return original(x)
        if config.pre_logits:
            x = _tanh(parts.pre_logits(x))
        if config.classes:
            x = parts.head(x)
        return _tanh(x) * config.logit_scale if config.logits_tanh else x

    return classify
