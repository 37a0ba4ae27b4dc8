"""The dense layer of our networks: `nn.Linear`, cheaper on a CPU in bf16.

There torch copies the bias over the whole result before it adds the product to it, and sums the bias's gradient over
all tokens in a pass of its own. Here the bias is added while the product is written (oneDNN), and its gradient is a
product with ones. Everywhere else, and where this torch has no such operator, it is `F.linear`. Results and their
gradients are the same bits; the bias's gradient differs by rounding in bf16 (tests/model/test_linear.py).
`Linear.plain = True` asks for `F.linear` everywhere.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_tracing  # type: ignore[attr-defined]


class Linear(nn.Linear):
    """x Wᵀ + b for x (…, in)."""

    plain: ClassVar[bool] = False

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: (…, in) to (…, out), in bf16 under autocast."""
    if bias is None or Linear.plain or not (_in_bf16_on_cpu(x, weight) and works()):
        return F.linear(x, weight, bias)
    kind = torch.bfloat16
    return _Product.apply(x.to(kind), weight.to(kind), bias.to(kind))


def _in_bf16_on_cpu(x: Tensor, weight: Tensor) -> bool:
    if x.device.type != "cpu" or x.numel() * len(weight) < _WORTH_IT:
        return False
    if torch.compiler.is_compiling() or is_tracing() or torch._C._are_functorch_transforms_active():
        return False  # they know `F.linear`
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16 and x.dtype != torch.float64
    return x.dtype == weight.dtype == torch.bfloat16


_WORTH_IT = 1 << 24
"""Multiplications below which the detour through Python costs more than it saves."""


class _Product(torch.autograd.Function):
    """x Wᵀ + b, all in bf16, W (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)  # not in `setup_context`: torch would look up the signature at every call
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            (rows.new_ones(1, len(rows)) @ rows)[0] if of_bias else None,
        )


@cache
def works() -> bool:
    """Whether torch has oneDNN's operator, and it does what it is called for: it is no promise of torch's."""
    layer, x, _ = sample(torch.bfloat16)
    try:
        found = _Product.apply(x, layer.weight, layer.bias)
    except (AttributeError, RuntimeError, TypeError):
        return False
    with torch.autocast("cpu", enabled=False):  # whoever asks may be under one
        wanted = F.linear(x.float(), layer.weight.float(), layer.bias.float())
    return torch.allclose(found.float(), wanted, rtol=0.02, atol=0.02)


def sample(kind: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """A dense layer from 64 to 32, something to put in and something to add: always the same, to try operators with."""
    with torch.random.fork_rng(devices=[]):  # who predicts must not move anyone's random numbers
        torch.default_generator.manual_seed(0)
        layer = nn.Linear(64, 32).requires_grad_(False)
        return layer.to(kind), torch.randn(5, 64).to(kind), torch.randn(5, 32).to(kind)
