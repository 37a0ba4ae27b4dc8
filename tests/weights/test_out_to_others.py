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
from vitral.model import ViT, ViTConfig
from vitral.weights.convert import write
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
