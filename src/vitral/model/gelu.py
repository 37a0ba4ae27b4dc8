"""A dense layer and its GELU on a GPU, with one pass over the gradient on the way back.

From the gradient of the GELU's result follow the gradient of what it was given and, summed over all tokens, that of the
layer's bias. torch's compiler makes two kernels of it, each of which reads both tensors and computes the derivative;
the kernel here writes the one and sums the other as it goes. It is written in Triton, which torch's CUDA builds bring.
Where there is none, and everywhere else, the two are what they always are.
"""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

_TANH, _ERF = "tanh", "none"
"""torch's names for the two forms of GELU."""


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """GELU(x Wᵀ + b), all of one type, (…, in) to (…, out)."""
    return LinearGELU.apply(x, weight, bias, approximate)


def takes(x: Tensor) -> bool:
    """Whether it is taken: on a GPU under autocast in bf16, where there is a way back."""
    if x.device.type != "cuda" or LinearGELU.plain or not torch.is_grad_enabled():
        return False
    if not torch.is_autocast_enabled("cuda") or torch.get_autocast_dtype("cuda") != torch.bfloat16:
        return False
    return _TRITON


_TRITON = importlib.util.find_spec("triton") is not None
"""Looked for once: in the middle of a step, torch's compiler could not."""


class LinearGELU(torch.autograd.Function):
    """See `linear_gelu`. `plain = True` asks for the two by themselves everywhere."""

    plain: ClassVar[bool] = False

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, approximate: str) -> Tensor:
        before = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, before)
        ctx.approximate = approximate
        return F.gelu(before, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, before = ctx.saved_tensors
        gradient, of_bias = gelu_backward(gradients[0].contiguous(), before, ctx.approximate == _TANH)
        rows = gradient.flatten(0, -2)
        return gradient @ weight, rows.T @ x.flatten(0, -2), of_bias.to(weight.dtype), None


@torch.library.custom_op("vitral::gelu_backward", mutates_args=())
def gelu_backward(gradient: Tensor, before: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Of the gradient of GELU's result (…, n) and what it was given: the gradient of that, and its sum (n,), fp32."""
    found = torch.ops.aten.gelu_backward(gradient.float(), before.float(), approximate=_TANH if tanh else _ERF)
    return found.to(before.dtype), found.flatten(0, -2).sum(0)


@gelu_backward.register_fake
def _(gradient: Tensor, before: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(before), before.new_empty(before.shape[-1], dtype=torch.float32)


@gelu_backward.register_kernel("cuda")
def _(gradient: Tensor, before: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    from vitral.model.gelu_kernel import launch

    return launch(gradient, before, tanh)
