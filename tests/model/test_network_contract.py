"""Properties of every choice of a configuration; a choice that no variant covers fails the suite."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import reference
import torch
from tiny import SHAPE, VARIANTS, network, random_images

from vitral.errors import UsageError
from vitral.model import CONV_STEMMED, HYBRIDS, SIZES, WITH_PRESET, WRITE_UPS, ViT, ViTConfig, config
from vitral.model.position import POSITIONS

variants = pytest.mark.parametrize("name", VARIANTS)


def test_variants_cover_every_choice():
    for field, kind in get_type_hints(ViTConfig).items():
        taken = {getattr(variant, field) for variant in VARIANTS.values()}
        if get_origin(kind) is Literal:
            assert taken >= set(get_args(kind)), field
        elif kind == tuple[int, ...] | None:
            assert taken >= {None, ()}, field
            assert any(taken), field
        elif kind is bool:
            assert taken == {True, False}, field
        elif field not in ("dim", "depth", "heads", "mlp_dim", "head_bias_init"):
            assert len(taken) > 1, f"no variant changes {field}"
    assert {variant.position for variant in VARIANTS.values()} == set(POSITIONS)
    assert set(WRITE_UPS) <= set(VARIANTS)


@variants
def test_logits_equal_the_formulas(name):
    config, model = VARIANTS[name], network(VARIANTS[name])
    images = random_images(config)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    with torch.no_grad():
        ours = model(images).numpy()
    assert ours.shape == (2, config.classes or config.dim)
    np.testing.assert_allclose(ours, reference.logits(state, config, images.numpy()), atol=1e-6, rtol=1e-6)


@variants
def test_logits_with_a_mask_equal_the_formulas(name):
    config, model = VARIANTS[name], network(VARIANTS[name])
    images, mask = random_images(config), half_masked(config)
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    with torch.no_grad():
        ours = model(images, mask).numpy()
    wanted = reference.logits(state, config, images.numpy(), mask.numpy())
    np.testing.assert_allclose(ours, wanted, atol=1e-6, rtol=1e-6)


@variants
def test_every_parameter_is_used(name):
    model = network(VARIANTS[name])
    model(random_images(VARIANTS[name])).square().sum().backward()
    unused = [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is None or not parameter.grad.isfinite().all() or parameter.grad.abs().max() < 1e-9
    ]
    # One vector added to every key moves all logits of a row alike, and softmax does not see it.
    constant = [] if VARIANTS[name].position == "rotary" else [key for key in unused if key.endswith("k_norm.bias")]
    assert unused == constant


@variants
def test_evaluation_is_deterministic(name):
    changed = dataclasses.replace(VARIANTS[name], dropout=0.5, attention_dropout=0.5, drop_path=0.5)
    model, images = network(changed), random_images(changed)
    with torch.no_grad():
        assert torch.equal(model(images), model(images))
        model.train()
        assert not torch.equal(model(images), model(images))


@variants
def test_checkpointing_gives_the_same_gradients(name):
    changed = dataclasses.replace(VARIANTS[name], dropout=0.2, attention_dropout=0.2, drop_path=0.2)
    gradients = []
    for checkpointing in (False, True):
        model = network(changed).train()
        model.checkpointing = checkpointing
        torch.manual_seed(3)
        model(random_images(changed)).square().sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, recomputed)


@variants
def test_images_of_a_batch_are_independent(name):
    model, images = network(VARIANTS[name]), random_images(VARIANTS[name], count=3)
    with torch.no_grad():
        torch.testing.assert_close(model(images)[1:2], model(images[1:2]))


@variants
def test_configuration_survives_json(name):
    assert ViTConfig.from_json(json.loads(json.dumps(VARIANTS[name].to_json()))) == VARIANTS[name]


@pytest.mark.parametrize("name", [*(f"{size}/16" for size in SIZES), *WITH_PRESET, *CONV_STEMMED, *HYBRIDS, *WRITE_UPS])
def test_named_configurations_survive_json(name):
    assert ViTConfig.from_json(json.loads(json.dumps(config(name).to_json()))) == config(name)


# Masks ----------------------------------------------------------------------------------------------------------------


def half_masked(config: ViTConfig) -> torch.Tensor:
    """(2, patches): the first image keeps its even patches, the second one its first three."""
    place = torch.arange(config.grid[0] * config.grid[1])
    return torch.stack([place % 2 == 0, place < 3])


def hidden_changed(config: ViTConfig, images: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Images with other pixels in the masked patches."""
    hidden = ~mask.view(-1, 1, *config.grid)
    pixels = hidden.repeat_interleave(config.patch[0], 2).repeat_interleave(config.patch[1], 3)
    return torch.where(pixels, 7 * random_images(config, seed=9), images)


poolings = pytest.mark.parametrize("pool", ["cls", "mean", "mean-all", "map"])
positions = pytest.mark.parametrize("position", POSITIONS)


@poolings
@positions
def test_masked_patches_change_nothing(position, pool):
    config = ViTConfig(**SHAPE, position=position, pool=pool, registers=1)
    model, images, mask = network(config), random_images(config), half_masked(config)
    other = hidden_changed(config, images, mask)
    with torch.no_grad():
        torch.testing.assert_close(model(images, mask), model(other, mask))
        assert not torch.allclose(model(images), model(other)), "the change must be visible without a mask"
        torch.testing.assert_close(model(images, torch.ones_like(mask)), model(images))


@poolings
@pytest.mark.parametrize("position", ["none", "sincos"])
def test_a_padded_image_is_the_image(position, pool):
    config = ViTConfig(**SHAPE | {"image_size": (20, 16)}, position=position, pool=pool)
    model = network(config)
    small = random_images(config)[:, :, :8, :12]
    canvas = random_images(config, seed=5)
    canvas[:, :, :8, :12] = small
    mask = torch.zeros(2, *config.grid, dtype=torch.bool)
    mask[:, :2, :3] = True
    with torch.no_grad():
        torch.testing.assert_close(model(canvas, mask.flatten(1)), model(small))


def test_rotary_positions_are_relative_to_the_canvas():
    """Rotary coordinates span the canvas: padding moves patches, though the content of the padding has no effect."""
    config = ViTConfig(**SHAPE, position="rotary")
    model, small = network(config), random_images(config)[:, :, :8, :8]
    canvas = torch.nn.functional.pad(small, (0, 4, 0, 4))
    mask = torch.zeros(2, *config.grid, dtype=torch.bool)
    mask[:, :2, :2] = True
    with torch.no_grad():
        assert not torch.allclose(model(canvas, mask.flatten(1)), model(small))


@pytest.mark.parametrize("position", ["none", "sincos", "rotary"])
def test_computed_positions_take_any_size(position):
    config = ViTConfig(**SHAPE, position=position)
    model, larger = network(config), random_images(dataclasses.replace(config, image_size=(20, 8)))
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    wanted = reference.logits(state, dataclasses.replace(config, image_size=(20, 8)), larger.numpy())
    with torch.no_grad():
        np.testing.assert_allclose(model(larger).numpy(), wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "mask",
    [torch.ones(2, 9), torch.ones(2, 9, dtype=torch.long), torch.ones(2, 10).bool(), torch.ones(2, 3, 3).bool()],
    ids=["float", "long", "length", "grid"],
)
def test_invalid_masks_are_refused(mask):
    config = ViTConfig(**SHAPE)
    with pytest.raises(UsageError, match="mask"):
        network(config)(random_images(config), mask)


def test_none_is_a_bag_of_patches():
    """Without positions a network ignores the order of patches; with any scheme it depends on it."""
    for position in POSITIONS:
        config = ViTConfig(**SHAPE, position=position)
        model, images = network(config), random_images(config)
        shuffled = torch.cat([images[..., 4:], images[..., :4]], dim=-1)
        with torch.no_grad():
            assert torch.allclose(model(images), model(shuffled)) == (position == "none")


def test_a_model_moves_between_kinds_and_copies():
    model = ViT(ViTConfig(**SHAPE, position="rotary"))
    images = torch.randn(1, 3, 12, 12)
    model(images)
    assert copy.deepcopy(model).double()(images.double()).dtype == torch.float64
    assert model.to(torch.bfloat16)(images.bfloat16()).dtype == torch.bfloat16


@variants
def test_tokens_are_contiguous(name):
    """Otherwise every norm copies them."""
    model = network(VARIANTS[name])
    x, _ = model.embed(random_images(VARIANTS[name]))
    assert x.is_contiguous()
