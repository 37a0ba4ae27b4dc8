"""GELU and attention as a GPU computes them: by what stands beside the kernels, and by the kernels, interpreted."""

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

from vitral.model import avx512, create, fused
from vitral.model.vit import MLP, Attention, Block

KERNELS = Path(__file__).parent / "interpreted.py"


def near(found: Tensor, wanted: Tensor, within: float) -> bool:
    return bool((found.double() - wanted.double()).norm() <= within * wanted.double().norm())


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.fixture(autouse=True)
def any_processor(monkeypatch):
    """What the kernels for a processor compute is in test_avx512.py."""
    monkeypatch.setattr(avx512, "ready", lambda: False)


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


@pytest.fixture
def asked(monkeypatch):
    """Which of the two was asked for, where a processor is taken for a GPU that has them."""
    found: list[str] = []
    monkeypatch.setattr(fused, "serves", lambda *_: torch.is_grad_enabled() and not fused._followed())
    monkeypatch.setattr(fused, "by_cudnn", lambda _: True)
    monkeypatch.setattr(fused, "FEWEST_TOKENS", 1)
    for name in ("linear_gelu", "attention"):
        own = getattr(fused, name)
        monkeypatch.setattr(fused, name, lambda *given, name=name, own=own: found.append(name) or own(*given))
    return found


def block(**changes: object) -> Block:
    torch.manual_seed(0)
    made = create("mu/4", image_size=16, classes=3, dim=64, heads=1, depth=1, **changes).train()
    return made.blocks[0].to(torch.bfloat16)


TOKENS = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
BOTH = {"linear_gelu", "attention"}


def test_a_block_learns_what_the_plain_one_does(asked, monkeypatch):
    found = []
    for plain in (False, True):
        for kind in (MLP, Attention):
            monkeypatch.setattr(kind, "plain", plain)
        one = block()
        one(TOKENS).float().square().sum().backward()
        found.append(torch.cat([each.grad.flatten() for each in one.parameters()]))
    assert set(asked) == BOTH
    assert near(*found, 0.02)


def hooked(block: Block) -> None:
    block.mlp.fc1.register_forward_hook(lambda *_: None)
    block.attn.qkv.register_full_backward_hook(lambda *_: None)


def replaced(block: Block) -> None:
    block.mlp.fc1 = torch.nn.Sequential(block.mlp.fc1)
    block.attn.qkv = torch.nn.Sequential(block.attn.qkv)


def wrapped(block: Block) -> None:
    block.mlp.fc1.forward = block.mlp.fc1.forward
    block.attn.attend = block.attn.attend


def asked_to_be_plain(block: Block) -> None:
    block.mlp.plain = block.attn.plain = True


def of_another_class(block: Block) -> None:
    class Other(Attention):
        def attend(self, *given: Any) -> Tensor:
            return super().attend(*given)

    block.attn.__class__ = Other
    block.mlp.fc1.bias = None


@pytest.mark.parametrize("change", [hooked, replaced, wrapped, asked_to_be_plain, of_another_class])
def test_who_looks_inside_or_changes_a_layer_gets_torchs(change, asked):
    one = block()
    one(TOKENS)
    assert set(asked) == BOTH
    asked.clear()
    change(one)
    one(TOKENS)
    assert not asked


@pytest.mark.filterwarnings("default:.*torch.jit.script")  # torch's own formulas
def test_who_follows_what_is_computed_gets_torchs(asked):
    one = block()
    torch.func.vmap(one)(TOKENS[None])
    torch.func.grad(lambda x: one(x).float().sum())(TOKENS)
    with torch.autograd.forward_ad.dual_level():
        one(torch.autograd.forward_ad.make_dual(TOKENS, TOKENS))
    exported = torch.export.export(one, (TOKENS,), strict=False)
    assert not asked
    assert not any("vitral" in str(node.target) for node in exported.graph.nodes)


def test_compiled_there_and_back_it_is_these_operators(asked):
    """They were once left out of all that is compiled, where nothing but the time could have told."""
    found: set[str] = set()

    def noted(graph: torch.fx.GraphModule, _: object) -> Any:
        found.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(block(), backend=aot_autograd(fw_compiler=noted, bw_compiler=noted), fullgraph=True)
    compiled(TOKENS).float().sum().backward()
    assert {"vitral.gelu.default", "vitral.gelu_backward.default", "vitral.attention_backward.default"} <= found


def test_compiled_for_any_number_of_tokens(asked):
    one = block()
    compiled = torch.compile(one, fullgraph=True, dynamic=True)
    for tokens in (5, 6, 300):
        x = torch.randn(2, tokens, 64).bfloat16()
        assert near(compiled(x), one(x), 0.02)


def test_gradients_of_gradients(asked, monkeypatch):
    found = []
    for plain in (False, True):
        monkeypatch.setattr(MLP, "plain", plain)
        one, x = block().eval(), TOKENS.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one.mlp(x).float().square().sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.float().square().sum(), x)[0])
    assert asked
    assert near(*found, 0.02)


def test_frozen_layers_have_no_gradient(asked):
    one = block().requires_grad_(False)
    x = TOKENS.clone().requires_grad_()
    one(x).float().sum().backward()
    assert set(asked) == BOTH
    assert x.grad is not None
    assert all(each.grad is None for each in one.parameters())


def test_most_processors_have_none_of_it(monkeypatch):
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
    done = subprocess.run([sys.executable, KERNELS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["gelu", "gelu-tanh", "attention-70", "attention-64", "attention-7"]
