"""Triton kernels for NVIDIA GPUs, each with one pass over memory where PyTorch makes two or more.

Only `vitral.kernels.fused` imports this module, and with it Triton. It also has the fallbacks in PyTorch.

GELU is x·Φ(x). Its erf is formula 7.1.26 of Abramowitz and Stegun, accurate to 1.5e-7, which shares the exponential
with the derivative.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E: float = 1.4426950408889634


@triton.jit
def _gate(x, TANH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Φ(x), by erf or by GELU's tanh approximation, and its derivative, in fp32."""
    if TANH:
        inner = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)  # 2 √(2/π) (x + 0.044715 x³)
        gate = 1.0 / (1.0 + tl.exp(-inner))
        slope = gate * (1.0 - gate) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        bell = tl.exp(-0.5 * x * x)
        t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))  # 0.3275911 / √2
        series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
        tail = 0.5 * series * bell
        gate = tl.where(x < 0, tail, 1.0 - tail)
        slope = 0.3989422804014327 * bell
    return gate, slope


@triton.jit
def _gelu(x_at, out_at, count, TANH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = tl.load(x_at + places, mask=inside, other=0.0).to(tl.float32)
    gate, _ = _gate(x, TANH)
    tl.store(out_at + places, (x * gate).to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_backward(  # type: ignore[no-untyped-def]
    gradient_at,
    x_at,
    out_at,
    sums_at,
    rows,
    width,
    TANH: tl.constexpr,
    STRIP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Backward of GELU for a strip of rows, and its sum over these rows before rounding."""
    strip = tl.program_id(0)  # only the first axis of a launch grid can be long
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)  # reduced at the end, so that threads stay independent until then
    for start in range(0, STRIP, ROWS):
        row = strip * STRIP + start + tl.arange(0, ROWS)
        places = row.to(tl.int64)[:, None] * width + columns[None, :]
        inside = (row < rows)[:, None] & (columns < width)[None, :]
        x = tl.load(x_at + places, mask=inside, other=0.0).to(tl.float32)
        gradient = tl.load(gradient_at + places, mask=inside, other=0.0).to(tl.float32)
        gate, slope = _gate(x, TANH)
        grad_x = gradient * (gate + x * slope)
        tl.store(out_at + places, grad_x.to(out_at.dtype.element_ty), mask=inside)
        total += grad_x
    tl.store(sums_at + strip.to(tl.int64) * width + columns, tl.sum(total, 0), mask=columns < width)


@triton.jit
def _attention_backward(  # type: ignore[no-untyped-def]
    qkv_at,
    out_at,
    gradient_at,
    lse_at,
    result_at,
    to_bits,
    scale,
    N,
    H: tl.constexpr,
    d: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    TURNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Backward of one head of one image.

    All keys and values stay on chip, with their partial gradients. The kernel loops over blocks of queries, whose
    gradients are complete in one iteration because all keys are present.
    """
    image, head = tl.program_id(0) // H, tl.program_id(0) % H
    first = image.to(tl.int64) * N * 3 * H * d + head * d
    first_out = image.to(tl.int64) * N * H * d + head * d
    lse_at += tl.program_id(0).to(tl.int64) * N
    columns = tl.arange(0, d)
    keys = tl.arange(0, KEYS)
    known = (keys < N)[:, None]
    of_keys = first + H * d + keys[:, None] * (3 * H * d) + columns[None, :]
    k = tl.load(qkv_at + of_keys, mask=known, other=0.0)
    v = tl.load(qkv_at + of_keys + H * d, mask=known, other=0.0)
    dk = tl.zeros((KEYS, d), tl.float32)
    dv = tl.zeros((KEYS, d), tl.float32)
    for turn in tl.range(0, TURNS, num_stages=STAGES):
        rows = turn * QUERIES + tl.arange(0, QUERIES)
        inside = (rows < N)[:, None]
        q = tl.load(qkv_at + first + rows[:, None] * (3 * H * d) + columns[None, :], mask=inside, other=0.0)
        of_rows = first_out + rows[:, None] * (H * d) + columns[None, :]
        gradient = tl.load(gradient_at + of_rows, mask=inside, other=0.0)
        out = tl.load(out_at + of_rows, mask=inside, other=0.0)
        lse = tl.load(lse_at + rows, mask=rows < N, other=float("inf"))  # rows beyond N get weights of 0
        scores = tl.where(known, tl.dot(k, q.T) * to_bits, float("-inf"))  # (keys, queries); −∞ beyond N
        p = tl.exp2(scores - lse[None, :] * 1.4426950408889634)
        dv = tl.dot(p.to(gradient.dtype), gradient, dv)
        delta = tl.sum(out.to(tl.float32) * gradient.to(tl.float32), 1)
        ds = (p * (tl.dot(v, gradient.T) - delta[None, :])).to(q.dtype)
        dk = tl.dot(ds, q, dk)
        dq = tl.dot(k.T, ds) * scale  # (d, queries); keys beyond N are zeros
        to = result_at + first + rows[None, :] * (3 * H * d) + columns[:, None]
        tl.store(to, dq.to(result_at.dtype.element_ty), mask=(rows < N)[None, :])
    tl.store(result_at + of_keys, (dk * scale).to(result_at.dtype.element_ty), mask=known)
    tl.store(result_at + of_keys + H * d, dv.to(result_at.dtype.element_ty), mask=known)


def gelu(x: Tensor, tanh: bool) -> Tensor:
    """GELU of a contiguous tensor."""
    out, block = torch.empty_like(x), 1024
    _launch(x, _gelu, (triton.cdiv(x.numel(), block),), x, out, x.numel(), tanh, block)
    return out


def gelu_backward(gradient: Tensor, x: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Gradient of x (rows, width) from the gradient of GELU(x), and its sum over rows (width) in fp32."""
    (rows, width), strip, columns = x.shape, 256, 64
    out, strips = torch.empty_like(x), triton.cdiv(rows, strip)
    sums = torch.empty(strips, width, dtype=torch.float32, device=x.device)
    grid = (strips, triton.cdiv(width, columns))
    _launch(x, _gelu_backward, grid, gradient, x, out, sums, rows, width, tanh, strip, 16, columns)
    return out, sums.sum(0)


def attention_backward(qkv: Tensor, out: Tensor, gradient: Tensor, lse: Tensor, scale: float) -> Tensor:
    """Gradient (B, N, 3, H, d) of q, k and v from that of `out` (B, N, H·d), the output of attention.

    `lse` (B, H, N) is the log-sum-exp of each query's scores. All contiguous; N at most 256.
    """
    (B, N, _, H, d), queries, stages = qkv.shape, 32, 3
    result, keys, turns = torch.empty_like(qkv), max(64, triton.next_power_of_2(N)), triton.cdiv(N, queries)
    tensors, numbers = (qkv, out, gradient, lse, result), (scale * LOG2E, scale, N, H, d, keys, queries, turns, stages)
    _launch(qkv, _attention_backward, (B * H,), *tensors, *numbers, num_warps=8 if keys > 64 else 4)
    return result


def _launch(x: Tensor, kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launch a kernel on the device of `x`, whichever device is current."""
    if x.device.type == "cuda":
        with torch.cuda.device(x.device):
            kernel[grid](*arguments, **options)
    else:
        kernel[grid](*arguments, **options)
