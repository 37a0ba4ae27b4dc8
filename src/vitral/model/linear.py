"""The dense layer of our networks: `nn.Linear`, cheaper on a CPU.

In bf16 torch copies the bias over the whole result before it adds the product to it, and sums the bias's gradient over
all tokens in a pass of its own. Here the bias is added while the product is written (oneDNN), and its gradient is a
product with ones. Results and their gradients are the same bits; the bias's gradient differs by rounding. On a
processor that `avx512` is for, its kernels compute all of this, and the weight's gradient in fp32.

In fp32 torch multiplies by MKL, which leaves more than half of an AMD processor's AVX-512 unused (docs/log.md): there
oneDNN computes all three products of a layer, which differ by the order of sums.

Everywhere else, and where this torch has no such operator, it is `F.linear` (tests/model/test_linear.py).
`plainly` asks for torch's own operators in all of a network.
"""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.nn.modules.module import _has_any_global_hook

from vitral.model import avx512


class Linear(nn.Linear):
    """x Wᵀ + b for x (…, in)."""

    plain = False
    """Ask for `F.linear` everywhere; `plainly` asks all layers of a network."""

    def forward(self, x: Tensor) -> Tensor:
        return (F.linear if self.plain else linear)(x, self.weight, self.bias)


def plainly(network: nn.Module) -> None:
    """Have all layers of a network computed by torch's own operators alone from now on: slower, and what the kernels
    here and on a GPU, and the products by oneDNN, are held against.
    """
    layer: Any
    for layer in network.modules():
        if hasattr(type(layer), "plain"):
            layer.plain = True


def as_made(layer: nn.Module, kind: type[nn.Module] = Linear) -> bool:
    """Whether a layer is one of these, and nobody watches or changes what it computes."""
    if type(layer) is not kind or "forward" in vars(layer):
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return not any(hooks) and not _has_any_global_hook()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: (…, in) to (…, out), under autocast in its precision."""
    kind = _kind(x, weight, bias)
    if kind is None:
        return F.linear(x, weight, bias)
    return _Product.apply(x.to(kind), weight, None if bias is None else bias.to(kind))


def by_kernels(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear` of the numbers of `x`, in rows as wide as the weight is, is computed by `avx512`."""
    if not _known(x, weight) or _precision(x, weight) != torch.bfloat16:
        return False
    return avx512.serves(x, weight, width=weight.shape[1])


def _kind(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """What oneDNN or `avx512` shall compute in; None where torch does it as well."""
    if not _known(x, weight):
        return None
    kind = _precision(x, weight)
    if kind == torch.bfloat16:
        wanted = bias is not None or avx512.serves(x, weight)
    else:
        wanted = kind == torch.float32 and _mkl_is_slow()
    return kind if wanted and works() else None


def _known(x: Tensor, weight: Tensor) -> bool:
    """Whether this is a product on a CPU that is worth a detour, and nobody follows it who knows `F.linear` alone."""
    if torch.compiler.is_compiling() or is_tracing() or torch._C._are_functorch_transforms_active():
        return False  # asked for the number of rows first, they would hold on to the answer
    return x.device.type == "cpu" and x.numel() * len(weight) >= _WORTH_IT and forward_ad._current_level < 0


def _precision(x: Tensor, weight: Tensor) -> torch.dtype | None:
    if not torch.is_autocast_enabled("cpu"):
        return x.dtype if x.dtype == weight.dtype else None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype("cpu")


_WORTH_IT = 1 << 24
"""Multiplications below which the detour through Python costs more than it saves."""


@cache
def _mkl_is_slow() -> bool:
    """Told by the processor and never by a trial, or the same seed would not always give the same bits."""
    if not torch.backends.mkl.is_available() or "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return False
    try:
        about = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        about = platform.processor()  # on Windows
    return "AuthenticAMD" in about


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """x Wᵀ + b, x (…, in) and b in bf16 or fp32, in which it is computed; W (out, in) is rounded to that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)  # not in `setup_context`: torch would look up the signature at every call
        ctx.ours = x.dtype == torch.bfloat16 and avx512.serves(x, weight, bias)
        bias = None if bias is None else bias.contiguous()
        if not ctx.ours:
            return _product(x, weight.to(x.dtype), bias)
        if not avx512.unwatched():
            return F.linear(x, weight.to(x.dtype), bias)
        return avx512.dense(x.contiguous(), avx512.pack(weight.contiguous()), len(weight), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        of_x, of_weight, of_bias = ctx.needs_input_grad
        once = not torch.is_grad_enabled()  # gradients of these are not wanted
        if once and ctx.ours and avx512.unwatched(gradient):
            return avx512.dense_backward(
                gradient.contiguous(), x.contiguous(), weight.contiguous(), ctx.needs_input_grad
            )
        weight = weight.to(x.dtype)  # not kept from before, or nothing would lead back to what was rounded
        if once and gradient.dtype == torch.float32:
            rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            return (
                _product(rows, weight.T).view(x.shape) if of_x else None,
                _product(rows.T, x.reshape(-1, x.shape[-1]).T) if of_weight else None,
                rows.sum(0) if of_bias else None,
            )
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            (rows.new_ones(1, len(rows)) @ rows)[0] if of_bias else None,
        )


@cache
def works() -> bool:
    """Whether torch has oneDNN's operator, and it does what it is called for: it is no promise of torch's."""
    layer, x, other = sample(torch.float32)
    with torch.autocast("cpu", enabled=False):  # whoever asks may be under one
        wanted, turned = F.linear(x, layer.weight, layer.bias), other.T @ x
        half = (x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
        try:
            found = (_product(*half).float(), _product(x, layer.weight, layer.bias), _product(other.T, x.T))
        except (AttributeError, RuntimeError, TypeError):
            return False
        near = [(found[0], wanted, 0.02), (found[1], wanted, 1e-4), (found[2], turned, 1e-4)]
        return all(torch.allclose(ours, theirs, rtol=within, atol=within) for ours, theirs, within in near)


def sample(kind: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """A dense layer from 64 to 32, something to put in and something to add: always the same, to try operators with."""
    with torch.random.fork_rng(devices=[]):  # who predicts must not move anyone's random numbers
        torch.default_generator.manual_seed(0)
        layer = nn.Linear(64, 32).requires_grad_(False)
        return layer.to(kind), torch.randn(5, 64).to(kind), torch.randn(5, 32).to(kind)
