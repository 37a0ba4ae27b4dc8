"""Packed images: logits of each alone, for any order and packing; attention stays within an image."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch
from tiny import VARIANTS, moderate

from vitral.errors import UsageError
from vitral.kernels.random import each
from vitral.model import BiT, BiTConfig, ViT
from vitral.model.packing import check_packable, pack, packed_logits

PACKABLE = [name for name, config in VARIANTS.items() if not config.hybrid]
GRIDS = [(3, 3), (1, 4), (2, 1), (3, 3), (5, 2), (1, 1)]


def own_sizes(model: ViT, grids: list[tuple[int, int]] = GRIDS) -> list[torch.Tensor]:
    config, generator = model.config, torch.Generator().manual_seed(3)
    sizes = [(rows * config.patch[0], columns * config.patch[1]) for rows, columns in grids]
    return [torch.randn(config.channels, *size, generator=generator, dtype=torch.float64) for size in sizes]


def alone(model: ViT, images: list[torch.Tensor]) -> torch.Tensor:
    model.any_size = True
    return torch.cat([model(image[None]) for image in images])


@pytest.mark.parametrize("name", [*PACKABLE, "hybrid", "conv-stem-of-maxima"])
def test_logits_are_those_of_each_image_alone(name):
    model = moderate(VARIANTS[name])
    images = own_sizes(model)
    budget = 17 + 3 * model.config.prefix
    for count in (None, budget):
        torch.testing.assert_close(packed_logits(model, images, count), alone(model, images), rtol=1e-9, atol=1e-9)


def test_any_order_and_any_packing_in_fp32():
    model = moderate(VARIANTS["paper"]).float()
    images = [image.float() for image in own_sizes(model)]
    expected = alone(model, images)
    draw = random.Random(0)
    for budget in (11, 14, 20, 100):
        order = draw.sample(range(len(images)), len(images))
        logits = packed_logits(model, [images[i] for i in order], budget)
        torch.testing.assert_close(logits, expected[order], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["paper", "mean", "map", "mixed"])
def test_no_token_sees_another_image(name):
    """The gradient of an image's logits is zero for every pixel of the others, and not for its own."""
    model = moderate(VARIANTS[name])
    images = [image.requires_grad_() for image in own_sizes(model)]
    logits = packed_logits(model, images, budget=40)
    for number in range(len(images)):
        gradients = torch.autograd.grad(logits[number].sum(), images, retain_graph=True)
        seen = [bool(one.any()) for one in gradients]
        assert seen == [other == number for other in range(len(images))]


def test_gradients_are_those_of_each_image_alone():
    model = moderate(VARIANTS["rotary"]).train()
    images = own_sizes(model)
    packed = torch.autograd.grad(packed_logits(model, images, 30).square().sum(), [*model.parameters()])
    single = torch.autograd.grad(alone(model, images).square().sum(), [*model.parameters()])
    for one, other in zip(packed, single, strict=True):
        torch.testing.assert_close(one, other)


def test_checkpointed_blocks_have_the_same_gradients():
    model = moderate(VARIANTS["mean"]).train()
    images = own_sizes(model)
    plain = torch.autograd.grad(packed_logits(model, images).sum(), [*model.parameters()])
    model.checkpointing = True
    again = torch.autograd.grad(packed_logits(model, images).sum(), [*model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True))


@pytest.mark.parametrize("name", ["paper", "mixed", "mean-no-cls"])
def test_dropped_patches_are_those_that_a_mask_hides(name):
    model = moderate(VARIANTS[name])
    model.any_size = True
    (image,) = own_sizes(model, [(4, 3)])
    torch.manual_seed(5)
    (places,) = each([image], lambda _: torch.rand(12).argsort()[:8])
    torch.manual_seed(5)
    dropped = packed_logits(model, [image], drop=1 / 3)
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, places] = True
    torch.testing.assert_close(dropped, model(image[None], mask))


def test_packing_is_within_the_budget_and_nearly_full():
    draw = random.Random(1)
    lengths = [draw.randint(4, 60) for _ in range(200)]
    packing = pack(lengths, 64)
    assert sum(packing.lengths) > 0.9 * packing.sequences * packing.length
    assert len(packing.places.unique()) == sum(lengths)
    counts = torch.bincount(packing.owners.flatten() + 1, minlength=201)[1:]
    assert counts.tolist() == lengths
    assert all((owners >= 0).sum() <= 64 for owners in packing.owners)
    first = torch.tensor(packing.starts)
    assert (first // 64 == (first + torch.tensor(lengths) - 1) // 64).all(), "an image is in one sequence"


def test_refusals():
    model = moderate(VARIANTS["paper"])
    with pytest.raises(UsageError, match="do not fit into sequences of 5 tokens"):
        packed_logits(model, own_sizes(model), budget=5)
    with pytest.raises(UsageError, match="not divisible by patch size"):
        packed_logits(model, [torch.zeros(3, 8, 7, dtype=torch.float64)])
    with pytest.raises(UsageError, match="no images"):
        pack([])
    with pytest.raises(UsageError, match="this network is a BiT"):
        check_packable(BiT(BiTConfig(layers=(1, 1, 1, 1), classes=2)))
    for change, name in (({"drop_path": 0.1}, "drop path"), ({"patch_dropout": 0.5}, "patch dropout")):
        trained = ViT(dataclasses.replace(VARIANTS["paper"], **change)).train()
        with pytest.raises(UsageError, match=f"cannot train a network with {name}"):
            packed_logits(trained, [torch.zeros(3, 8, 8)])
    with pytest.raises(UsageError, match="cannot train a network with a stem"):
        check_packable(ViT(VARIANTS["conv-stem"]), training=True)
