"""softmax(q kᵀ / √d) v from the projected tokens (B, N, 3 D) to (B, N, D), as in the network, once with plain matrix
products and once by `F.scaled_dot_product_attention`; forward alone, and forward with backward. "Rule" is the choice of
`explicit_is_faster` in `vitral.kernels.reference` for the shape, "right" is yes if it was the faster one (within 5 %).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio, repeated, timed
from vitral.kernels.reference import explicit_is_faster

# (batch, heads, tokens, head width): CIFAR-10 at 4-pixel patches, MNIST, 64 patches, S/16 at 224 (three batches), S/16
# at 384, at 512; L/16 at 512; beyond.
SHAPES = (
    (1024, 2, 17, 8),
    (256, 4, 65, 32),
    (256, 2, 50, 32),
    (256, 3, 64, 64),
    (32, 6, 197, 64),
    (1, 6, 197, 64),
    (8, 6, 577, 64),
    (2, 6, 1025, 64),
    (1, 6, 2305, 64),
)
QUICK = ((2, 2, 5, 8),)
_MIN_SECONDS = 0.05  # of one measurement


def explicit(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute attention with plain matrix products, as the network does."""
    return ((q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)).softmax(dim=-1) @ v


def run(options: Options) -> list[Table]:
    """Make one table for forward, one for forward and backward."""
    tables = []
    for backward in (False, True):
        rows = [
            _row(shape, dtype, backward, options)
            for dtype in (torch.bfloat16, torch.float32)
            for shape in (QUICK if options.quick else SHAPES)
        ]
        what = "forward and backward" if backward else "forward"
        columns = {
            "dtype": "type", "shape": "batch × heads × tokens × width", "n": "n|d", "explicit": "explicit, ms|.2f",
            "explicit_spread": "spread", "fused": "fused, ms|.2f", "fused_spread": "spread",
            "ratio": "fused : explicit|.2f", "rule": "rule", "right": "right",
        }  # fmt: skip
        tables.append(Table(what.capitalize(), columns, rows, name="cuda" if options.device == "cuda" else ""))
    return tables


def _row(shape: tuple[int, ...], dtype: torch.dtype, backward: bool, options: Options) -> dict[str, object]:
    B, heads, N, d = shape
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(B, N, 3 * heads * d, generator=generator).to(options.device, dtype).requires_grad_(backward)
    ways: dict[str, Callable[..., Tensor]] = {"explicit": explicit, "fused": F.scaled_dot_product_attention}
    programs = {name: _program(way, qkv, heads, backward) for name, way in ways.items()}
    once = max(timed(program, options.device) for program in programs.values())
    times = 1 if options.quick else max(1, round(_MIN_SECONDS / once))
    programs = {name: repeated(program, times) for name, program in programs.items()}
    found = alternate(programs, rounds=1 if options.quick else 7, device=options.device)
    q = qkv.view(B, N, 3, heads, d).permute(2, 0, 3, 1, 4)[0]
    chosen = "explicit" if explicit_is_faster(q, q) else "fused"
    other = "fused" if chosen == "explicit" else "explicit"
    cells: dict[str, object] = {}
    for name, sample in found.items():
        columns = sample.columns(1000 / times)
        cells |= {name: columns["median"], f"{name}_spread": f"{columns['least']:.2f}–{columns['greatest']:.2f}"}
    return {
        "dtype": str(dtype).removeprefix("torch."), "shape": " × ".join(map(str, shape)), "n": found["fused"].n,
        **cells, "ratio": ratio(found["fused"], found["explicit"]), "rule": chosen,
        "right": "yes" if found[chosen].median <= 1.05 * found[other].median else "no",
    }  # fmt: skip


def _program(
    way: Callable[[Tensor, Tensor, Tensor], Tensor], qkv: Tensor, heads: int, backward: bool
) -> Callable[[], object]:
    B, N, _ = qkv.shape

    def forward() -> Tensor:
        q, k, v = qkv.view(B, N, 3, heads, -1).permute(2, 0, 3, 1, 4)
        return way(q, k, v).transpose(1, 2).reshape(B, N, -1)

    def infer() -> Tensor:
        with torch.inference_mode():
            return forward()

    gradient = torch.ones(B, N, qkv.shape[2] // 3, device=qkv.device, dtype=qkv.dtype)

    def train() -> None:
        forward().backward(gradient)
        qkv.grad = None

    return train if backward else infer
