"""Every method on every kind of network: grid shape, finite, repeatable, independent of the batch, no trace."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import VARIANTS, network, random_images

from running import mostly_slow
from vitral.explanation.methods import METHODS, Maps
from vitral.explanation.methods.method import quiet
from vitral.model import BiT, BiTConfig
from vitral.testing import MethodContract, check_maps

KINDS = {
    name: VARIANTS[name]
    for name in (
        "paper",
        "oblong",
        "gray",
        "post-norm",
        "gelu-tanh",
        "swiglu",
        "mean",
        "mean-no-cls",
        "mean-pooled-norm",
        "mean-all",
        "map",
        "map-with-prefix",
        "registers",
        "distilled",
        "cls-mean",
        "none",
        "sincos",
        "rotary",
        "qk-norm",
        "layer-scale",
        "no-bias",
        "pre-logits",
        "tanh",
        "no-final-norm",
        "root",
        "hybrid",
        "hybrid-of-two-layers",
        "conv-stem",
        "conv-stem-with-patches",
    )
}
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
    return random_images(KINDS[kind], count).float()


@pytest.mark.parametrize(("method", "kind"), mostly_slow(CASES, 3))
def test_every_method_on_every_kind_of_network(method: str, kind: str):
    check_maps(METHODS[method], built(kind), images_for(kind), OPTIONS.get(method, {}), PROMISES.get(method, torch.inf))


def contract_of(method: str) -> type:
    fields = {"method": METHODS[method], "options": OPTIONS.get(method, {})}
    return type(f"Test_{method}", (MethodContract,), fields)


@pytest.mark.parametrize("method", METHODS)
def test_other_weights_give_another_map(method: str):
    contract_of(method)().test_other_weights_give_another_map()


@pytest.mark.parametrize("method", METHODS)
def test_bf16_and_frozen_weights(method: str):
    contract_of(method)().test_bf16_and_frozen_weights()


@pytest.mark.parametrize("method", ["grad-cam", "rollout"])
def test_the_contract_of_packages(method: str):
    """The part that other packages run and that is not above: its own networks."""
    contract_of(method)().test_maps_on_every_kind_of_network()


@pytest.mark.parametrize(
    "change",
    [
        {"routing": True},
        {"run": lambda model, images, targets: Maps(torch.zeros(*targets.shape, 3, 3))},
        {"run": lambda model, images, targets: Maps(torch.rand(*targets.shape, 3, 3))},
        {"run": lambda model, images, targets: Maps(torch.ones(*targets.shape, 2, 3) / 0)},
    ],
)
def test_the_contract_refuses_a_broken_method(change: dict[str, object]):
    broken = dataclasses.replace(METHODS["input-gradient"], **change)
    with pytest.raises(AssertionError):
        check_maps(broken, built("paper"), images_for("paper"))


def test_another_size_of_image_than_the_usual():
    config = dataclasses.replace(KINDS["sincos"], image_size=24)
    model, images = network(config).float(), torch.randn(1, 3, 12, 20)
    for name, method in METHODS.items():
        with quiet(model):
            assert method.run(model, images, torch.tensor([[1]]), **OPTIONS.get(name, {})).values.shape == (1, 1, 3, 5)
