"""The five write-ups by name: shapes at full size, and training."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vitral.model import WRITE_UPS, config, create

LOGITS = {  # images in the write-up's example, or one; classes
    "einops-b16": (8, 1000),
    "mnist-7562": (1, 10),
    "tensordot-b16": (1, 1000),
    "places365-postnorm": (16, 365),
    "timm-small-128": (10, 10),
}
write_ups = pytest.mark.parametrize("name", WRITE_UPS)


@write_ups
def test_shapes_at_full_size(name):
    with torch.device("meta"):
        model = create(name)
        images = torch.empty(LOGITS[name][0], model.config.channels, *model.config.image)
        assert model(images).shape == LOGITS[name]


def test_block_output_of_write_up_000():
    with torch.device("meta"):
        assert create("einops-b16").encode(torch.empty(8, 3, 224, 224)).shape == (8, 197, 768)


def test_sixteen_patches_of_write_up_001():
    model = create("mnist-7562")
    assert model.config.grid == (4, 4)
    assert model.encode(torch.zeros(1, 1, 28, 28)).shape == (1, 17, 16)


@write_ups
def test_it_learns_and_gradients_reach_every_parameter(name):
    """Full width, one block: the loss of a batch falls, and behind the zero head every parameter gets a gradient."""
    torch.manual_seed(0)
    model = create(name, depth=1, image_size=min(config(name).image[0], 48))
    images = torch.randn(4, model.config.channels, *model.config.image)
    labels = torch.arange(4)
    start = F.cross_entropy(model.eval()(images), labels).item()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert F.cross_entropy(model.eval()(images), labels).item() < start - 0.01
    unreached = [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert unreached == []


def test_tensordot_b16_is_b16_with_the_same_weights():
    changes = {"depth": 2, "image_size": 64, "classes": 10}
    theirs, ours = (
        create("tensordot-b16", **changes).eval(),
        create("B/16", **changes, activation="gelu", norm_eps=1e-5),
    )
    torch.nn.init.normal_(theirs.head.weight)
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(theirs(images), ours.eval()(images))


def test_peculiarities_that_belong_to_the_systems():
    einops, mnist, places = (config(name) for name in ("einops-b16", "mnist-7562", "places365-postnorm"))
    assert (einops.heads, einops.attention_scale, einops.pool, einops.final_norm) == (8, "model", "mean-all", "pooled")
    assert mnist.logits_tanh
    assert (places.norm, places.heads, places.dropout, places.classes) == ("post", 8, 0.1, 365)
    small = config("timm-small-128")
    assert (small.qkv_bias, small.proj_bias, small.mlp_dim, small.dropout) == (False, False, 128, 0.5)
    assert config("tensordot-b16").pos_init == "uniform"
    assert {config(name).activation for name in WRITE_UPS} == {"gelu"}, "all five use the erf form"


@pytest.mark.parametrize("changes", [{"classes": 3}, {"depth": 1, "dropout": 0.0}])
@write_ups
def test_write_ups_take_changes(name, changes):
    changed = config(name, **changes)
    assert all(getattr(changed, field) == value for field, value in changes.items())
    assert changed.heads == config(name).heads
