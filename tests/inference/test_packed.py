"""Packed networks match the original up to rounding."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny import KERNELS, VARIANTS, moderate, random_images
from torch import nn

from running import mostly_slow
from vitral.inference.engines import packed as module
from vitral.inference.engines.packed import is_faster, packable, packed
from vitral.model import BiT, BiTConfig, ViT

HALF, SINGLE = torch.bfloat16, torch.float32


def of(kind: torch.dtype, *values: float):
    """A test case of a dtype, skipped if this CPU has no operators for it."""
    missing = pytest.mark.skipif(not module.self_test(kind), reason=f"{kind} cannot be packed here")
    return pytest.param(kind, *values, marks=missing)


BOTH = [of(HALF), of(SINGLE)]


@pytest.mark.parametrize("name", mostly_slow(KERNELS, 3))
@pytest.mark.parametrize(("kind", "slack", "within"), [of(HALF, 0.01, 0.1), of(SINGLE, 1e-6, 1e-4)])
def test_as_accurate_as_the_network(name, kind, slack, within):
    """Both round, so fp64 is the reference."""
    config = VARIANTS[name]
    rounded, images = moderate(config).to(kind), random_images(config).to(kind)
    exact = copy.deepcopy(rounded).double()
    with torch.inference_mode():
        wanted = exact(images.double())
        plain, found = rounded(images).double(), packed(rounded)(images).double()
    size = wanted.abs().max()
    assert (found - wanted).abs().max() <= 2 * (plain - wanted).abs().max() + slack * size
    assert (found - wanted).abs().max() <= within * size


@pytest.mark.parametrize("name", ["paper", "mean", "map-with-prefix"])
@pytest.mark.parametrize("kind", BOTH)
def test_masks_reach_the_packed_network(name, kind):
    config = VARIANTS[name]
    model, images = moderate(config).to(kind), random_images(config).to(kind)
    mask = torch.ones(2, config.grid[0] * config.grid[1], dtype=torch.bool)
    mask[:, 1] = False
    with torch.inference_mode():
        twin = packed(model)
        torch.testing.assert_close(twin(images, mask), model(images, mask), rtol=0.1, atol=0.1)
        assert not torch.equal(twin(images, mask), twin(images))


@pytest.mark.parametrize("size", [1.0, 40.0, 1e4])
@pytest.mark.parametrize("shift", [0.0, -200.0, 95.0])
@pytest.mark.parametrize(("kind", "within"), [(HALF, 0.03), (SINGLE, 1e-4)])
def test_attention_survives_scores_that_overflow(size, shift, kind, within, monkeypatch):
    """Scores of any size; a common offset of a row has no effect. Also in several parts of the batch."""
    monkeypatch.setattr(module, "_IN_CACHE", kind.itemsize * 3 * 7 * 7 * 2)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(5, 3, 7, 8, generator=generator) for _ in range(3))
    q, k = q * size, k.clone()
    q[..., 0], k[..., 0] = shift, 1.0  # adds the same to all scores of a row
    mask = torch.ones(5, 1, 1, 7, dtype=torch.bool)
    mask[2, ..., 4] = False
    q, k, v = (x.to(kind) for x in (q, k, v))
    scores = (q.double() @ k.double().transpose(-2, -1)).masked_fill(~mask, -torch.inf)
    found = module.attention(q, k, v, mask, scale=1.0)
    rounded = (q @ k.transpose(-2, -1)).masked_fill(~mask, -torch.inf)
    wanted = rounded.double().softmax(-1) @ v.double()
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), wanted, rtol=within, atol=within)
    if size == 1 and shift == 0:
        torch.testing.assert_close(found.double(), scores.softmax(-1) @ v.double(), rtol=2 * within, atol=2 * within)


@pytest.mark.parametrize("score", [0.0, 69.0, 84.0, 86.0, 87.0, 88.0, 200.0])
@pytest.mark.parametrize("value", [1.0, 20.0, 1e6])
@pytest.mark.parametrize(("kind", "within"), [(HALF, 0.02), (SINGLE, 1e-5)])
def test_attention_with_large_values(score, value, kind, within):
    q = torch.zeros(1, 2, 5, 8)
    k = torch.zeros(1, 2, 5, 8)
    q[..., 0], k[..., 0] = 1.0, score
    v = torch.full((1, 2, 5, 8), value)
    found = module.attention(*(x.to(kind) for x in (q, k, v)), None, scale=1.0)
    torch.testing.assert_close(found.float(), v, rtol=within, atol=0.0)


@pytest.mark.parametrize("name", mostly_slow(KERNELS, 9))
@pytest.mark.parametrize("kind", BOTH)
def test_an_empty_batch(name, kind):
    config = VARIANTS[name]
    model, images = moderate(config).to(kind), random_images(config).to(kind)
    with torch.inference_mode():
        for network in (model, packed(model)):
            assert network(images[:0]).shape == (0, *network(images).shape[1:])


@pytest.mark.parametrize("kind", BOTH)
def test_the_network_stays_as_it_is(kind):
    config = VARIANTS["layer-scale"]
    model = moderate(config).to(kind)
    before = {name: (type(part), set(vars(part)), set(part._modules)) for name, part in model.named_modules()}
    state = copy.deepcopy(model.state_dict())
    packed(model)
    assert {name: (type(part), set(vars(part)), set(part._modules)) for name, part in model.named_modules()} == before
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("there", [True, False])
def test_fp32_is_packed_if_faster(there, monkeypatch):
    monkeypatch.setattr(module, "has_avx512", lambda: there)
    narrow = moderate(VARIANTS["paper"])
    assert not is_faster(narrow.float())
    wide = ViT(dataclasses.replace(VARIANTS["paper"], dim=384, heads=6))
    assert is_faster(wide) == there
    assert is_faster(narrow.bfloat16())


@pytest.mark.parametrize("kind", BOTH)
def test_the_self_test_ignores_autocast(kind):
    module.self_test.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert module.self_test(kind)
    module.self_test.cache_clear()


@pytest.mark.parametrize(("kind", "keys", "fused"), [(HALF, 2048, False), (HALF, 2049, True), (SINGLE, 5, True)])
def test_explicit_scores_as_in_the_network(kind, keys, fused, monkeypatch):
    calls = []
    original = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or original(*a, **k))
    q, k = torch.randn(1, 1, 1, 8, dtype=kind), torch.randn(1, 1, keys, 8, dtype=kind)
    module.attention(q, k, k, None, scale=1.0)
    assert bool(calls) == fused


@pytest.mark.parametrize("kind", BOTH)
def test_unsupported_networks(kind, monkeypatch):
    config = VARIANTS["paper"]
    assert packable(moderate(config).to(kind))
    assert not packable(moderate(config).double())
    mixed = moderate(config)
    mixed.head.half()
    assert not packable(mixed)
    assert not packable(BiT(BiTConfig(image_size=32, classes=5, layers=(2, 1))).to(kind))
    assert not packable(nn.Linear(2, 2).to(kind))

    def other(x, *_):
        return x @ torch.zeros(64, 32).to(kind)

    module.self_test.cache_clear()
    monkeypatch.setattr(module._Linear, "forward", lambda self, x: other(x))
    assert not packable(moderate(config).to(kind)), "an operator that computes something else"
    module.self_test.cache_clear()
    monkeypatch.setattr(module._Linear, "forward", lambda self, x: torch.ops.mkldnn.no_such_operator(x))
    assert not packable(moderate(config).to(kind)), "a torch without the operator"
    module.self_test.cache_clear()


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - KERNELS.keys()))
def test_blocks_with_other_parts_are_not_packed(name):
    assert not packable(moderate(VARIANTS[name]).float())
