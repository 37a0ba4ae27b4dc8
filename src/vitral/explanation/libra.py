"""LibraGrad: a backward pass that conserves attribution (Mehri et al., CVPR 2025, arXiv 2411.16760).

If a network multiplies activations by a factor that also depends on the image (attention weights, 1/σ, a gate), the
plain gradient counts both factors. Then input × gradient plus bias × gradient does not add up to the logit; behind a
LayerNorm it is close to 0 (Proposition 3). Here one factor is constant in the backward pass, so that the network is a
linear function at this image, and the sum is the logit:

    attention      softmax(q kᵀ) is constant: gradients flow through the values alone
    norms          1/σ is constant; the mean is linear and stays (LayerNorm, GroupNorm)
    GELU, SiLU     x · gate(x) with the gate constant
    SwiGLU         a product of two such branches: each receives half of the gradient (Theorem 4)
    tanh           x · (tanh(x) / x) with the quotient constant (before the head, or on the logits)

ReLU, max pooling and standardized kernels are already linear at an image. The forward pass is unchanged up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from vitral import kernels
from vitral.explanation.capture import check_product, check_unedited, override, wide
from vitral.model import ViT
from vitral.model.config import Activation
from vitral.model.vit import MLP, Attention, AttentionPool


@contextmanager
def libra_backward(model: nn.Module) -> Iterator[None]:
    """Use LibraGrad's backward pass for `model`, a ViT or a BiT, in the `with` block.

    On exit everything is restored, so it may be nested with `capture` in either order.
    """
    with ExitStack() as undo:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm | nn.GroupNorm):
                undo.callback(module.register_forward_hook(_norm, prepend=True).remove)  # before other hooks
            elif isinstance(module, MLP):
                check_unedited("linear_activation")  # which `_activation` replaces
                override(undo, module, "backend", _activation)
            elif isinstance(module, Attention | AttentionPool):
                check_product(module, any_backend=True)  # which runs below, with q and k constant
                override(undo, module, "backend", partial(_attention, module.backend))
            elif isinstance(module, ViT):
                override(undo, module, "tanh", _tanh)
        yield


def _norm(module: nn.LayerNorm | nn.GroupNorm, inputs: tuple[Tensor], _: Tensor) -> Tensor:
    """Forward hook that replaces the output of a norm by one with constant 1/σ."""
    (x,) = inputs
    if isinstance(module, nn.LayerNorm):
        return _standardized(x, module.eps, module.weight, module.bias)
    groups = x.unflatten(1, (module.num_groups, -1)).flatten(2)
    shape = (-1, *[1] * (x.ndim - 2))
    normalized = _standardized(groups, module.eps, None, None).view_as(x)
    return normalized * module.weight.view(shape) + module.bias.view(shape)


def _standardized(x: Tensor, eps: float, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    y = wide(x)
    variance = y.detach().var(-1, correction=0, keepdim=True)
    y = (y - y.mean(-1, keepdim=True)) * (variance + eps).rsqrt()
    if weight is not None:
        y = y * weight
    return (y if bias is None else y + bias).to(x.dtype)


def _activation(x: Tensor, layer: nn.Module, activation: Activation) -> Tensor:
    """`MLP.backend` with constant gates."""
    x = kernels.linear(x, layer)
    if activation != "swiglu":
        return gated(x, _GATES[activation])
    gate, value = x.chunk(2, dim=-1)
    product = gated(gate, torch.sigmoid) * value
    return (product + product.detach()) / 2  # half the gradient, the full value


def gated(x: Tensor, gate: Callable[[Tensor], Tensor]) -> Tensor:
    """x · gate(x), with a constant gate in the backward pass."""
    y = wide(x)
    return (y * gate(y.detach())).to(x.dtype)


def _tanh_gate(x: Tensor) -> Tensor:
    """The tanh approximation of the normal distribution function."""
    return 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.special.ndtr,
    "gelu-tanh": _tanh_gate,
    "quick-gelu": lambda x: torch.sigmoid(1.702 * x),
    "silu": torch.sigmoid,
    "relu": lambda x: (x > 0).to(x.dtype),
}
"""Activation → the gate g of x · g(x)."""


def _tanh(x: Tensor) -> Tensor:
    return gated(x, lambda y: torch.where(y == 0, 1.0, torch.tanh(y) / torch.where(y == 0, 1.0, y)))


def _attention(backend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
    """Attention by `backend`, with a constant softmax(q kᵀ)."""
    return backend(q.detach(), k.detach(), v, **options)
