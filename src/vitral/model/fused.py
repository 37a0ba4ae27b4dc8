"""GELU and attention with fewer passes over memory, in bf16: on a GPU, and on processors that `avx512` is for.

By torch the activations of an MLP's hidden layer are read twice on the way back, once for their gradient and once for
its sum, that of the bias; and the gradients of queries, keys and values are written three by three, and then once more
side by side. Here each is written once (`vitral.model.kernels`). What torch would compute stands beside it, for where
there is no GPU. `vitral.model.linear.plainly` asks for torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.jit import is_tracing  # type: ignore[attr-defined]

from vitral.model import avx512

P = ParamSpec("P")

FEWEST_TOKENS, MOST_TOKENS = 64, 256
"""Between them ours was faster; of more tokens a GPU's multiprocessor does not hold all keys and values of a head."""
HEAD_WIDTH = 64
HOPPER = (9, 0)
"""Where torch's attention is cuDNN's, and where ours was measured."""


def serves(x: Tensor, weight: Tensor) -> bool:
    """Whether a dense layer with this weight computes tokens `x` in bf16, on a GPU that has our kernels, and nobody
    follows what is computed who would not know them. Not for predictions that are not compiled: they would wait for
    Triton, and gain nothing. On a processor while gradients are asked for, and not compiled.
    """
    if x.device.type == "cpu":
        return torch.is_grad_enabled() and _bf16(x, weight) and not _followed() and avx512.serves(x, weight)
    if x.device.type != "cuda" or not (torch.is_grad_enabled() or torch.compiler.is_dynamo_compiling()):
        return False
    return _bf16(x, weight) and not _followed() and available(x.device)


def _bf16(x: Tensor, weight: Tensor) -> bool:
    """Whether a dense layer computes in it."""
    if torch.is_autocast_enabled(x.device.type):
        return x.dtype != torch.float64 and torch.get_autocast_dtype(x.device.type) == torch.bfloat16
    return x.dtype == weight.dtype == torch.bfloat16


def _followed() -> bool:
    if torch.compiler.is_dynamo_compiling():  # it knows what a custom operator is, and takes itself for an export
        return False
    if torch.compiler.is_exporting() or is_tracing():
        return True
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _settled(function: Callable[P, bool]) -> Callable[P, bool]:
    """As `torch.compiler.assume_constant_result` has it: torch's compiler calls it and keeps the answer. Asked itself,
    that imports the compiler, for seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_settled
def available(device: torch.device) -> bool:
    """Whether a GPU has bf16 and Triton can make kernels for it, which takes a C compiler: found out by a small one."""
    return _tried(device)


@cache
def _tried(device: torch.device) -> bool:
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from vitral.model import kernels

        kernels.gelu(torch.zeros(8, dtype=torch.bfloat16, device=device), False)
    except Exception:  # of Triton, its compilers and what they call; torch does the same without them
        return False
    return True


def attends(x: Tensor, head_width: int) -> bool:
    """Whether attention among these tokens (B, N, D) is one of those that `attention` is for."""
    if x.device.type == "cpu":
        return head_width % avx512.LANES == 0
    return FEWEST_TOKENS <= x.shape[1] <= MOST_TOKENS and head_width == HEAD_WIDTH and by_cudnn(x.device)


@_settled
def by_cudnn(device: torch.device) -> bool:
    """Whether torch's attention is cuDNN's on this GPU, and nobody asked for another."""
    return torch.cuda.get_device_capability(device) == HOPPER and torch.backends.cuda.cudnn_sdp_enabled()


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
    """GELU(x Wᵀ + b) for x (…, in), by erf or in its tanh form, in bf16; fp32 parameters are rounded."""
    if avx512.serves(x, weight, bias):
        return _OnProcessor.apply(x.to(torch.bfloat16), weight, bias.to(torch.bfloat16), tanh)
    return _LinearGELU.apply(*(each.to(torch.bfloat16) for each in (x, weight, bias)), tanh)


class _OnProcessor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        if avx512.unwatched():
            right = avx512.pack(weight.contiguous())
            before, out = avx512.dense_then_gelu(x.contiguous(), right, len(weight), bias.contiguous(), tanh)
        else:
            before = F.linear(x, weight.to(x.dtype), bias)
            out = F.gelu(before, approximate=_form(tanh))
        ctx.save_for_backward(x, weight, bias, before)
        ctx.tanh = tanh
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight, bias, before), (gradient,) = ctx.saved_tensors, gradients
        if not torch.is_grad_enabled() and avx512.unwatched(gradient):
            through = avx512.gelu_backward(gradient.contiguous(), before.contiguous(), ctx.tanh)
            return *avx512.dense_backward(through, x.contiguous(), weight.contiguous(), ctx.needs_input_grad), None
        weight = weight.to(x.dtype)  # here, or nothing would lead back to it
        if torch.is_grad_enabled():  # gradients of these are wanted
            before = F.linear(x, weight, bias)
        through = torch.ops.aten.gelu_backward(gradient, before, approximate=_form(ctx.tanh))
        rows = through.reshape(-1, len(weight))
        return through @ weight, rows.T @ x.reshape(-1, x.shape[-1]), rows.sum(0), None


class _LinearGELU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, tanh: bool) -> Tensor:
        before = F.linear(x, weight, bias)
        ctx.save_for_backward(x, weight, bias, before)
        ctx.tanh = tanh
        return gelu(before, tanh)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, before = ctx.saved_tensors
        of_x, of_weight, of_bias, _ = ctx.needs_input_grad
        gradient = gradients[0].reshape(-1, len(weight))
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():  # gradients of these are wanted
            before = F.linear(x, weight, bias).reshape(-1, len(weight))
            through = torch.ops.aten.gelu_backward(gradient, before, approximate=_form(ctx.tanh))
            total = through.sum(0)
        else:
            through, total = gelu_backward(gradient, before.reshape(-1, len(weight)), ctx.tanh)
        return (
            (through @ weight).view(x.shape) if of_x else None,
            through.T @ x.reshape(-1, x.shape[-1]) if of_weight else None,
            total.to(weight.dtype) if of_bias else None,
            None,
        )


@torch.library.custom_op("vitral::gelu", mutates_args=())
def gelu(x: Tensor, tanh: bool) -> Tensor:
    """GELU, by erf or in its tanh form."""
    if x.device.type != "cuda":
        return F.gelu(x, approximate=_form(tanh))
    from vitral.model import kernels

    return kernels.gelu(x.contiguous(), tanh)


@gelu.register_fake
def _(x: Tensor, tanh: bool) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("vitral::gelu_backward", mutates_args=())
def gelu_backward(gradient: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """The gradient of x (rows, width) from that of GELU(x), and its sum over rows (width), in fp32."""
    if x.device.type != "cuda":
        through = torch.ops.aten.gelu_backward(gradient.float(), x.float(), approximate=_form(tanh))
        return through.to(x.dtype), through.sum(0)
    from vitral.model import kernels

    return kernels.gelu_backward(gradient.contiguous(), x.contiguous(), tanh)


@gelu_backward.register_fake
def _(gradient: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[1], dtype=torch.float32)


def _form(tanh: bool) -> str:
    return "tanh" if tanh else "none"


def attention(qkv: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ · scale) v of queries, keys and values side by side (B, N, 3, H, d): (B, N, H·d)."""
    return _Attention.apply(qkv, scale)


def gathers(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `gather` is for these queries, keys and values (B, H, tokens, d): in bf16, without gradients."""
    return not torch.is_grad_enabled() and not _followed() and avx512.attends(q, k, v) and avx512.unwatched()


def gather(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """softmax(q kᵀ · scale) v, (B, H, queries, d)."""
    return avx512.attention(q, k, v, scale)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, scale: float) -> Tensor:
        qkv = qkv.contiguous()
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        ctx.ours = avx512.attends(q, k, v)
        if ctx.ours and avx512.unwatched():
            mixed, lse = avx512.attention(q, k, v, scale, lse=True)
            out = mixed.transpose(1, 2).flatten(2)
        elif qkv.device.type == "cuda":
            out, lse = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)[:2]
            out, lse = out.transpose(1, 2).flatten(2), lse.flatten(2).contiguous()
        else:
            scores = q @ k.transpose(-2, -1) * scale
            out, lse = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2), scores.float().logsumexp(-1)
            lse = lse * math.log2(math.e)  # as on a processor, in case someone watched this alone
        ctx.save_for_backward(qkv, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (qkv, out, lse), (gradient,) = ctx.saved_tensors, gradients
        if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling():  # gradients of these are wanted
            return _by_torch(gradient, qkv, ctx.scale), None
        if ctx.ours and not avx512.unwatched(gradient):
            return _by_torch(gradient, qkv, ctx.scale), None
        if ctx.ours:
            mixed, change = (x.contiguous().view(*out.shape[:2], *qkv.shape[3:]) for x in (out, gradient))
            return avx512.attention_backward(qkv.contiguous(), mixed, change, lse.contiguous(), ctx.scale), None
        return attention_backward(gradient, qkv, out, lse, ctx.scale), None


@torch.library.custom_op("vitral::attention_backward", mutates_args=())
def attention_backward(gradient: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, scale: float) -> Tensor:
    """The gradient (B, N, 3, H, d) of queries, keys and values from that of `out` (B, N, H·d), what heads gather; `lse`
    (B, H, N) are logarithms of each query's sum over keys. Both contiguous.
    """
    if qkv.device.type == "cuda":
        from vitral.model import kernels

        return kernels.attention_backward(qkv.contiguous(), out, gradient.contiguous(), lse, scale)
    return _by_torch(gradient, qkv, scale)


def _by_torch(gradient: Tensor, qkv: Tensor, scale: float) -> Tensor:
    """The same, which can be differentiated again. In fp32 at least: what is left of sums of bf16 would be noise."""
    kind = torch.promote_types(qkv.dtype, torch.float32)
    q, k, v = qkv.to(kind).permute(2, 0, 3, 1, 4).unbind()
    gradient = gradient.to(kind).reshape(*qkv.shape[:2], *qkv.shape[3:]).transpose(1, 2)
    p = (q @ k.transpose(-2, -1) * scale).softmax(-1)
    ds = p * (gradient @ v.transpose(-2, -1) - (gradient * (p @ v)).sum(-1, keepdim=True)) * scale
    each = ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ gradient
    return torch.stack(each).permute(1, 3, 0, 2, 4).to(qkv.dtype).contiguous()


@attention_backward.register_fake
def _(gradient: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, scale: float) -> Tensor:
    return qkv.new_empty(qkv.shape)
