"""Probabilities of a written network are those of its source: each kind of head, temperature and target, or refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax_reference
import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from safetensors.torch import load_file
from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.inference.outputs import output_of
from vitral.model import ViTConfig, network
from vitral.model.resnet import BiTConfig
from vitral.testing.formats import randomized
from vitral.weights import native
from vitral.weights.convert import TARGETS, lost, write
from vitral.weights.load import read
from vitral.weights.native import Weights
from vitral.workflows.push import _write_weights

NAMES = ("ant", "bee", "cat")
SHAPE: dict[str, Any] = {
    "image_size": 32,
    "patch_size": 8,
    "classes": 3,
    "dim": 48,
    "depth": 2,
    "heads": 4,
    "mlp_dim": 96,
}
PROGRAMS = (*TARGETS, "push")
KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "plain": ({}, tuple(name for name in PROGRAMS if name != "jax")),
    "gelu-tanh": ({"activation": "gelu-tanh"}, ("native", "timm", "hf", "jax", "push")),
    "mean": ({"pool": "mean"}, ("native", "timm", "hf", "push")),
    "bounded": ({"logits_tanh": True}, ("native", "hf", "push")),
    "bounded, scaled": ({"logits_tanh": True, "logit_scale": 3.0, "pool": "mean"}, ("native", "hf", "push")),
    "bounded, MLP": ({"logits_tanh": True, "logit_scale": 3.0, "pre_logits": True}, ("native", "hf", "push")),
    "MLP": ({"pre_logits": True}, ("native", "hf", "torchvision", "push")),
    "MLP, gelu-tanh": ({"pre_logits": True, "activation": "gelu-tanh"}, ("native", "hf", "jax", "push")),
    "distilled": ({"dist_token": True}, ("native", "timm", "hf", "push")),
    "map": ({"pool": "map", "cls_token": False}, ("native", "timm", "hf", "push")),
    "stem": ({"conv_stem": ((16, 2), (24, 2), (24, 1))}, ("native", "hf", "push")),
}
"""Kind of network → its fields, and the targets that it can be written for; all others refuse it."""


def weights_of(config: ViTConfig | BiTConfig, output: dict[str, Any]) -> Weights:
    model = randomized(network(config))
    half = (0.5,) * config.channels
    prepared = Preprocessing(config.image, config.channels, mean=half, std=half)
    return Weights(config, model.state_dict(), prepared, NAMES, {}, output)


def probabilities(weights: Weights, images: Tensor) -> Tensor:
    with torch.no_grad():
        return output_of(weights.classes, weights.output, weights.statistics).values(native.build(weights)(images))


def written(weights: Weights, folder: Path, to: str) -> None:
    """Write for a target; as `vitral push` does, which takes vitral's own layout for what transformers lacks."""
    if to == "push":
        _write_weights(weights, folder)
    else:
        write(weights, folder, to)


def by_vitral(folder: Path, to: str, images: Tensor) -> Tensor:
    """Probabilities of the files, read by vitral; those that are tensors alone state no number of heads."""
    bare = to in ("torchvision", "jax", "mae", "dino") and images.shape[-1] == 32
    options: dict[str, Any] = {"heads": 4, "image_size": (32, 32)} if bare else {}
    (path,) = folder.iterdir() if to in ("jax", "mae", "dino") else (folder,)
    return probabilities(read(path, **options).weights, images)


def by_library(weights: Weights, folder: Path, to: str, images: Tensor) -> Tensor | None:
    """Probabilities by the target's own library; None where it is not installed here."""
    with torch.no_grad():
        if to == "timm":
            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()(images).softmax(1)
        if to in ("hf", "push"):
            made = transformers.AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True)
            return made.eval()(images).logits.softmax(1)
        if to == "torchvision":
            config = weights.config
            wide = config.dim if config.pre_logits else None
            made = torchvision.models.VisionTransformer(
                32, 8, config.depth, config.heads, config.dim, config.mlp_dim, num_classes=3, representation_size=wide
            )
            made.load_state_dict(load_file(folder / "model.safetensors"))
            return made.eval()(images).softmax(1)
        if to == "jax":
            (file,) = folder.iterdir()
            return torch.from_numpy(jax_reference.vit(np.load(file), images.permute(0, 2, 3, 1).numpy())).softmax(1)
    return None


@pytest.mark.parametrize("to", PROGRAMS)
@pytest.mark.parametrize("kind", [*KINDS, "ResNet"])
def test_probabilities_are_those_of_the_source(kind: str, to: str, tmp_path: Path) -> None:
    if kind == "ResNet":
        config: Any = BiTConfig(image_size=(33, 47), classes=3, layers=(1, 2))
        targets: tuple[str, ...] = ("native", "hf", "jax", "push")
    else:
        fields, targets = KINDS[kind]
        config = ViTConfig(**{**SHAPE, **fields})
    images = torch.randn(4, config.channels, *config.image, generator=torch.Generator().manual_seed(1))
    for temperature in (1.0, 0.4, 2.5):
        folder = tmp_path / f"at-{10 * temperature:g}-tenths"
        weights = weights_of(config, {"task": "class", "temperature": temperature, "scores": [0.1, 0.4]})
        if to not in targets:
            with pytest.raises(WeightsError):
                written(weights, folder, to)
            assert not folder.exists() or not any(folder.iterdir())
            continue
        written(weights, folder, to)
        wanted = probabilities(weights, images)
        assert (wanted - probabilities(dataclasses.replace(weights, output={}), images)).abs().max() > 1e-3 or (
            temperature == 1
        ), "else the temperature could be lost unseen"
        assert torch.allclose(by_vitral(folder, to, images), wanted, atol=2e-6)
        found = by_library(weights, folder, to, images) if kind != "ResNet" or to != "jax" else None
        if found is not None:
            assert torch.allclose(found.float(), wanted, atol=2e-6)
        notes = lost(weights, "hf" if to == "push" else to)
        divided = "the factor on the bounded logits" if "bounded" in kind else "the head"
        said = any(note.startswith(f"{divided} is divided by the temperature {temperature:g}") for note in notes)
        assert said == (temperature != 1 and to != "native")
        assert any("--to native keeps them" in note for note in notes) == (to != "native")


@pytest.mark.parametrize("to", [to for to in TARGETS if to != "native"])
@pytest.mark.parametrize(
    "output",
    [{"task": "labels", "thresholds": [0.2, 0.5, 0.9]}, {"task": "numbers", "mean": [1.0] * 3, "deviation": [2.0] * 3}],
    ids=["labels", "numbers"],
)
def test_labels_and_numbers_are_refused_for_others_and_kept_natively(
    to: str, output: dict[str, Any], tmp_path: Path
) -> None:
    weights = weights_of(ViTConfig(**SHAPE), output)
    with pytest.raises(WeightsError, match="cannot be written"):
        write(weights, tmp_path / "there", to)
    write(weights, tmp_path / "own", "native")
    assert read(tmp_path / "own").weights.output == output


def test_an_energy_does_not_go_with_divided_logits(tmp_path: Path) -> None:
    """A folder for transformers is also one of vitral's own: what stays behind must stay behind in both."""
    unknown = {"score": "energy", "threshold": -1.0}
    weights = weights_of(
        ViTConfig(**SHAPE, logits_tanh=True), {"task": "class", "temperature": 2.0, "scores": [0.1], "unknown": unknown}
    )
    write(weights, tmp_path / "there", "hf")
    back = read(tmp_path / "there").weights
    assert back.config.logit_scale == 0.5
    assert not back.output
    assert any("the threshold of unknown images" in note for note in lost(weights, "hf"))
