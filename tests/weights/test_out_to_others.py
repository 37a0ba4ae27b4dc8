"""Networks of options that other libraries lack, written for them: the same logits there, or refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from parity import randomized

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import BiTConfig, ViT, ViTConfig
from vitral.weights.convert import write
from vitral.weights.formats.bit import described
from vitral.weights.load import read
from vitral.weights.native import Weights

BASE = ViTConfig(image_size=32, patch_size=8, classes=5, dim=48, depth=2, heads=3, mlp_dim=96)


def weights_of(**changes: Any) -> Weights:
    config = dataclasses.replace(BASE, **changes)
    model = randomized(ViT(config))
    preprocessing = Preprocessing(config.image, config.channels, mean=(0.5,) * 3, std=(0.5,) * 3)
    return Weights(config, model.state_dict(), preprocessing, tuple("abcde")[: config.classes], {})


@pytest.mark.parametrize("registers", [1, 2, 5])
@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("cls_token", [True, False])
@pytest.mark.parametrize("size", [(32, 32), (24, 40)])
def test_registers_open_in_timm(registers: int, pool: str, cls_token: bool, size: tuple[int, int], tmp_path: Path):
    if pool == "cls" and not cls_token:
        pytest.skip("no class token to read")
    weights = weights_of(registers=registers, pool=pool, cls_token=cls_token, image_size=size)
    write(weights, tmp_path / "there", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'there'}", pretrained=True).eval()
    images = torch.randn(2, 3, *size)
    ours = ViT(weights.config).eval()
    ours.load_state_dict(dict(weights.state))
    with torch.no_grad():
        torch.testing.assert_close(theirs(images), ours(images), atol=2e-5, rtol=1e-5)
        back = read(tmp_path / "there").build().eval()
        torch.testing.assert_close(back(images), ours(images), atol=2e-5, rtol=1e-5)


def test_a_network_without_a_head_is_refused_for_torchvision(tmp_path: Path):
    with pytest.raises(WeightsError, match="without a head cannot be written for torchvision") as caught:
        write(weights_of(classes=0), tmp_path / "there", "torchvision")
    assert "--new-head" in str(caught.value)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("size", [(16, 64), (24, 40)])
def test_what_is_not_square_is_refused_for_torchvision(size: tuple[int, int], tmp_path: Path):
    with pytest.raises(WeightsError, match="cannot be written for torchvision"):
        write(weights_of(image_size=size), tmp_path / "there", "torchvision")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dist_token": True},
        {"activation": "swiglu"},
        {"pool": "map"},
        {"position": "rotary", "norm_eps": 1e-5, "registers": 4, "qkv_bias": False},
        {"stem": (), "stem_numerics": "timm", "patch_size": 16},
        {"stem": (3, 4, 9), "stem_numerics": "timm", "patch_size": 16},
    ],
)
@pytest.mark.parametrize("asked", [{}, {"num_classes": 7}, {"num_classes": 0}, {"in_chans": 1}])
def test_timm_replaces_head_and_first_layer(changes: dict[str, Any], asked: dict[str, int], tmp_path: Path):
    """`num_classes` and `in_chans` of timm's `create_model`, which keeps all other weights."""
    weights = weights_of(**changes)
    try:
        write(weights, tmp_path / "there", "timm")
    except WeightsError as why:
        pytest.skip(str(why))
    theirs = timm.create_model(f"local-dir:{tmp_path / 'there'}", pretrained=True, **asked).eval()
    out = theirs(torch.zeros(1, asked.get("in_chans", 3), 32, 32))
    assert out.shape == (1, {0: 48}.get(count := asked.get("num_classes", 5), count))
    found, wanted = theirs.state_dict(), weights.state["blocks.1.mlp.fc2.weight"]
    assert any(one.shape == wanted.shape and torch.equal(one, wanted) for one in found.values())


def test_timm_is_told_the_layers_of_a_bit():
    config = BiTConfig(image_size=32, classes=5, numerics="timm")
    preprocessing = Preprocessing((32, 32), 3, mean=(0.5,) * 3, std=(0.5,) * 3)
    stated = described(Weights(config, {}, preprocessing, tuple("abcde"), {}), "50x1")["pretrained_cfg"]
    expected = timm.models.get_pretrained_cfg("resnetv2_50x1_bit")
    assert (stated["first_conv"], stated["classifier"]) == (expected.first_conv, expected.classifier)
