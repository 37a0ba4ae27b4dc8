"""The kernel behind `vitral.model.gelu`; imported only where it is launched, since not every torch brings Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS, _STEPS = 16, 128, 16  # of a tile, and tiles of a program, one below the other


@triton.jit
def _kernel(  # type: ignore[no-untyped-def]  # Triton has types of its own
    gradient, before, after, sums, rows, columns,
    TANH: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * C + tl.arange(0, C)
    total = tl.zeros([C], dtype=tl.float32)
    for step in range(STEPS):
        row = (tl.program_id(1) * STEPS + step) * R + tl.arange(0, R)
        there = (row[:, None] < rows) & (column[None, :] < columns)
        place = row[:, None].to(tl.int64) * columns + column[None, :]
        x = tl.load(before + place, mask=there, other=0.0).to(tl.float32)
        g = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
        if TANH:
            inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
            t = 1 - 2 / (tl.exp(2 * inner) + 1)
            slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * 0.7978845608028654 * (1 + 0.134145 * x * x)
        else:
            slope = 0.5 * (1 + tl.erf(x * 0.7071067811865476)) + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
        found = g * slope
        tl.store(after + place, found.to(after.dtype.element_ty), mask=there)
        total += tl.sum(found, axis=0)
    tl.store(sums + tl.program_id(1) * columns + column, total, mask=column < columns)


def launch(gradient: Tensor, before: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """As `gelu.gelu_backward`; both tensors contiguous."""
    columns = before.shape[-1]
    rows = before.numel() // columns
    parts = triton.cdiv(rows, _ROWS * _STEPS)
    after = torch.empty_like(before)
    sums = torch.empty(parts, columns, dtype=torch.float32, device=before.device)
    grid = (triton.cdiv(columns, _COLUMNS), parts)
    _kernel[grid](gradient, before, after, sums, rows, columns, tanh, _ROWS, _COLUMNS, _STEPS)
    return after, sums.sum(0)
