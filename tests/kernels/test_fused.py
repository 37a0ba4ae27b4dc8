"""GELU and attention for GPUs: by the fallbacks in PyTorch, and by the kernels in Triton's interpreter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from vitral.kernels import cpu, fused, reference_ops
from vitral.model import create
from vitral.model.vit import Block

KERNELS = Path(__file__).parent / "interpreted.py"


def near(found: Tensor, wanted: Tensor, within: float) -> bool:
    return bool((found.double() - wanted.double()).norm() <= within * wanted.double().norm())


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.fixture(autouse=True)
def no_cpu_kernels(monkeypatch):
    """Disable the kernels for a CPU, which test_cpu.py tests."""
    monkeypatch.setattr(cpu, "ready", lambda: False)


@pytest.mark.parametrize("tanh", [False, True])
def test_a_dense_layer_with_gelu_matches_torch_in_bf16(tanh):
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


def test_attention_and_its_concatenated_gradients_match_torch():
    (qkv,) = drawn((2, 11, 3, 4, 8))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    wanted = F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).flatten(2)
    found = fused.qkv_attention(qkv, 0.3)
    change = torch.randn_like(wanted)
    assert near(found, wanted, 1e-6)
    (ours,), (theirs,) = (torch.autograd.grad(each, qkv, change) for each in (found, wanted))
    assert ours.is_contiguous()
    assert near(ours, theirs, 1e-6)


@pytest.mark.slow
def test_compiled_they_are_the_same():
    parts = drawn((2, 5, 16), (24, 16), (24,), dtype=torch.float32)
    (qkv,) = drawn((2, 5, 3, 2, 8), dtype=torch.float32)

    def both(*parts: Tensor) -> Tensor:
        return fused.linear_gelu(*parts[:3], False).float().sum() + fused.qkv_attention(parts[3], 0.2).square().sum()

    wanted = torch.autograd.grad(both(*parts, qkv), [*parts, qkv])
    found = torch.autograd.grad(torch.compile(both, fullgraph=True)(*parts, qkv), [*parts, qkv])
    assert all(near(ours, theirs, 0.01) for ours, theirs in zip(found, wanted, strict=True))


def test_opcheck_of_the_operators():
    (x,) = drawn((5, 8), dtype=torch.float32)
    torch.library.opcheck(fused.gelu, (x, False), test_utils=("test_schema", "test_faketensor"))
    torch.library.opcheck(fused.gelu_backward, (x, x.detach(), True), test_utils=("test_schema", "test_faketensor"))
    qkv, out, lse = (each.detach() for each in drawn((2, 5, 3, 2, 8), (2, 5, 16), (2, 2, 5)))
    given = out, qkv, out, lse, 0.3
    torch.library.opcheck(fused.attention_backward, given, test_utils=("test_schema", "test_faketensor"))


def supported(*given: Tensor | None) -> bool:
    return torch.is_grad_enabled() and not fused._is_traced() and all(each is not None for each in given)


@pytest.fixture
def called(monkeypatch):
    """Names of called kernels, with a CPU pretending to be a supported GPU."""
    found: list[str] = []
    for name in BOTH:
        monkeypatch.setattr(fused, f"supports_{name}", supported)
        own = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *given, name=name, own=own: found.append(name) or own(*given))
    return found


def block(**changes: object) -> Block:
    torch.manual_seed(0)
    made = create("mu/4", image_size=16, classes=3, dim=64, heads=1, depth=1, **changes).train()
    return made.blocks[0].to(torch.bfloat16)


TOKENS = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
BOTH = {"linear_gelu", "qkv_attention"}


def test_gradients_of_a_block_match_the_reference(called):
    found = []
    for reference in (False, True):
        one = block()
        if reference:
            reference_ops(one)
        one(TOKENS).float().square().sum().backward()
        found.append(torch.cat([each.grad.flatten() for each in one.parameters()]))
    assert set(called) == BOTH
    assert near(*found, 0.02)


def hooked(block: Block) -> set[str]:
    block.mlp.fc1.register_forward_hook(lambda *_: None)
    block.attn.qkv.register_full_backward_hook(lambda *_: None)  # which sees what it always sees: qkv is called
    return {"qkv_attention"}


def replaced(block: Block) -> set[str]:
    block.mlp.fc1 = torch.nn.Sequential(block.mlp.fc1)
    block.attn.qkv = torch.nn.Sequential(block.attn.qkv)
    return {"qkv_attention"}


def patched(block: Block) -> set[str]:
    block.mlp.fc1.forward = block.mlp.fc1.forward
    return {"qkv_attention"}


def without_bias(block: Block) -> set[str]:
    block.mlp.fc1.bias = None
    return {"qkv_attention"}


def observed(block: Block) -> set[str]:
    block.attn.observer = lambda *_: None
    return {"linear_gelu"}


def of_another_backend(block: Block) -> set[str]:
    block.attn.backend = F.scaled_dot_product_attention
    block.mlp.fc1.backend = F.linear
    return set()


def switched(block: Block) -> set[str]:
    reference_ops(block)
    return set()


CHANGES = (hooked, replaced, patched, without_bias, observed, of_another_backend, switched)


@pytest.mark.parametrize("change", CHANGES)
def test_a_hooked_or_modified_layer_uses_torch(change, called):
    one = block()
    one(TOKENS)
    assert set(called) == BOTH
    called.clear()
    left = change(one)
    one(TOKENS)
    assert set(called) == left


@pytest.mark.filterwarnings("default:.*torch.jit.script")  # torch's own formulas
def test_tracing_and_transforms_use_torch_operators(called):
    one = block()
    torch.func.vmap(one)(TOKENS[None])
    torch.func.grad(lambda x: one(x).float().sum())(TOKENS)
    with torch.autograd.forward_ad.dual_level():
        one(torch.autograd.forward_ad.make_dual(TOKENS, TOKENS))
    exported = torch.export.export(one, (TOKENS,), strict=False)
    assert not called
    assert not any("vitral" in str(node.target) for node in exported.graph.nodes)


def test_compiled_forward_and_backward_use_the_operators(called):
    """Once, compiled code silently left them out."""
    found: set[str] = set()

    def noted(graph: torch.fx.GraphModule, _: object) -> Any:
        found.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(block(), backend=aot_autograd(fw_compiler=noted, bw_compiler=noted), fullgraph=True)
    compiled(TOKENS).float().sum().backward()
    assert {"vitral.gelu.default", "vitral.gelu_backward.default", "vitral.attention_backward.default"} <= found


@pytest.mark.slow
def test_compiled_for_any_number_of_tokens(called):
    one = block()
    compiled = torch.compile(one, fullgraph=True, dynamic=True)
    for tokens in (5, 6, 300):
        x = torch.randn(2, tokens, 64).bfloat16()
        assert near(compiled(x), one(x), 0.02)


def test_gradients_of_gradients(called):
    found = []
    for reference in (False, True):
        one, x = block().eval(), TOKENS.clone().requires_grad_()
        if reference:
            reference_ops(one)
        (slope,) = torch.autograd.grad(one.mlp(x).float().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.float().square().sum(), x)[0])
    assert called
    assert near(*found, 0.02)


def test_frozen_layers_have_no_gradient(called):
    one = block().requires_grad_(False)
    x = TOKENS.clone().requires_grad_()
    one(x).float().sum().backward()
    assert set(called) == BOTH
    assert x.grad is not None
    assert all(each.grad is None for each in one.parameters())


def test_most_devices_have_no_kernels(monkeypatch):
    def refused(*_: object) -> None:
        raise AssertionError("called on a CPU")

    for name in BOTH:
        monkeypatch.setattr(fused, name, refused)
    model = create("mu/4", image_size=32, classes=3).train()
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 3, 32, 32)).sum().backward()


@pytest.mark.slow
def test_the_kernels_by_tritons_interpreter():
    """In a subprocess, because Triton reads the interpreter setting only once."""
    pytest.importorskip("triton")
    done = subprocess.run([sys.executable, KERNELS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["gelu", "gelu-tanh", "attention-70", "attention-64", "attention-7"]
