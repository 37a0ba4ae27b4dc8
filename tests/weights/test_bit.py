"""BiT's ResNets: the authors' files and timm's, there and back, held to timm's own reader."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax_reference as ref
import numpy as np
import pytest
import timm
import torch
from cases_jax import CASES
from timm.models.resnetv2 import _create_resnetv2_bit

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError, WeightsError
from vitral.model import BITS, BiT, BiTConfig, network
from vitral.model import config as config_of
from vitral.weights import native
from vitral.weights.convert import write
from vitral.weights.formats import FORMATS, detect
from vitral.weights.load import read
from vitral.weights.native import Weights
from vitral.weights.read.source import Source


def weights_of(**changes: Any) -> Weights:
    torch.manual_seed(0)
    config = BiTConfig(**{"layers": (1, 1), "classes": 5, **changes})
    model = BiT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    names = tuple(map(str, range(config.classes)))
    half = (0.5,) * config.channels
    preprocessing = Preprocessing(config.image, config.channels, mean=half, std=half)
    return Weights(config, model.state_dict(), preprocessing, names, {})


def logits(weights: Weights, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return native.build(weights)(images)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


def test_timms_own_reader_gives_the_same_but_for_its_small_numbers(tmp_path: Path):
    np.savez(tmp_path / "bit.npz", **ref.random_bit((1, 2, 1, 1)))
    model = _create_resnetv2_bit("resnetv2_50x1_bit", layers=(1, 2, 1, 1), num_classes=7).eval()
    model.load_pretrained(str(tmp_path / "bit.npz"))
    weights = read(tmp_path / "bit.npz").weights
    assert weights.config == BiTConfig(classes=7, layers=(1, 2, 1, 1))
    small = dataclasses.replace(weights, config=dataclasses.replace(weights.config, numerics="timm"))
    images = torch.randn(2, 3, 64, 97, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert close(logits(small, images), model(images))


def test_a_file_is_written_as_it_was(tmp_path: Path):
    path = CASES["jax-bit/big-transfer"]().write(tmp_path)
    write(read(path).weights, tmp_path / "model.safetensors", "native")
    (again,) = write(read(tmp_path / "model.safetensors").weights, tmp_path / "again.npz", "jax")
    before, after = np.load(path), np.load(again)
    assert set(before) == set(after)
    assert all(np.array_equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("changes", [{}, {"classes": 0}, {"channels": 1, "width": 2}])
def test_a_network_of_ours_comes_back_bit_for_bit(changes: dict[str, Any], tmp_path: Path):
    weights = weights_of(**changes)
    (path,) = write(weights, tmp_path / "bit.npz", "jax")
    back = read(path).weights
    assert back.config == weights.config
    assert set(back.state) == set(weights.state)
    assert all(torch.equal(back.state[name], tensor) for name, tensor in weights.state.items())
    images = torch.randn(2, weights.config.channels, 40, 56, generator=torch.Generator().manual_seed(1))
    theirs = ref.bit(np.load(path), images.permute(0, 2, 3, 1).numpy())
    assert close(logits(weights, images), torch.from_numpy(theirs))


@pytest.mark.slow
def test_timm_opens_it_and_it_comes_back_bit_for_bit(tmp_path: Path):
    weights = weights_of(layers=(3, 4, 6, 3), numerics="timm")
    write(weights, tmp_path / "out", "timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert close(logits(weights, images), model(images))
    back = read(tmp_path / "out").weights
    assert back.config == weights.config
    assert back.classes == weights.classes
    assert all(torch.equal(back.state[name], tensor) for name, tensor in weights.state.items())


@pytest.mark.parametrize(
    ("changes", "to", "why"),
    [
        ({}, "timm", "timm has no BiT with"),
        ({"layers": (3, 4, 6, 3)}, "timm", "numerics is authors"),
        ({"numerics": "timm"}, "jax", "numerics is timm"),
        ({}, "torchvision", "does not have this format"),
    ],
)
def test_unsupported_networks_are_refused(changes: dict[str, Any], to: str, why: str, tmp_path: Path):
    weights = weights_of(**changes)
    with pytest.raises(WeightsError, match="cannot be written") as caught:
        write(weights, tmp_path / "out", to)
    assert why in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_other_channels_and_classes(tmp_path: Path):
    path = CASES["jax-bit/suffixes"]().write(tmp_path)
    fitted = read(path, channels=1, classes=3, new_head=True)
    assert fitted.weights.config == BiTConfig(layers=(1, 1), channels=1, classes=3)
    gray = torch.randn(1, 1, 64, 64, generator=torch.Generator().manual_seed(1))
    assert logits(fitted.weights, gray).shape == (1, 3)
    assert any("head" in line for line in fitted.account.highlights())
    with pytest.raises(UsageError, match="no patches"):
        read(path, patch_size=8)


def test_tensors_that_are_no_resnet_are_refused(tmp_path: Path):
    arrays = ref.random_bit((1, 1))
    arrays["resnet/root_block/standardized_conv2d/kernel"] = np.ones((7, 7, 3, 65), np.float32)
    np.savez(tmp_path / "bit.npz", **arrays)
    with pytest.raises(WeightsError, match="not the tensors of a BiT"):
        read(tmp_path / "bit.npz")


@pytest.mark.parametrize("name", BITS)
@pytest.mark.parametrize("kind", ["jax-bit", "big-vision-bit", "timm-bit"])
def test_full_sizes_are_told_from_shapes_alone(kind: str, name: str):
    with torch.device("meta"):
        ours = network(config_of(name)).state_dict()
    rules = FORMATS[kind]
    theirs: dict[str, torch.Tensor] = {}
    for parameter, tensor in ours.items():
        match = rules.keymap.writing(parameter)
        assert match is not None
        theirs |= dict(zip(match.tensors, match.form.write(tensor, 1), strict=True))
    assert detect(Source("file", theirs, {}, None, None, ())).name == kind
    state = {m.parameter: m.form.read([theirs[one] for one in m.tensors]) for m in rules.keymap.reading(theirs)}
    assert rules.config is not None
    assert rules.config(state, {}, "file") == config_of(name)
