"""Checkpoints for the programs of MAE and DINO, opened as these open them, with timm's blocks of the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViT, ViTConfig
from vitral.weights.convert import lost, write
from vitral.weights.load import read
from vitral.weights.native import Weights, build

KEYS = {"mae": "model", "dino": "teacher"}
SHAPE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "classes": 0,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 48,
}


def weights(**changes: Any) -> Weights:
    config = ViTConfig(**{**SHAPE, **changes})
    torch.manual_seed(0)
    state = {name: torch.randn_like(value) * 0.2 for name, value in ViT(config).state_dict().items()}
    return Weights(config, state, Preprocessing(config.image), tuple(map(str, range(config.classes))), {})


@pytest.mark.parametrize("to", list(KEYS))
@pytest.mark.parametrize("changes", [{}, {"pool": "mean"}, {"position": "sincos"}], ids=["cls", "mean", "sincos"])
def test_their_network_computes_the_same_tokens(to: str, changes: dict[str, Any], tmp_path: Path):
    own = weights(**changes)
    (file,) = write(own, tmp_path / "out.pth", to)
    state = torch.load(file, weights_only=True)[KEYS[to]]
    theirs = timm.models.vision_transformer.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, mlp_ratio=1.5, num_classes=0
    )
    theirs.load_state_dict(state)
    images = torch.randn(2, 3, 32, 32)
    ours = build(own)
    assert isinstance(ours, ViT)
    with torch.no_grad():
        wanted = ours.norm(ours.encode(images))
        assert torch.allclose(theirs.eval().forward_features(images), wanted, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("to", list(KEYS))
def test_the_file_is_read_again(to: str, tmp_path: Path):
    own = weights()
    (file,) = write(own, tmp_path / "out.pth", to)
    back = read(file, format=to, heads=4).weights
    assert back.config == own.config
    assert all(torch.equal(back.state[name], value) for name, value in own.state.items())
    (warning,) = lost(own, to)
    assert f"WARNING for {to}" in warning


@pytest.mark.parametrize("to", list(KEYS))
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"registers": 2}, "registers is 2"),
        ({"cls_token": False, "pool": "mean"}, "cls token is False"),
        ({"classes": 3, "pool": "mean"}, "mean of normalized patches"),
        ({"position": "rotary"}, "position is rotary"),
        ({"image_size": (32, 48)}, "squares only"),
    ],
)
def test_other_networks_are_refused(to: str, changes: dict[str, Any], why: str, tmp_path: Path):
    with pytest.raises(WeightsError, match=f"cannot be written for {to}") as refused:
        write(weights(**changes), tmp_path / "out.pth", to)
    assert why in str(refused.value)
    assert not (tmp_path / "out.pth").exists()
