"""Occlusion and RISE, compared with the network's masks and with sums over all subsets."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tiny import SHAPE, VARIANTS, network, random_images

from vitral.errors import UsageError
from vitral.explanation.methods import METHODS
from vitral.explanation.methods.method import quiet
from vitral.explanation.methods.occlusion import on_pixels, windows
from vitral.explanation.methods.rise import draw
from vitral.model import BiT, BiTConfig, ViTConfig

VITS = {n: c for n, c in VARIANTS.items() if isinstance(c, ViTConfig) and c.classes and np.prod(c.grid) > 1}


def mild(config):
    """Logits of moderate size: with the weights of `network`, softmax would be nearly one-hot."""
    model = network(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


@pytest.mark.parametrize("name", VITS)
def test_leaving_tokens_out_is_what_the_networks_own_mask_computes(name):
    config = VITS[name]
    model, images, targets = mild(config), random_images(config), torch.tensor([[1, 0], [2, 4]])
    patches = config.grid[0] * config.grid[1]
    with torch.no_grad():
        whole = model(images).gather(1, targets)
        without = []
        for patch in range(patches):
            mask = torch.ones(2, patches, dtype=torch.bool)
            mask[:, patch] = False
            without.append(model(images, mask).gather(1, targets))
    wanted = (whole[:, None] - torch.stack(without, 1)).transpose(1, 2).unflatten(-1, config.grid)
    with quiet(model):
        found = METHODS["occlusion"].run(model, images, targets).values
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6 * whole.abs().max().item())


def test_the_last_block_may_compute_every_token():
    config = VITS["distilled"]
    model, images, targets = mild(config), random_images(config), torch.tensor([[1], [2]])
    pruned = METHODS["occlusion"].run(model, images, targets).values
    model.prune_last_block = False
    torch.testing.assert_close(METHODS["occlusion"].run(model, images, targets).values, pruned)


def test_windows():
    covered = windows((3, 4), 2)
    assert covered.shape == (2 * 3, 12)
    assert (covered.sum(1) == 4).all()
    assert covered[0].view(3, 4).nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert covered[-1].view(3, 4).nonzero().tolist() == [[1, 2], [1, 3], [2, 2], [2, 3]]
    assert torch.equal(windows((2, 3), 1), torch.eye(6, dtype=torch.bool))
    with pytest.raises(UsageError, match="does not fit"):
        windows((2, 3), 3)


def test_a_patch_has_the_mean_over_its_windows():
    config = VITS["paper"]
    model, images, targets = mild(config), random_images(config), torch.tensor([[1], [2]])
    wanted, times = torch.zeros(2, 3, 3, dtype=torch.float64), torch.zeros(3, 3)
    with torch.no_grad():
        whole = model(images).gather(1, targets)
        for top, left in itertools.product(range(2), range(2)):
            mask = torch.ones(2, 3, 3, dtype=torch.bool)
            mask[:, top : top + 2, left : left + 2] = False
            lost = whole - model(images, mask.flatten(1)).gather(1, targets)
            wanted[:, top : top + 2, left : left + 2] += lost[..., None]
            times[top : top + 2, left : left + 2] += 1
    found = METHODS["occlusion"].run(model, images, targets, window=2).values[:, 0]
    torch.testing.assert_close(found.double(), wanted / times, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["paper", "mean-no-cls", "map", "rotary"])
@pytest.mark.parametrize("keep", [0.5, 0.25])
def test_rise_with_every_mask_is_the_closed_form(name, keep):
    config = ViTConfig(
        **SHAPE
        | {k: getattr(VITS[name], k) for k in ("pool", "cls_token", "position", "registers")}
        | {"image_size": 8}
    )
    model, images, targets = mild(config), random_images(config), torch.tensor([[1, 3], [2, 0]])
    count = round(4 * keep)
    subsets = list(itertools.combinations(range(4), count))
    with torch.no_grad():
        logits = []
        for subset in subsets:
            mask = torch.zeros(2, 4, dtype=torch.bool)
            mask[:, list(subset)] = True
            logits.append(model(images, mask).gather(1, targets))
    logits = torch.stack(logits)  # (subsets, B, T)
    wanted = (
        torch.stack(
            [
                torch.stack([y for y, s in zip(logits, subsets, strict=True) if patch in s]).mean(0)
                for patch in range(4)
            ],
            -1,
        )
        - logits.mean(0)[..., None]
    )
    found = METHODS["rise"].run(model, images, targets, keep=keep).values
    torch.testing.assert_close(found.double().flatten(2), wanted, rtol=1e-5, atol=1e-6)
    assert found.sum((-2, -1)).abs().max() < 1e-5


def test_masks_are_drawn_alike_and_fairly():
    masks = draw(196, 512, 0.5, 0)
    assert masks.shape == (512, 196)
    assert (masks.sum(1) == 98).all()
    assert len({tuple(m.tolist()) for m in masks}) == 512
    assert (masks.float().mean(0) - 0.5).abs().max() < 0.12  # five deviations of 1/√512 · 0.5
    assert torch.equal(masks[:100], draw(196, 100, 0.5, 0))
    assert not torch.equal(masks, draw(196, 512, 0.5, 1))
    assert draw(9, 512, 0.5, 0).shape == (126, 9)  # all of them
    assert (draw(9, 5, 0.01, 0).sum(1) == 1).all()
    assert (draw(9, 5, 0.99, 0).sum(1) == 8).all()
    for wrong in ({"patches": 1}, {"masks": 1}, {"keep": 0.0}, {"keep": 1.0}):
        with pytest.raises(UsageError, match="cannot distinguish patches"):
            draw(**{"patches": 9, "masks": 5, "keep": 0.5, "seed": 0} | wrong)


def test_networks_without_tokens_see_the_mean_color_instead():
    torch.manual_seed(0)
    model = BiT(BiTConfig(image_size=(32, 24), layers=(1, 1), classes=5)).double().eval()
    with torch.no_grad():
        model.head.weight.normal_()
    images, targets = torch.randn(2, 3, 32, 24, dtype=torch.float64), torch.tensor([[1], [2]])
    wanted = torch.zeros(2, 4, 3, dtype=torch.float64)
    with torch.no_grad():
        for row, column in itertools.product(range(4), range(3)):
            hidden = images.clone()
            hidden[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = 0
            wanted[:, row, column] = (model(images) - model(hidden)).gather(1, targets)[:, 0]
    found = METHODS["occlusion"].run(model, images, targets).values[:, 0]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_cells_that_do_not_divide_the_image():
    assert on_pixels(torch.arange(3)[None], (1, 7)).tolist() == [[0, 0, 0, 1, 1, 2, 2]]
    assert on_pixels(torch.arange(4).view(2, 2), (4, 2)).tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_single_patch_cannot_be_left_out():
    config = ViTConfig(**SHAPE | {"image_size": 4})
    model, images = network(config), random_images(config)
    with pytest.raises(UsageError, match="no patch"):
        METHODS["occlusion"].run(model, images, torch.tensor([[1], [1]]))
    with pytest.raises(UsageError, match="cannot distinguish"):
        METHODS["rise"].run(model, images, torch.tensor([[1], [1]]))


def test_fewer_tokens_cost_less(monkeypatch):
    """The blocks never receive the removed patches."""
    config = VITS["registers"]
    model, seen = mild(config), []
    model.blocks[0].register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    METHODS["rise"].run(model, random_images(config), torch.tensor([[1], [1]]), keep=1 / 3)
    assert set(seen) == {config.prefix + 3}
