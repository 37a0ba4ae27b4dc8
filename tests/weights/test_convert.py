"""Exported weights compute the same in the target library, and come back bit for bit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
from safetensors.torch import load_file

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError, WeightsError
from vitral.model import ViT, ViTConfig
from vitral.weights import native
from vitral.weights.convert import TARGETS, convert, lost, write
from vitral.weights.formats import detect
from vitral.weights.load import read
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import from_huggingface, from_timm, to_huggingface, to_timm
from vitral.weights.read.source import Source
from vitral.weights.transform.infer import infer

SHAPE: dict[str, Any] = {
    "image_size": (24, 32),
    "patch_size": 8,
    "classes": 5,
    "dim": 32,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 48,
}
NAMES = ("ant", "bee", "cat", "dog", "eel")


def weights_of(**changes: Any) -> Weights:
    torch.manual_seed(0)
    config = ViTConfig(**{**SHAPE, **changes})
    model = ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    names = NAMES[: config.classes]
    half = (0.5,) * config.channels
    preprocessing = Preprocessing(config.image, config.channels, mean=half, std=half)
    return Weights(config, model.state_dict(), preprocessing, names, {"epochs": 3})


def logits(weights: Weights, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    config = weights.config
    images = torch.randn(2, config.channels, *config.image, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return images, native.build(weights)(images)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


TIMM = {
    "paper": {},
    "trained-here": {"pool": "mean"},
    "mean-all": {"pool": "mean-all"},
    "gap": {"pool": "mean", "final_norm": "pooled", "cls_token": False},
    "gray": {"channels": 1},
    "registers": {"registers": 2, "cls_position": False},
    "distilled": {"dist_token": True},
    "sincos": {"position": "sincos", "pool": "mean"},
    "tanh-gelu": {"activation": "gelu-tanh", "layer_scale": 0.1, "qk_norm": True},
    "swiglu": {"activation": "swiglu"},
    "map": {"pool": "map", "cls_token": False},
    "no-position": {"position": "none"},
}


@pytest.mark.parametrize("name", TIMM)
def test_timm_opens_it_with_the_same_logits(name: str, tmp_path: Path):
    weights = weights_of(**TIMM[name])
    write(weights, tmp_path / "out", "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images, ours = logits(weights)
    with torch.no_grad():
        assert close(ours, model(images))
    assert list(model.pretrained_cfg["mean"]) == [0.5] * weights.config.channels
    assert tuple(model.pretrained_cfg["label_names"]) == NAMES


def test_timm_opens_rotary_networks(tmp_path: Path):
    for name, changes in {"plain": {}, "swiglu": {"activation": "swiglu"}}.items():
        weights = weights_of(position="rotary", registers=2, norm_eps=1e-5, layer_scale=0.1, pool="mean", **changes)
        weights.state["blocks.0.attn.qkv.bias"][32:64] = 0
        weights.state["blocks.1.attn.qkv.bias"][32:64] = 0
        write(weights, tmp_path / name, "timm")
        model = timm.create_model(f"local-dir:{tmp_path / name}", pretrained=True).eval()
        images, ours = logits(weights)
        with torch.no_grad():
            assert close(ours, model(images))


def test_torchvision_opens_it_with_the_same_logits(tmp_path: Path):
    weights = weights_of(image_size=32)
    (file,) = write(weights, tmp_path / "vit.safetensors", "torchvision")
    model = torchvision.models.VisionTransformer(32, 8, 2, 4, 32, 48, num_classes=5)
    model.load_state_dict(load_file(file))
    images, ours = logits(weights)
    with torch.no_grad():
        assert close(ours, model.eval()(images))


@pytest.mark.slow
@pytest.mark.parametrize("to", TARGETS)
def test_there_and_back_is_exact(to: str, tmp_path: Path):
    own: dict[str, dict[str, Any]] = {
        "jax": {"activation": "gelu-tanh"},
        **{name: {"image_size": 32} for name in ("torchvision", "mae", "dino")},
    }
    changes = own.get(to, {})
    weights = weights_of(**changes)
    written = write(weights, tmp_path / "out", to)
    source = next((p for p in written if p.suffix == ".npz"), tmp_path / "out")
    back = read(source, heads=4, image_size=weights.config.image).weights
    assert {k: v.shape for k, v in back.state.items()} == {k: v.shape for k, v in weights.state.items()}
    for name, tensor in weights.state.items():
        assert torch.equal(tensor, back.state[name]), name
    assert back.config == weights.config


def test_unsupported_networks_are_refused(tmp_path: Path):
    for changes, why in (({"pool": "mean"}, "pool is mean"), ({"registers": 1}, "registers is 1")):
        with pytest.raises(WeightsError, match="cannot be written for torchvision") as caught:
            write(weights_of(**changes), tmp_path / "out", "torchvision")
        assert why in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_unknown_format_and_a_full_target(tmp_path: Path):
    with pytest.raises(UsageError, match="nearest: timm"):
        write(weights_of(), tmp_path / "out", "tim")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="exists already"):
        write(weights_of(), tmp_path / "out", "timm")


def test_what_a_file_cannot_tell_of_images_is_warned_of(tmp_path: Path):
    plain = weights_of(image_size=32)
    imagenet = Preprocessing((32, 32), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    other = dataclasses.replace(plain, preprocessing=imagenet)
    boxed = dataclasses.replace(plain, preprocessing=Preprocessing((32, 32), resize="letterbox"))
    assert lost(other, "timm") == lost(other, "hf") == lost(other, "native") == []
    assert "mean" in lost(other, "jax")[0]
    assert "letterbox" in lost(boxed, "hf")[0]
    account = convert(*_native(plain, tmp_path), "torchvision")
    assert "WARNING for torchvision" in account.notes[-1]
    assert account.written == (str(tmp_path / "out" / "model.safetensors"),)


def test_an_edited_network_is_warned_of(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("vitral.weights.convert.edited", lambda: "MLP was edited in vit.py")
    account = convert(*_native(weights_of(image_size=32), tmp_path), "timm")
    assert any(note.startswith("WARNING for timm: MLP was edited in vit.py") for note in account.notes)


@pytest.mark.parametrize("to", ["timm", "hf", "torchvision"])
def test_the_temperature_is_part_of_the_written_head(to: str, tmp_path: Path):
    """Other programs know the softmax alone, and their probabilities are those of the run."""
    weights = dataclasses.replace(weights_of(image_size=32), output={"temperature": 2.5, "scores": [0.1, 0.4]})
    images, ours = logits(weights)
    write(weights, tmp_path / "out", to)
    there = native.build(read(tmp_path / "out", heads=4, image_size=(32, 32)).weights)
    with torch.no_grad():
        assert close(ours / 2.5, there(images))
    notes = lost(weights, to)
    assert "the head is divided by the temperature 2.5, so that probabilities are the same" in notes
    assert not any("WARNING" in note and "cannot state" in note for note in notes)
    known = dataclasses.replace(weights, output={"unknown": {"score": "energy", "threshold": 1.0}})
    assert any("the threshold of unknown images" in note for note in lost(known, to))


def test_levels_are_kept_for_vitral_and_warned_of_for_others(tmp_path: Path):
    plain = weights_of(image_size=32)
    deep = dataclasses.replace(plain, preprocessing=dataclasses.replace(plain.preprocessing, levels=(100, 4095)))
    write(deep, tmp_path / "hf", "hf")
    assert read(tmp_path / "hf").weights.preprocessing.levels == (100, 4095)
    for to in ("hf", "timm", "jax"):
        assert any(note.startswith("WARNING") and "100 to 4,095" in note for note in lost(deep, to)), to


def _native(weights: Weights, folder: Path) -> tuple[Path, Path]:
    (file,) = write(weights, folder / "own", "native")
    return file, folder / "out"


@pytest.mark.parametrize(
    ("architecture", "heads"),
    [
        ("vit_giant_patch14_reg4_dinov2", 24),
        ("vit_huge_plus_patch16_dinov3", 20),
        ("vit_base_patch16_gap_224", 16),
        ("vit_large_patch16_224", 16),
        ("vit_huge_patch14_224", 16),
        ("deit3_medium_patch16_224", 8),
    ],
)
def test_heads_that_no_tensor_tells_are_those_of_the_published_network(architecture: str, heads: int):
    with torch.device("meta"):
        model = timm.create_model(architecture)
    state = dict(model.state_dict())
    source = Source("x", state, {}, {"architecture": architecture}, None, ())
    kind = detect(source)
    ours = {match.parameter: match.form.read([state[n] for n in match.tensors]) for match in kind.keymap.reading(state)}
    assert infer(kind.facts(source), ours, "x").heads == heads == model.blocks[0].attn.num_heads


def test_the_same_rule_with_other_rounding_is_measured():
    """`--resize crop` rounds sides and offsets; transformers and timm truncate some of them."""
    for to in ("hf", "timm"):
        own = Preprocessing((96, 96), resize="crop")
        (warning,) = lost(dataclasses.replace(weights_of(), preprocessing=own), to)
        apart = int(re.search(r"pixels differ by up to (\d+) of 255 levels", warning)[1])
        assert 1 <= apart <= 255
        image = np.random.default_rng(0).integers(0, 256, (480, 641, 3), np.uint8)
        used = from_huggingface(to_huggingface(own)) if to == "hf" else from_timm(to_timm(own))
        assert (own.geometry(image).int() - used.geometry(image).int()).abs().max() > 0
        assert lost(dataclasses.replace(weights_of(), preprocessing=Preprocessing((96, 96))), to) == []


@pytest.mark.parametrize(
    ("options", "to", "typed"),
    [
        ({"qk_norm": True}, "torchvision", "trained without --qk-norm"),
        ({"pool": "mean", "cls_token": False}, "dino", "--pool cls"),
        ({"image_size": (32, 16)}, "torchvision", "--image-size 32"),
        ({"pool": "mean", "cls_token": True, "activation": "gelu-tanh"}, "jax", "--pool cls --cls-token"),
    ],
)
def test_a_refusal_says_what_to_type(options, to, typed, tmp_path: Path):
    with pytest.raises(WeightsError, match="cannot be written") as caught:
        write(weights_of(**options), tmp_path / "out", to)
    assert typed in caught.value.hint
