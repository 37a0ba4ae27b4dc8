"""Fused GELU and attention in bf16, with fewer passes over memory: on GPUs, and on CPUs that `cpu.py` supports.

PyTorch's backward reads the activations of an MLP's hidden layer twice: for their gradient, and for its sum, the
gradient of the bias. It also writes the gradients of q, k and v into three tensors, then copies them into one. Here
each is written once (`vitral.kernels.cuda`). Custom operators include a PyTorch fallback for other devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import ParamSpec, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.jit import is_tracing  # type: ignore[attr-defined]
from torch.nn.modules.module import _has_any_global_hook

from vitral.kernels import cpu

P = ParamSpec("P")

MIN_TOKENS, MAX_TOKENS = 64, 256
"""Range in which the Triton kernel was faster. A GPU's multiprocessor holds no more keys and values of a head."""
HEAD_WIDTH = 64
HOPPER = (9, 0)
"""Compute capability where PyTorch's attention is cuDNN's, and where the Triton kernel was measured."""


def supports_linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """True if `linear_gelu` is faster than PyTorch for tokens `x` and a layer with this weight.

    On a GPU in training or compiled; eager prediction would wait for Triton and gain nothing. On a CPU with gradients
    and not compiled.
    """
    if bias is None:
        return False
    if x.device.type == "cpu":
        return torch.is_grad_enabled() and _bf16(x, weight) and not _is_traced() and cpu.supports_linear(x, weight)
    if x.device.type != "cuda" or not (torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling()):
        return False
    return _bf16(x, weight) and not _is_traced() and has_triton(x.device)


def joined(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
    """The bf16 tensor (B, N, 3, H, d) whose three parts are q, k and v (B, H, N, d), for its gradient; else None.

    A backward pass through it makes one gradient, instead of three that are copied together. Under torch.compile the
    parts are put together again, a copy.
    """
    if not torch.is_grad_enabled() or q.dtype != torch.bfloat16:
        return None
    if torch.compiler.is_dynamo_compiling():  # which knows no `_base`
        same = q.shape == k.shape == v.shape
        return torch.stack([x.transpose(1, 2) for x in (q, k, v)], 2) if same else None
    whole = q._base
    if whole is None or k._base is not whole or v._base is not whole or not whole.is_contiguous():
        return None
    B, H, N, d = q.shape
    D, offset = H * d, whole.storage_offset()
    for place, part in enumerate((q, k, v)):
        if part.shape != q.shape or part.stride() != (3 * N * D, d, 3 * D, 1):
            return None
        if part.storage_offset() != offset + place * D or part.requires_grad != whole.requires_grad:
            return None
    return whole.view(B, N, 3, H, d) if whole.numel() == 3 * B * N * D else None


def supports_qkv_attention(qkv: Tensor) -> bool:
    """True if `qkv_attention` is faster than PyTorch for q, k and v (B, N, 3, H, d): in bf16, with gradients.

    False under global hooks, which may count or change operators.
    """
    if qkv.dtype != torch.bfloat16 or not torch.is_grad_enabled() or _is_traced() or _has_any_global_hook():
        return False
    if qkv.device.type == "cpu":
        return cpu.supports_qkv(qkv)
    if qkv.device.type != "cuda" or qkv.shape[4] != HEAD_WIDTH or not MIN_TOKENS <= qkv.shape[1] <= MAX_TOKENS:
        return False
    return has_triton(qkv.device) and uses_cudnn(qkv.device)


def supports_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """True if `attention` is faster than PyTorch for q, k and v (B, H, tokens, d): bf16, on a CPU, no gradients."""
    return not torch.is_grad_enabled() and not _is_traced() and cpu.supports_attention(q, k, v) and cpu.runs_eagerly()


def _bf16(x: Tensor, weight: Tensor) -> bool:
    """True if a dense layer computes in bf16."""
    if torch.is_autocast_enabled(x.device.type):
        return x.dtype != torch.float64 and torch.get_autocast_dtype(x.device.type) == torch.bfloat16
    return x.dtype == weight.dtype == torch.bfloat16


def _is_traced() -> bool:
    """True under export, tracing, functorch and forward-mode AD, which support PyTorch's operators only."""
    if torch.compiler.is_dynamo_compiling():  # supports custom operators, and reports itself as an export
        return False
    if torch.compiler.is_exporting() or is_tracing():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _assume_constant(function: Callable[P, bool]) -> Callable[P, bool]:
    """Do what `torch.compiler.assume_constant_result` does, without importing the compiler, which takes seconds."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_assume_constant
def has_triton(device: torch.device) -> bool:
    """True if a GPU has bf16 and Triton compiles a small kernel for it, which needs a C compiler."""
    return _compiles_triton(device)


@cache
def _compiles_triton(device: torch.device) -> bool:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from vitral.kernels import cuda

        cuda.gelu(torch.zeros(8, dtype=torch.bfloat16, device=device), False)
    except Exception:  # from Triton, its compilers and what they call; PyTorch is the fallback
        return False
    return True


@_assume_constant
def uses_cudnn(device: torch.device) -> bool:
    """True if PyTorch's attention on this GPU is cuDNN's, and cuDNN attention is enabled."""
    return torch.cuda.get_device_capability(device) == HOPPER and torch.backends.cuda.cudnn_sdp_enabled()


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU(x Wᵀ + b) for x (…, in) in bf16, by erf or its tanh approximation; fp32 parameters are rounded."""
    if cpu.supports_linear(x, weight, bias):
        return _CPULinearGELU.apply(x.to(torch.bfloat16), weight, bias.to(torch.bfloat16), tanh)
    return _LinearGELU.apply(*(each.to(torch.bfloat16) for each in (x, weight, bias)), tanh)


class _Context(Protocol):
    """State that autograd carries from forward to backward."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    tanh: bool
    scale: float
    by_cpu_kernel: bool

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


class _CPULinearGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        if cpu.runs_eagerly():
            packed = cpu.pack(weight.contiguous())
            hidden, out = cpu.dense_then_gelu(x.contiguous(), packed, len(weight), bias.contiguous(), tanh)
        else:
            hidden = F.linear(x, weight.to(x.dtype), bias)
            out = F.gelu(hidden, approximate=_approximation(tanh))
        ctx.save_for_backward(x, weight, bias, hidden)
        ctx.tanh = tanh
        return out

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias, hidden), (gradient,) = ctx.saved_tensors, gradients
        if not torch.is_grad_enabled() and cpu.runs_eagerly(gradient):
            grad_hidden = cpu.gelu_backward(gradient.contiguous(), hidden.contiguous(), ctx.tanh)
            return *cpu.dense_backward(grad_hidden, x.contiguous(), weight.contiguous(), ctx.needs_input_grad), None
        weight = weight.to(x.dtype)  # cast in backward, so that double backward reaches the parameter
        if torch.is_grad_enabled():  # double backward
            hidden = F.linear(x, weight, bias)
        grad_hidden = torch.ops.aten.gelu_backward(gradient, hidden, approximate=_approximation(ctx.tanh))
        rows = grad_hidden.reshape(-1, len(weight))
        return grad_hidden @ weight, rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0), None


class _LinearGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        hidden = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, bias, hidden)
        ctx.tanh = tanh
        return gelu(hidden, tanh)

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, hidden = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        gradient = gradients[0].reshape(-1, len(weight))
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():  # double backward
            hidden = F.linear(x, weight, bias).reshape(-1, len(weight))
            grad_hidden = torch.ops.aten.gelu_backward(gradient, hidden, approximate=_approximation(ctx.tanh))
            grad_bias = grad_hidden.sum(0)
        else:
            grad_hidden, grad_bias = gelu_backward(gradient, hidden.reshape(-1, len(weight)), ctx.tanh)
        return (
            (grad_hidden @ weight).view(x.shape) if of_x else None,
            grad_hidden.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            grad_bias.to(weight.dtype) if of_bias else None,
            None,
        )


@torch.library.custom_op("vitral::gelu", mutates_args=())
def gelu(x: Tensor, tanh: bool) -> Tensor:
    """GELU, by erf or its tanh approximation."""
    if x.device.type != "cuda":
        return F.gelu(x, approximate=_approximation(tanh))
    from vitral.kernels import cuda

    return cuda.gelu(x.contiguous(), tanh)


@gelu.register_fake
def _(x: Tensor, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("vitral::gelu_backward", mutates_args=())
def gelu_backward(gradient: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of x (rows, width) from the gradient of GELU(x), and its sum over rows (width) in fp32."""
    if x.device.type != "cuda":
        grad_x = torch.ops.aten.gelu_backward(gradient.float(), x.float(), approximate=_approximation(tanh))
        return grad_x.to(x.dtype), grad_x.sum(0)
    from vitral.kernels import cuda

    return cuda.gelu_backward(gradient.contiguous(), x.contiguous(), tanh)


@gelu_backward.register_fake
def _(gradient: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


def _approximation(tanh: bool) -> str:
    """Argument `approximate` of PyTorch's GELU."""
    return "tanh" if tanh else "none"


def qkv_attention(qkv: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ · scale) v of q, k and v in one tensor (B, N, 3, H, d): (B, N, H · d)."""
    return _Attention.apply(qkv, scale)


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ · scale) v, (B, H, queries, d)."""
    return cpu.attention(q, k, v, scale)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _Context, qkv: Tensor, scale: float) -> Tensor:
        qkv = qkv.contiguous()
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        ctx.by_cpu_kernel = cpu.supports_attention(q, k, v)
        if ctx.by_cpu_kernel and cpu.runs_eagerly():
            mixed, lse = cpu.attention(q, k, v, scale, lse=True)
            out = mixed.transpose(1, 2).flatten(2)
        elif qkv.device.type == "cuda":
            out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)[:2]
            out, lse = out.transpose(1, 2).flatten(2), lse.flatten(2).contiguous()
        else:
            scores = q @ k.transpose(-2, -1) * scale
            out, lse = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), scores.float().logsumexp(-1)
            lse = lse * math.log2(math.e)  # as from `cpu.attention`, since backward may use its kernel
        ctx.save_for_backward(qkv, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, out, lse), (gradient,) = ctx.saved_tensors, gradients
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():  # double backward
            return _attention_backward_by_torch(gradient, qkv, ctx.scale), None
        if ctx.by_cpu_kernel and not cpu.runs_eagerly(gradient):
            return _attention_backward_by_torch(gradient, qkv, ctx.scale), None
        if ctx.by_cpu_kernel:
            mixed, grad_mixed = (x.contiguous().view(*out.shape[:2], *qkv.shape[3:]) for x in (out, gradient))
            return cpu.attention_backward(qkv.contiguous(), mixed, grad_mixed, lse.contiguous(), ctx.scale), None
        return attention_backward(gradient, qkv, out, lse, ctx.scale), None


@torch.library.custom_op("vitral::attention_backward", mutates_args=())
def attention_backward(gradient: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Gradient (B, N, 3, H, d) of q, k and v from that of `out` (B, N, H·d), the output of attention.

    `lse` (B, H, N) is the log-sum-exp of each query's scores. `out` and `lse` are contiguous.
    """
    if qkv.device.type == "cuda":
        from vitral.kernels import cuda

        return cuda.attention_backward(qkv.contiguous(), out, gradient.contiguous(), lse, scale)
    return _attention_backward_by_torch(gradient, qkv, scale)


def _attention_backward_by_torch(gradient: Tensor, qkv: Tensor, scale: float) -> Tensor:
    """Differentiable `attention_backward`, in fp32 at least: differences of bf16 sums would be noise."""
    dtype = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(dtype).permute(2, 0, 3, 1, 4).unbind()
    gradient = gradient.to(dtype).reshape(*qkv.shape[:2], *qkv.shape[3:]).transpose(1, 2)
    p = (q @ k.transpose(-2, -1) * scale).softmax(-1)
    ds = p * (gradient @ v.transpose(-2, -1) - (gradient * (p @ v)).sum(-1, keepdim=True)) * scale
    each = ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ gradient
    return torch.stack(each).permute(1, 3, 0, 2, 4).to(qkv.dtype).contiguous()


@attention_backward.register_fake
def _(gradient: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, scale: float) -> Tensor:
    return qkv.new_empty(qkv.shape)
