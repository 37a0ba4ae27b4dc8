"""Every method on every kind of network: the grid's shape, finite, repeatable, batch of n is n singles, no trace."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from tiny import VARIANTS, network, pictures

from vitral.explanation.methods import METHODS
from vitral.explanation.methods.method import grid_of, quiet
from vitral.model import BiT, BiTConfig

KINDS = {
    name: VARIANTS[name]
    for name in (
        "paper", "oblong", "grey", "post-norm", "gelu-tanh", "swiglu", "mean", "mean-no-cls", "mean-pooled-norm",
        "mean-all", "map", "map-with-prefix", "registers", "distilled", "cls-mean", "none", "sincos", "rotary",
        "qk-norm", "layer-scale", "no-bias", "pre-logits", "tanh", "no-final-norm", "root", "hybrid",
        "hybrid-of-two-layers", "conv-stem", "conv-stem-with-patches",
    )
}  # fmt: skip
BIT = BiTConfig(image_size=32, layers=(1, 1), classes=5)
OPTIONS = {"rise": {"masks": 16}, "integrated-gradients": {"steps": 4}, "smoothgrad": {"samples": 3}}
"""Cheaper than the defaults, where a method has a number of passes to choose."""

PROMISES = {"fullgrad+": 1e-4}
"""The completeness error, at most, in fp32."""

CASES = [(m, k) for m in METHODS for k in KINDS] + [(m, "bit") for m, one in METHODS.items() if one.any_network]


def built(kind: str) -> torch.nn.Module:
    if kind != "bit":
        model = network(KINDS[kind]).float()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return model
    torch.manual_seed(0)
    model = BiT(BIT).eval()
    with torch.no_grad():
        model.head.weight.normal_()
    return model


def images_for(kind: str, count: int = 3) -> torch.Tensor:
    if kind == "bit":
        return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return pictures(KINDS[kind], count).float()


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_every_method_on_every_kind_of_network(method: str, kind: str):
    model, images = built(kind), images_for(kind)
    run, options = METHODS[method].run, OPTIONS.get(method, {})
    targets = torch.tensor([[1, 3], [0, 2], [4, 4]])
    state, before = copy.deepcopy(model.state_dict()), {n: set(vars(m)) for n, m in model.named_modules()}
    with torch.no_grad():
        logits = model(images)
    with quiet(model):
        found = run(model, images, targets, **options)
        again = run(model, images, targets, **options)
        singles = [run(model, images[i : i + 1], targets[i : i + 1], **options).values for i in range(3)]
    assert found.values.shape == (3, 2, *grid_of(model, images))
    assert found.values.dtype == torch.float32
    assert found.values.isfinite().all()
    if found.completeness is not None:
        assert found.completeness.shape == targets.shape
        assert found.completeness.max() <= PROMISES.get(method, torch.inf)
    assert torch.equal(found.values, again.values)
    scale = found.values.abs().amax().clamp_min(1e-12)
    assert (torch.cat(singles) - found.values).abs().max() <= 1e-4 * scale
    assert (found.values[2, 0] - found.values[2, 1]).abs().max() <= 1e-6 * scale  # the same class twice
    assert found.values.std() > 0
    different = (found.values[:2, 0] - found.values[:2, 1]).abs().max() > 1e-6 * scale
    assert bool(different) != METHODS[method].routing  # a routing method must not change with the class
    with torch.no_grad():
        assert torch.equal(model(images), logits)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert {n: set(vars(m)) for n, m in model.named_modules()} == before
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("method", METHODS)
def test_other_weights_give_another_map(method: str):
    config, options = KINDS["paper"], OPTIONS.get(method, {})
    images, targets = pictures(config).float(), torch.tensor([[1], [2]])
    maps = []
    for seed in (0, 1):
        model = network(config, seed).float()
        with quiet(model):
            maps.append(METHODS[method].run(model, images, targets, **options).values)
    assert (maps[0] - maps[1]).abs().max() > 1e-3 * maps[0].abs().max()


@pytest.mark.parametrize("method", METHODS)
def test_bf16_and_frozen_weights(method: str):
    model = built("paper")
    images, targets = images_for("paper"), torch.tensor([[1], [2], [3]])
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    half = copy.deepcopy(model).bfloat16()
    with quiet(half):
        assert METHODS[method].run(half, images.bfloat16(), targets, **OPTIONS.get(method, {})).values.isfinite().all()
    with quiet(model):
        METHODS[method].run(model, images, targets, **OPTIONS.get(method, {}))
    assert not any(p.requires_grad for p in model.parameters())


def test_another_size_of_picture_than_the_usual():
    config = dataclasses.replace(KINDS["sincos"], image_size=24)
    model, images = network(config).float(), torch.randn(1, 3, 12, 20)
    for name, method in METHODS.items():
        with quiet(model):
            assert method.run(model, images, torch.tensor([[1]]), **OPTIONS.get(name, {})).values.shape == (1, 1, 3, 5)
