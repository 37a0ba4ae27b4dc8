"""GELU and attention as a GPU computes them: by what stands beside the kernels, and by the kernels, interpreted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.model import create, fused

KERNELS = Path(__file__).parent / "interpreted.py"


def near(found: Tensor, wanted: Tensor, within: float) -> bool:
    return bool((found.double() - wanted.double()).norm() <= within * wanted.double().norm())


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("tanh", [False, True])
def test_a_dense_layer_and_gelu_are_torchs_in_bf16(tanh):
    parts = drawn((3, 7, 16), (24, 16), (24,), dtype=torch.float32)
    found = fused.linear_gelu(*parts, tanh)
    wanted = F.gelu(F.linear(*parts), approximate="tanh" if tanh else "none")
    change = torch.randn_like(wanted)
    assert found.dtype == torch.bfloat16
    assert near(found, wanted, 0.01)
    theirs = torch.autograd.grad(wanted, parts, change)
    for ours, each in zip(torch.autograd.grad(found, parts, change.bfloat16()), theirs, strict=True):
        assert ours.dtype == each.dtype
        assert near(ours, each, 0.01)


def test_attention_is_torchs_with_its_gradients_side_by_side():
    (qkv,) = drawn((2, 11, 3, 4, 8))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).flatten(2)
    found = fused.attention(qkv, 0.3)
    change = torch.randn_like(wanted)
    assert near(found, wanted, 1e-6)
    (ours,), (theirs,) = (torch.autograd.grad(each, qkv, change) for each in (found, wanted))
    assert ours.is_contiguous()
    assert near(ours, theirs, 1e-6)


def test_compiled_they_are_the_same():
    parts = drawn((2, 5, 16), (24, 16), (24,), dtype=torch.float32)
    (qkv,) = drawn((2, 5, 3, 2, 8), dtype=torch.float32)

    def both(*parts: Tensor) -> Tensor:
        return fused.linear_gelu(*parts[:3], False).float().sum() + fused.attention(parts[3], 0.2).square().sum()

    wanted = torch.autograd.grad(both(*parts, qkv), [*parts, qkv])
    found = torch.autograd.grad(torch.compile(both, fullgraph=True)(*parts, qkv), [*parts, qkv])
    assert all(near(ours, theirs, 0.01) for ours, theirs in zip(found, wanted, strict=True))


def test_the_operators_keep_their_promises():
    (x,) = drawn((5, 8), dtype=torch.float32)
    torch.library.opcheck(fused.gelu, (x, False), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(fused.gelu_backward, (x, x.detach(), True), test_utils=("test_schema", "test_faketensor"))
    qkv, out, lse = (each.detach() for each in drawn((2, 5, 3, 2, 8), (2, 5, 16), (2, 2, 5)))
    given = out, qkv, out, lse, 0.3
    torch.library.opcheck(fused.attention_backward, given, test_utils=("test_schema", "test_faketensor"))


def test_a_processor_has_none_of_it(monkeypatch):
    def refused(*_: object) -> None:
        raise AssertionError("asked for on a processor")

    for name in ("linear_gelu", "attention"):
        monkeypatch.setattr(fused, name, refused)
    model = create("mu/4", image_size=32, classes=3).train()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 3, 32, 32)).sum().backward()


def test_the_kernels_by_tritons_interpreter():
    """In a process of its own: Triton reads once whether it interprets."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, KERNELS], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["gelu", "gelu-tanh", "attention-70", "attention-64", "attention-7"]
