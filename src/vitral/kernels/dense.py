"""Dense layers on a CPU: `F.linear` by oneDNN or by the kernels of `cpu.py`.

In bf16 PyTorch broadcasts the bias into the result before the product, and sums the gradient of the bias over all
tokens in a separate pass. Here oneDNN adds the bias while it writes the product, and the bias gradient is a product
with ones. Results are bitwise equal, except that the gradient of the bias differs by rounding. On CPUs that `cpu.py`
supports, its kernels compute all of this, with the weight's gradient in fp32.

In fp32 PyTorch calls MKL, which uses less than half of an AMD CPU's AVX-512 (docs/log/kernels.md). There oneDNN
computes all three products of a layer, with another order of summation.

In all other cases, and in PyTorch versions without these operators, it is `F.linear` (tests/kernels/test_linear.py).
"""

from __future__ import annotations

from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.jit import is_tracing  # type: ignore[attr-defined]

from vitral.kernels import cpu
from vitral.system import has_avx512, is_amd


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear`: x (…, in) to (…, out), under autocast in its dtype."""
    dtype = _kernel_dtype(x, weight, bias)
    if dtype is None:
        return F.linear(x, weight, bias)
    return _KernelLinear.apply(x.to(dtype), weight, None if bias is None else bias.to(dtype))


def supports_patches(x: Tensor, conv: nn.Conv2d, features: bool) -> bool:
    """True if `patches` is faster than the convolution: on a GPU, and for images by the kernels of `cpu.py`.

    With three channels, cuDNN's convolution took 9% of a training step of S/16, and oneDNN's takes 1.5 times as long
    as the product (docs/log/training-speed.md).
    """
    if x.device.type != "cpu":
        return x.device.type == "cuda"
    if features:
        return False
    weight = conv.weight.flatten(1)
    if not _dispatchable(x, weight) or _dtype(x, weight) != torch.bfloat16:
        return False
    return cpu.supports_linear(x, weight, width=weight.shape[1])


def patches(x: Tensor, conv: nn.Conv2d) -> Tensor:
    """Patch embedding (B, rows × columns, D) of x (B, C, H, W) as a product with the convolution's kernel."""
    B, C, H, W = x.shape
    p, q = conv.kernel_size
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))  # first, to halve the copy below
    rows = x.reshape(B, C, H // p, p, W // q, q).permute(0, 2, 4, 1, 3, 5).reshape(B, -1, C * p * q)
    return linear(rows, conv.weight.flatten(1), conv.bias)


def _kernel_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype | None:
    """Dtype in which oneDNN or `cpu.py` computes this layer; None if PyTorch is as fast."""
    if not _dispatchable(x, weight):
        return None
    dtype = _dtype(x, weight)
    if dtype == torch.bfloat16:
        is_faster = bias is not None or cpu.supports_linear(x, weight)
    else:
        is_faster = dtype == torch.float32 and _mkl_is_slow()
    return dtype if is_faster and self_test() else None


def _dispatchable(x: Tensor, weight: Tensor) -> bool:
    """True for a CPU matmul large enough to dispatch, outside torch.compile, tracing, functorch and dispatch modes."""
    if torch.compiler.is_compiling() or is_tracing() or torch._C._are_functorch_transforms_active():
        return False  # checked first, since they would specialize on the number of rows
    if torch._C._len_torch_dispatch_stack():  # such as a counter of FLOPs, which knows only PyTorch's own operators
        return False
    return x.device.type == "cpu" and x.numel() * len(weight) >= _MIN_MULTIPLICATIONS and forward_ad._current_level < 0


def _dtype(x: Tensor, weight: Tensor) -> torch.dtype | None:
    """Dtype in which PyTorch computes the layer; None if another one than bf16 or fp32 is involved."""
    if not torch.is_autocast_enabled("cpu"):
        return x.dtype if x.dtype == weight.dtype else None
    return None if x.dtype == torch.float64 else torch.get_autocast_dtype("cpu")


_MIN_MULTIPLICATIONS = 1 << 24
"""Size of a product below which the dispatch in Python costs more than it saves."""


@cache
def _mkl_is_slow() -> bool:
    """True for AMD CPUs with AVX-512, by name: a timing would make the bits of a run depend on it."""
    return torch.backends.mkl.is_available() and is_amd() and has_avx512()


def _onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Context(Protocol):
    """State that autograd carries from forward to backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    by_cpu_kernel: bool

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class _KernelLinear(torch.autograd.Function):
    """x Wᵀ + b in the dtype of x (…, in) and b, bf16 or fp32; W (out, in) is rounded to it."""

    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)  # not in `setup_context`, for which torch inspects the signature in every call
        ctx.by_cpu_kernel = x.dtype == torch.bfloat16 and cpu.supports_linear(x, weight, bias)
        bias = None if bias is None else bias.contiguous()
        if not ctx.by_cpu_kernel:
            return _onednn_linear(x, weight.to(x.dtype), bias)
        if not cpu.runs_eagerly():
            return F.linear(x, weight.to(x.dtype), bias)
        return cpu.dense(x.contiguous(), cpu.pack(weight.contiguous()), len(weight), bias)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), (gradient,) = ctx.saved_tensors, gradients
        of_x, of_weight, of_bias = ctx.needs_input_grad
        once = not torch.is_grad_enabled()  # no double backward
        if once and ctx.by_cpu_kernel and cpu.runs_eagerly(gradient):
            return cpu.dense_backward(gradient.contiguous(), x.contiguous(), weight.contiguous(), ctx.needs_input_grad)
        weight = weight.to(x.dtype)  # cast in backward, so that double backward reaches the parameter
        if once and gradient.dtype == torch.float32:
            rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
            return (
                _onednn_linear(rows, weight.T).view(x.shape) if of_x else None,
                _onednn_linear(rows.T, x.reshape(-1, x.shape[-1]).T) if of_weight else None,
                rows.sum(0) if of_bias else None,
            )
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            gradient @ weight if of_x else None,
            rows.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            (rows.new_ones(1, len(rows)) @ rows)[0] if of_bias else None,
        )


@cache
def self_test() -> bool:
    """True if PyTorch has oneDNN's operator and it computes a small layer correctly; neither is public API."""
    layer, x, other = sample(torch.float32)
    with torch.autocast("cpu", enabled=False):  # the caller may be under one
        expected, product = F.linear(x, layer.weight, layer.bias), other.T @ x
        bf16 = (x.bfloat16(), layer.weight.bfloat16(), layer.bias.bfloat16())
        try:
            results = (
                _onednn_linear(*bf16).float(),
                _onednn_linear(x, layer.weight, layer.bias),
                _onednn_linear(other.T, x.T),
            )
        except (AttributeError, RuntimeError, TypeError):
            return False
        pairs = [(results[0], expected, 0.02), (results[1], expected, 1e-4), (results[2], product, 1e-4)]
        return all(torch.allclose(one, other, rtol=within, atol=within) for one, other, within in pairs)


def sample(dtype: torch.dtype) -> tuple[nn.Linear, Tensor, Tensor]:
    """Deterministic test data for operators: a dense layer from 64 to 32, an input, and values to add."""
    with torch.random.fork_rng(devices=[]):  # prediction must not advance the caller's generator
        torch.default_generator.manual_seed(0)
        layer = nn.Linear(64, 32).requires_grad_(False)
        return layer.to(dtype), torch.randn(5, 64).to(dtype), torch.randn(5, 32).to(dtype)
