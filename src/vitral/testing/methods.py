"""The contract of an attribution method (`vitral.methods`)."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitral.explanation.methods import METHODS, Method
from vitral.explanation.methods.method import grid_of, quiet
from vitral.model import BiTConfig, Network, ViTConfig, network

CLASSES = 5
_TARGETS = ((1, 3), (0, 2), (4, 4))
"""Two classes for each of three images; those of the last are the same."""


def networks() -> dict[str, ViTConfig | BiTConfig]:
    """Name → a small network of each kind that a method meets: with and without class token, registers, color."""
    shape: dict[str, Any] = {
        "image_size": 12,
        "patch_size": 4,
        "classes": CLASSES,
        "dim": 16,
        "depth": 2,
        "heads": 2,
        "mlp_dim": 24,
    }
    return {
        "paper": ViTConfig(**shape),
        "oblong": ViTConfig(**{**shape, "image_size": (8, 12), "patch_size": (4, 2)}),
        "gray": ViTConfig(**shape, channels=1),
        "registers": ViTConfig(**shape, registers=3),
        "mean": ViTConfig(**shape, pool="mean", cls_token=False),
        "bit": BiTConfig(image_size=32, layers=(1, 1), classes=CLASSES),
    }


def random_network(config: ViTConfig | BiTConfig, seed: int = 0) -> Network:
    """Build a network in which no weight is zero, in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        built = network(config).eval()
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return built


def random_images(config: ViTConfig | BiTConfig, count: int = 3) -> Tensor:
    """Standardized images (count, C, H, W) of the network's size."""
    return torch.randn(count, config.channels, *config.image, generator=torch.Generator().manual_seed(1))


def check_maps(
    method: Method,
    model: nn.Module,
    images: Tensor,
    options: Mapping[str, object] | None = None,
    completeness: float = torch.inf,
) -> None:
    """Check a method on a network and three images: maps on its grid, finite, repeatable, independent of the batch and,
    unless it is a routing method, dependent on the class; and that it leaves the network as it was.
    """
    given, targets = dict(options or {}), torch.tensor(_TARGETS)
    state, before = copy.deepcopy(model.state_dict()), {n: set(vars(m)) for n, m in model.named_modules()}
    with torch.no_grad():
        logits = model(images)
    with quiet(model):
        found = method.run(model, images, targets, **given)
        again = method.run(model, images, targets, **given)
        singles = [method.run(model, images[i : i + 1], targets[i : i + 1], **given).values for i in range(3)]
    values = found.values
    assert values.shape == (3, 2, *grid_of(model, images)), f"maps are {tuple(values.shape)}"
    assert values.dtype == torch.float32
    assert values.isfinite().all(), "values that are not finite"
    if found.completeness is not None:
        assert found.completeness.shape == targets.shape
        assert found.completeness.max() <= completeness
    assert torch.equal(values, again.values), "the same images give another map"
    scale = values.abs().amax().clamp_min(1e-12)
    assert (torch.cat(singles) - values).abs().max() <= 1e-4 * scale, "a map depends on the other images of its batch"
    assert (values[2, 0] - values[2, 1]).abs().max() <= 1e-6 * scale, "the same class twice gives two maps"
    assert values.std() > 0, "every value is the same"
    different = bool((values[:2, 0] - values[:2, 1]).abs().max() > 1e-6 * scale)
    assert different != method.routing, "a routing method must not change with the class, all others must"
    with torch.no_grad():
        assert torch.equal(model(images), logits), "the network computes something else afterwards"
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert {n: set(vars(m)) for n, m in model.named_modules()} == before, "attributes were left in the network"
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


class MethodContract:
    """Inherit, and set `method`."""

    method: Method
    options: Mapping[str, Any] = {}
    """Options of `method.run`, cheaper than the defaults."""
    ignores_network = False
    """True for a baseline whose map does not depend on the weights."""

    def test_maps_on_every_kind_of_network(self) -> None:
        for name, config in networks().items():
            if name != "bit" or self.method.any_network:
                check_maps(self.method, random_network(config), random_images(config), self.options)

    def test_other_weights_give_another_map(self) -> None:
        config = networks()["paper"]
        one, other = (self._maps(random_network(config, seed), random_images(config)) for seed in (0, 1))
        assert ((one - other).abs().max() > 1e-3 * one.abs().max()) != self.ignores_network

    def test_bf16_and_frozen_weights(self) -> None:
        config = networks()["paper"]
        model = random_network(config).requires_grad_(False)
        assert self._maps(model.bfloat16(), random_images(config).bfloat16()).isfinite().all()
        assert not any(p.requires_grad for p in model.parameters())

    def test_vitral_finds_it(self) -> None:
        """The package is installed, and the name is not one of vitral's own methods."""
        assert METHODS[self.method.name] == self.method

    def _maps(self, model: nn.Module, images: Tensor) -> Tensor:
        with quiet(model):
            return self.method.run(model, images, torch.ones(len(images), 1, dtype=torch.int64), **self.options).values
