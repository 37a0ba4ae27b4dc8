"""Dense layers match `F.linear`, forward and backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tiny import VARIANTS, moderate, random_images
from torch import Tensor
from torch.autograd import forward_ad

from running import mostly_slow
from vitral.kernels import dense, fused, reference_ops
from vitral.kernels.dense import linear

has_operator = pytest.mark.skipif(not dense.self_test(), reason="this torch has no such operator here")
SHAPES = {"tokens": (3, 7, 24, 40), "one": (1, 1, 24, 40), "odd": (2, 5, 13, 11)}  # B, N, in, out


@pytest.fixture(autouse=True)
def of_any_size(monkeypatch):
    """Dispatch products of any size, since they are small here."""
    monkeypatch.setattr(dense, "_MIN_MULTIPLICATIONS", 1)


def numbers(shape: tuple[int, ...], kind: torch.dtype) -> tuple[Tensor, ...]:
    B, N, inputs, outputs = shape
    generator = torch.Generator().manual_seed(0)
    sizes = (B, N, inputs), (outputs, inputs), (outputs,), (B, N, outputs)
    return tuple(torch.randn(size, generator=generator).to(kind) for size in sizes)


def by(function, x: Tensor, weight: Tensor, bias: Tensor, upstream: Tensor, autocast: bool) -> list[Tensor]:
    """Result and gradients of x, weight and bias."""
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


@pytest.fixture
def slow_mkl(monkeypatch):
    """As on an AMD CPU with AVX-512."""
    monkeypatch.setattr(dense, "_mkl_is_slow", lambda: True)


@has_operator
@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_in_fp32_sums_in_another_order(shape, with_bias):
    x, weight, bias, upstream = numbers(SHAPES[shape], torch.float32)
    found, exact = [], []
    for function, kind, into in ((linear, torch.float32, found), (F.linear, torch.float64, exact)):
        leaves = [t.clone().to(kind).requires_grad_() for t in (x, weight, bias)]
        y = function(*leaves[:2], leaves[2] if with_bias else None)
        y.backward(upstream.to(kind))
        into += [y.detach(), *(leaf.grad for leaf in leaves[: 2 + with_bias])]
    assert {t.dtype for t in found} == {torch.float32}
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@has_operator
@pytest.mark.usefixtures("slow_mkl")
def test_strided_fp32_gradients():
    """The gradient of a sum is an expanded scalar, that of a transposed result is strided."""
    x, weight, bias, _ = numbers(SHAPES["tokens"], torch.float32)
    for what in (lambda y: y.sum(), lambda y: (y.transpose(-1, -2) * torch.arange(21).view(7, 1, 3)).sum()):
        gradients = []
        for function in (linear, F.linear):
            leaves = [t.clone().requires_grad_() for t in (x.transpose(0, 1), weight, bias)]
            gradients.append(torch.autograd.grad(what(function(*leaves)), leaves))
        for ours, theirs in zip(*gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@has_operator
def test_fp32_is_dispatched_if_mkl_is_slow(monkeypatch):
    x, weight, bias, _ = numbers(SHAPES["tokens"], torch.float32)
    for slow in (False, True):
        monkeypatch.setattr(dense, "_mkl_is_slow", lambda slow=slow: slow)
        assert ("_KernelLinear" in type(linear(x, weight.requires_grad_(), bias).grad_fn).__name__) == slow
    assert linear(x.double(), weight.double(), bias.double()).dtype == torch.float64


@has_operator
@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.filterwarnings("default:.*torch.jit.script")  # torch's own formulas
def test_forward_mode_gradients():
    x, weight, bias, _ = numbers(SHAPES["tokens"], torch.float32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        tangent = forward_ad.unpack_dual(linear(dual, weight, bias)).tangent
    torch.testing.assert_close(tangent, torch.ones_like(x) @ weight.T)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper", "qk-norm-rotary"])
def test_exported_networks_take_batches_of_any_size(name, monkeypatch):
    """A decision by input size would make an exporter fix the size that it traced."""
    model, images = moderate(VARIANTS[name]).float(), random_images(VARIANTS[name]).float()
    tokens = model.config.grid[0] * model.config.grid[1]
    monkeypatch.setattr(dense, "_MIN_MULTIPLICATIONS", 8 * tokens * model.config.dim**2)
    shapes = {"images": {0: torch.export.Dim("batch", min=1, max=64)}, "mask": None}
    exported = torch.export.export(model, (images, None), dynamic_shapes=shapes).module()
    many = images.repeat(20, 1, 1, 1)
    torch.testing.assert_close(exported(many, None), model(many), rtol=1e-4, atol=1e-4)


def test_cpus_with_a_slow_mkl(monkeypatch):
    answers = []
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    for avx512, amd in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr(dense, "has_avx512", lambda avx512=avx512: avx512)
        monkeypatch.setattr(dense, "is_amd", lambda amd=amd: amd)
        answers.append(dense._mkl_is_slow.__wrapped__())
    assert answers == [True, False, False]


@has_operator
def test_bf16_is_dispatched_on_a_cpu_only(monkeypatch):
    monkeypatch.setattr(dense, "_mkl_is_slow", lambda: False)
    x, weight, bias, _ = numbers(SHAPES["tokens"], torch.bfloat16)

    def taken(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
        grad_fn = linear(x, weight.requires_grad_(), bias).grad_fn
        return "_KernelLinear" in type(grad_fn).__name__

    assert taken(x, weight, bias)
    assert not taken(x, weight, None)
    assert not taken(x[:0], weight, bias)
    assert not taken(x.float(), weight.detach().float(), bias.float())
    with torch.autocast("cpu", torch.bfloat16):
        assert taken(x.float(), weight.detach().float(), bias.float())
        assert not taken(x.double(), weight.detach().double(), bias.double())
    with torch.autocast("cpu", torch.float16):
        assert not taken(x.float(), weight.detach().float(), bias.float())
    monkeypatch.setattr(dense, "_MIN_MULTIPLICATIONS", x.numel() * len(weight) + 1)
    assert not taken(x, weight, bias)
    monkeypatch.setattr(dense, "_MIN_MULTIPLICATIONS", x.numel() * len(weight))
    assert taken(x, weight, bias)


@pytest.mark.parametrize("name", mostly_slow(VARIANTS, 3))
def test_reference_ops_use_torch_only(name, monkeypatch):
    """And a copy of it; no layer reaches the dispatch or a fused kernel."""

    def ours(*_: object, **__: object) -> None:
        raise AssertionError("no operator of torch's own")

    network = moderate(VARIANTS[name]).float().train()
    reference_ops(network)
    for place, function in (
        (dense, "_kernel_dtype"),
        (dense, "supports_patches"),
        (fused, "supports_linear_gelu"),
        (fused, "supports_attention"),
        (fused, "supports_qkv_attention"),
    ):
        monkeypatch.setattr(place, function, ours)
    images = random_images(VARIANTS[name]).float()
    for one in (network, copy.deepcopy(network)):
        with torch.autocast("cpu", torch.bfloat16):
            one(images).float().sum().backward()


@has_operator
def test_the_self_test_does_not_depend_on_the_caller():
    for around in (torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), torch.no_grad()):
        dense.self_test.cache_clear()
        with around:
            assert dense.self_test()


@has_operator
@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_gradients_of_gradients_and_of_parts(kind):
    x, weight, bias, upstream = numbers(SHAPES["odd"], kind)
    found = []
    for function in (linear, F.linear):
        leaf = x.clone().requires_grad_()
        w = weight.clone().requires_grad_()
        (gradient,) = torch.autograd.grad((function(leaf, w, bias) * upstream).sum(), leaf, create_graph=True)
        found.append(torch.autograd.grad(gradient.float().square().sum(), w)[0])
        assert leaf.grad is None
    torch.testing.assert_close(*found, rtol=0 if kind == torch.bfloat16 else 1e-5, atol=1e-4 * (kind == torch.float32))


@has_operator
def test_one_image_at_a_time_by_vmap():
    x, weight, bias, _ = numbers(SHAPES["tokens"], torch.bfloat16)
    each = torch.func.vmap(linear, in_dims=(0, None, None))(x, weight, bias)
    torch.testing.assert_close(each, F.linear(x, weight, bias), rtol=0.01, atol=0.01)


@has_operator
@pytest.mark.usefixtures("slow_mkl")
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("name", mostly_slow(VARIANTS, 3))
def test_gradients_of_networks_match(name, autocast):
    """Gradients of every parameter, under autocast and in fp32, are those of plain dense layers up to rounding."""
    config = VARIANTS[name]
    network, images = moderate(config).float().train(), random_images(config).float()

    def gradients() -> dict[str, Tensor]:
        network.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = network(images).float().square().mean()
        loss.backward()
        return {key: p.grad.clone() for key, p in network.named_parameters() if p.grad is not None}

    found = gradients()
    reference_ops(network)
    wanted = gradients()
    assert found.keys() == wanted.keys()
    within = 0.01 if autocast else 1e-4
    for key, theirs in wanted.items():
        assert (found[key] - theirs).norm() <= within * theirs.norm() + 1e-6, key
