"""The dense layer computes what `F.linear` computes, forwards and backwards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny import VARIANTS, moderate, pictures
from torch import Tensor

from vitral.model import linear as module
from vitral.model.linear import Linear, linear

has_operator = pytest.mark.skipif(not module.works(), reason="this torch has no such operator here")
SHAPES = {"tokens": (3, 7, 24, 40), "one": (1, 1, 24, 40), "odd": (2, 5, 13, 11)}  # B, N, in, out


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Products are small here."""
    monkeypatch.setattr(module, "_WORTH_IT", 1)


@pytest.fixture
def plainly(monkeypatch):
    """The layer as `F.linear` has it, from here on."""
    return lambda: monkeypatch.setattr(Linear, "plain", True)


def numbers(shape: tuple[int, ...], kind: torch.dtype) -> tuple[Tensor, ...]:
    B, N, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (B, N, inputs), (outputs, inputs), (outputs,), (B, N, outputs)
    return tuple(torch.randn(size, generator=generator).to(kind) for size in sizes)


def by(function, x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor, autocast: bool) -> list[Tensor]:
    """The result and the gradients of x, weight and bias."""
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = function(*leaves)
    y.backward(upstream.to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


@has_operator
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_bits_but_for_the_gradient_of_the_bias(shape, autocast):
    given = numbers(SHAPES[shape], torch.float32 if autocast else torch.bfloat16)
    found, wanted = by(linear, *given, autocast), by(F.linear, *given, autocast)
    assert [t.dtype for t in found] == [t.dtype for t in wanted]
    assert found[0].dtype == torch.bfloat16
    for ours, theirs in zip(found[:3], wanted[:3], strict=True):
        assert torch.equal(ours, theirs)
    exact = given[3].bfloat16().double().sum((0, 1))
    assert (found[3].double() - exact).abs().max() <= 2**-8 * exact.abs().max()  # one rounding


@has_operator
def test_it_is_taken_in_bf16_on_a_cpu_alone(plainly, monkeypatch):
    x, weight, bias, _ = numbers(SHAPES["tokens"], torch.bfloat16)

    def taken(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        grad_fn = linear(x, weight.requires_grad_(), bias).grad_fn
        return "_Product" in type(grad_fn).__name__

    assert taken(x, weight, bias)
    assert not taken(x, weight, None)
    assert not taken(x[:0], weight, bias)
    assert not taken(x.float(), weight.detach().float(), bias.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert taken(x.float(), weight.detach().float(), bias.float())
        assert not taken(x.double(), weight.detach().double(), bias.double())
    with torch.autocast("cpu", torch.float16):
        assert not taken(x.float(), weight.detach().float(), bias.float())
    monkeypatch.setattr(module, "_WORTH_IT", x.numel() * len(weight) + 1)
    assert not taken(x, weight, bias)
    monkeypatch.setattr(module, "_WORTH_IT", x.numel() * len(weight))
    assert taken(x, weight, bias)
    plainly()
    assert not taken(x, weight, bias)


@has_operator
def test_whether_it_works_does_not_depend_on_who_asks():
    for around in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        module.works.cache_clear()
        with around:
            assert module.works()


@has_operator
def test_gradients_of_gradients_and_of_parts():
    x, weight, bias, upstream = numbers(SHAPES["odd"], torch.bfloat16)
    found = []
    for function in (linear, F.linear):
        leaf = x.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((function(leaf, w, bias) * upstream).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(gradient.float().square().sum(), w)[0])
        assert leaf.grad is None
    assert torch.equal(*found)


@has_operator
def test_one_picture_at_a_time_by_vmap():
    x, weight, bias, _ = numbers(SHAPES["tokens"], torch.bfloat16)
    each = torch.func.vmap(linear, in_dims=(0, None, None))(x, weight, bias)
    torch.testing.assert_close(each, F.linear(x, weight, bias), rtol=0.01, atol=0.01)


@has_operator
@pytest.mark.parametrize("name", VARIANTS)
def test_networks_learn_alike(name, plainly):
    """Gradients of every parameter, under autocast, are those of plain dense layers up to rounding in bf16."""
    config = VARIANTS[name]
    network, images = moderate(config).float().train(), pictures(config).float()

    def gradients() -> dict[str, Tensor]:
        network.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(images).float().square().mean()
        loss.backward()
        return {key: p.grad.clone() for key, p in network.named_parameters() if p.grad is not None}

    found = gradients()
    plainly()
    wanted = gradients()
    assert found.keys() == wanted.keys()
    for key, theirs in wanted.items():
        assert (found[key] - theirs).norm() <= 0.01 * theirs.norm() + 1e-6, key
