"""Training on fewer patches: patch dropout, and smaller images with the same learned positions."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny import VARIANTS, network, random_images

from vitral.errors import UsageError
from vitral.model import ViT

variants = pytest.mark.parametrize("name", [name for name, config in VARIANTS.items() if min(config.grid) > 1])


def dropping(name: str, rate: float) -> ViT:
    """In training mode, with nothing else random."""
    still = {"dropout": 0.0, "attention_dropout": 0.0, "drop_path": 0.0}
    model = network(dataclasses.replace(VARIANTS[name], patch_dropout=rate, **still)).train()
    model.patch_embed.eval()  # a stem with BatchNorm says otherwise of a batch than of an image
    return model


def kept_by(model: ViT, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and kept patches, identified by the input tokens of the first block."""
    seen: list[torch.Tensor] = []
    handle = model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    answer = model(images)
    handle.remove()
    prefix, tokens = model.config.prefix, model.embed(images)[0]
    assert torch.equal(seen[0][:, :prefix], tokens[:, :prefix]), "prefix tokens always stay, in front"
    same = (seen[0][:, prefix:, None] == tokens[:, None, prefix:]).all(-1)  # (B, kept, patches)
    assert torch.equal(same.sum(2), torch.ones_like(same.sum(2))), "each kept token is one of the image's own"
    return answer, same.any(1)


@variants
@pytest.mark.parametrize("pruned", [True, False])
def test_patches_that_are_dropped_are_those_that_a_mask_hides(name, pruned):
    """Logits equal those of the whole image with the dropped patches masked."""
    model, images = dropping(name, 0.5), random_images(VARIANTS[name], count=3)
    model.prune_last_block = pruned
    torch.manual_seed(1)
    answer, kept = kept_by(model, images)
    patches = kept.shape[1]
    assert kept.sum(1).tolist() == [round(patches * 0.5)] * 3
    torch.testing.assert_close(answer, model.eval()(images, kept))


def test_each_image_loses_others_and_each_patch_as_often():
    model = dropping("paper", 0.4)
    images = random_images(VARIANTS["paper"], count=4000)
    kept = kept_by(model, images)[1].double()
    assert kept.sum(1).unique().tolist() == [5], "9 patches, 40 % of them dropped"
    assert kept.mean(0).tolist() == pytest.approx([5 / 9] * 9, abs=0.03)  # four standard errors
    assert len(kept.unique(dim=0)) > 100


def test_only_the_tokens_that_stay_are_computed():
    model, lengths = dropping("rotary", 0.5), []
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].shape[1]))
    model(random_images(VARIANTS["rotary"]))
    assert lengths == [model.config.prefix + 4] * 2, "a hooked last block computes all that stay"


def test_the_draw_is_that_of_the_generator():
    model, images = dropping("mean", 0.5), random_images(VARIANTS["mean"])
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(images))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


def test_gradients_reach_kept_positions_alone():
    model = dropping("mean-no-cls", 0.5)
    torch.manual_seed(0)
    answer, kept = kept_by(model, random_images(VARIANTS["mean-no-cls"], count=1))
    answer.square().sum().backward()
    assert torch.equal(model.pos_embed.grad[0].abs().sum(1) > 0, kept[0])


def test_evaluation_sees_every_patch_and_off_draws_nothing():
    images = random_images(VARIANTS["mean"])
    plain = network(VARIANTS["mean"])
    assert torch.equal(dropping("mean", 0.5).eval()(images), plain(images))
    before = torch.get_rng_state()
    assert torch.equal(plain.train()(images), plain.eval()(images))
    assert torch.equal(torch.get_rng_state(), before)


def test_at_least_one_patch_stays():
    assert kept_by(dropping("mean", 0.99), random_images(VARIANTS["mean"]))[1].sum(1).tolist() == [1, 1]


def test_a_mask_is_refused():
    model, images = dropping("mean", 0.5), random_images(VARIANTS["mean"])
    with pytest.raises(UsageError, match="patch dropout goes with no mask"):
        model(images, torch.ones(2, 9, dtype=torch.bool))


# ---------------------------------------------------------------- smaller images


def smaller(name: str, grid: tuple[int, int], **changes: int) -> tuple[ViT, torch.Tensor]:
    model = network(dataclasses.replace(VARIANTS[name], **changes))
    model.any_size = True
    p, q = model.config.patch
    return model, random_images(dataclasses.replace(model.config, image_size=(grid[0] * p, grid[1] * q)))


def triangles(old: int, new: int) -> torch.Tensor:
    """Weights (new, old): a triangle around the center of each new cell, two cells wide, cut at the border."""
    weights = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        for j in range(old):
            weights[i, j] = max(0.0, 1 - abs((i + 0.5) - (j + 0.5) * new / old))
        weights[i] /= weights[i].sum()
    return weights


@pytest.mark.parametrize("name", ["paper", "distilled-with-registers", "cls-without-position", "mean-no-cls", "hybrid"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2), (3, 2)])
def test_positions_of_smaller_images_are_interpolated(name, grid):
    """As in a network whose table was made for the grid."""
    large = 8 if name == "hybrid" else 4
    model, images = smaller(name, grid, image_size=(large * 4, large * 6))
    other = ViT(dataclasses.replace(model.config, image_size=tuple(images.shape[2:]))).double().eval()
    state, placed, (rows, columns) = model.state_dict(), model.config.placed, model.config.grid
    table = state["pos_embed"][0, placed:].unflatten(0, (rows, columns))
    across, down = triangles(columns, grid[1]), triangles(rows, grid[0])
    table = torch.einsum("rR,cC,RCd->rcd", down, across, table).flatten(0, 1)[None]
    state["pos_embed"] = torch.cat([state["pos_embed"][:, :placed], table], dim=1)
    other.load_state_dict(state)
    torch.testing.assert_close(model(images), other(images))


def test_gradients_of_small_images_reach_the_whole_table():
    model, images = smaller("mean-no-cls", (2, 2), image_size=20)
    model.train()(images).square().sum().backward()
    assert (model.pos_embed.grad.abs().sum(2) > 0).all()


def test_full_size_is_the_plain_path_and_positions_stay_in_fp32():
    model = network(VARIANTS["paper"]).float()
    images = random_images(VARIANTS["paper"]).float()
    plain = model(images)
    model.any_size = True
    assert torch.equal(model(images), plain)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.embed(images[:, :, :8, :8])[0].dtype == model.embed(images)[0].dtype == torch.float32


def test_another_size_is_refused_unless_enabled():
    model, images = network(VARIANTS["paper"]).train(), random_images(VARIANTS["paper"])
    with pytest.raises(UsageError, match="the learned positions are for 12×12"):
        model(images[:, :, :8, :8])
    model.any_size = True
    with pytest.raises(UsageError, match="not divisible by patch size"):
        model(images[:, :, :9, :8])
