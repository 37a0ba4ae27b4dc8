"""vitral's own format: a network comes back whole, and inconsistent files are refused."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from tools.pack_demo import in_16_bits

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViT, ViTConfig
from vitral.weights import native
from vitral.weights.files import read_tensors, write_tensors

CONFIG = ViTConfig(image_size=(8, 12), patch_size=4, classes=3, dim=8, depth=1, heads=2, mlp_dim=8, pool="mean")


@pytest.fixture
def weights() -> native.Weights:
    torch.manual_seed(0)
    preprocessing = Preprocessing((8, 12), resize="letterbox", mean=(0.1, 0.2, 0.3))
    trained = {"data": "x", "val_accuracy": 0.5}
    return native.Weights(CONFIG, ViT(CONFIG).state_dict(), preprocessing, ("a", "b", "ü"), trained)


def test_round_trip(tmp_path, weights):
    native.save(tmp_path / "m.safetensors", weights)
    read = native.read(tmp_path / "m.safetensors")
    assert (read.config, read.preprocessing, read.classes, read.trained) == (
        weights.config,
        weights.preprocessing,
        weights.classes,
        weights.trained,
    )
    assert all(torch.equal(read.state[name], value) for name, value in weights.state.items())
    model = native.build(read)
    assert not model.training
    assert model(torch.zeros(1, 3, 8, 12)).shape == (1, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h.pop("model"), "model"),
        (lambda h: h.pop("classes"), "classes"),
        (lambda h: h["model"].update(surprise=1), "surprise"),
        (lambda h: h["model"].update(dim="wide"), "dim"),
        (lambda h: h["model"].update(heads=3), "divisible"),
        (lambda h: h["preprocessing"].update(blur=1), "blur"),
        (lambda h: h["preprocessing"].update(std=[1, 1, 0]), "std"),
        (lambda h: h["preprocessing"].update(image_size=[8, 8]), "image size of the preprocessing"),
        (lambda h: h.update(classes=["a", "b"]), "class names: 2, but the network has 3"),
        (lambda h: h.update(format=99), "unknown version of vitral's format"),
    ],
)
def test_a_header_that_does_not_hold_together(tmp_path, weights, change, said):
    path = tmp_path / "m.safetensors"
    native.save(path, weights)
    tensors, header = read_tensors(path)
    change(header)
    write_tensors(path, tensors, header)
    with pytest.raises(WeightsError, match=re.escape(said)) as caught:
        native.read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_weights_that_do_not_fit_are_named(weights):
    state = dict(weights.state)
    state["surprise"] = state.pop("norm.weight")
    state["head.weight"] = torch.zeros(5, 8)
    with pytest.raises(WeightsError) as caught:
        native.build(dataclasses.replace(weights, state=state))
    message = str(caught.value)
    for part in ("norm.weight is missing", "surprise is unexpected", "head.weight is (5, 8), not (3, 8)"):
        assert part in message


def test_16_bits_are_those_that_lose_less():
    state = {"small": torch.linspace(-2, 2, 101), "count": torch.tensor(7)}
    found = in_16_bits(state)
    assert (found["small"].dtype, found["count"].dtype) == (torch.float16, torch.int64)
    assert float((found["small"].float() - state["small"]).abs().max()) <= 2**-11 * 2
    state["large"] = torch.tensor([7e4])  # more than fp16 holds: 65,504
    found = in_16_bits(state)
    assert {one.dtype for name, one in found.items() if name != "count"} == {torch.bfloat16}
    assert float(found["large"]) == pytest.approx(7e4, rel=2**-8)
    tiny = in_16_bits({"tiny": torch.full((4,), 1e-9)})["tiny"]  # less than fp16 holds: 6e-8
    assert tiny.dtype == torch.bfloat16
