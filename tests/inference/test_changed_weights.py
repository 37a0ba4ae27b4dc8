"""Weights that change in place are predicted by every engine, also if torch does not count the change."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import vitral
from images import noise
from vitral.device import choose
from vitral.errors import UsageError
from vitral.inference.engines import openvino
from vitral.inference.engines.built import _weighted_sum, digest_of
from vitral.inference.engines.compiled import unavailable_reason
from vitral.inference.engines.int8 import observe, unsupported_reason
from vitral.inference.engines.packed import self_test

SIZES: dict[str, Any] = {"image_size": 16, "classes": 3, "dim": 32, "depth": 2, "heads": 2, "mlp_dim": 64}
IMAGES = [noise(number, (16, 16), 3) for number in range(2)]


def network() -> Any:
    torch.manual_seed(0)
    found = vitral.create("mu/4", **SIZES, channels=3).eval()
    for parameter in found.parameters():
        nn.init.normal_(parameter, std=0.5)
    return found


def fused_step(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 0.3, fused=True)
    model(torch.randn(2, 3, 16, 16)).logsumexp(1).sum().backward()
    optimizer.step()


def average(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(0.5).add_(0.1)


def copied_head(model: Any) -> None:
    model.head.bias.data.copy_(torch.tensor([0.0, 2.0, 4.0]))


def clipped(model: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.3, 0.3)


def numpy_view(model: Any) -> None:
    model.blocks[1].mlp.fc2.weight.detach().numpy()[:] *= -3


def one_value(model: Any) -> None:
    model.head.weight.detach().numpy()[-1, -1] += 30


CHANGES: list[Callable[[Any], None]] = [fused_step, average, copied_head, clipped, numpy_view, one_value]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain-bf16": {"engine": "plain", "precision": "bf16"},
    "packed-fp32": {"engine": "packed", "precision": "fp32"},
    "packed-bf16": {"engine": "packed", "precision": "bf16"},
    "openvino": {"engine": "openvino", "precision": "fp32"},
    "mirrored": {"precision": "bf16", "tta": "mirror"},
}


def require_packing(precision: str) -> None:
    """Skip a test of packed weights on a CPU that has no operators for them."""
    if not self_test(torch.bfloat16 if precision == "bf16" else torch.float32):
        pytest.skip(f"{precision} cannot be packed here")


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_change_in_place_is_predicted(name, change):
    if OPTIONS[name].get("engine") == "packed":
        require_packing(OPTIONS[name]["precision"])
    if name == "openvino" and (not openvino.installed() or openvino.limitation()):
        pytest.skip("OpenVINO does not run here")
    predictor = vitral.load(network(), device="cpu", **OPTIONS[name])
    before = predictor.probabilities(IMAGES)
    change(predictor.model)
    found = predictor.probabilities(IMAGES)
    new = vitral.load(copy.deepcopy(predictor.model.eval()), device="cpu", **OPTIONS[name])
    assert np.allclose(found, new.probabilities(IMAGES), atol=1e-5)
    assert np.abs(found - before).max() > 0.02, "the change shows"


@pytest.mark.parametrize("change", [fused_step, copied_head])
def test_ranges_of_int8_do_not_hold_for_changed_weights(change):
    model = network()
    if why := unsupported_reason(model):
        pytest.skip(why)
    ranges = observe(model, [torch.randn(4, 3, 16, 16)])
    recipe = vitral.Preprocessing((16, 16), mean=(0.5,) * 3, std=(0.5,) * 3)

    def predictor(of: Any) -> vitral.Predictor:
        machine = choose("cpu", "fp32")
        return vitral.Predictor(of, recipe, ["a", "b", "c"], machine=machine, engine="packed", ranges=ranges)

    old = predictor(model)
    old.probabilities(IMAGES)
    change(old.model)
    with pytest.raises(UsageError, match="the ranges of int8 do not hold with changed weights"):
        old.probabilities(IMAGES)


@pytest.mark.slow
@pytest.mark.skipif(unavailable_reason(torch.device("cpu")) is not None, reason="torch.compile needs a compiler")
def test_a_change_in_place_is_compiled():
    predictor = vitral.load(network(), device="cpu", engine="compiled", precision="fp32")
    before = predictor.probabilities(IMAGES)
    average(predictor.model)
    found = predictor.probabilities(IMAGES)
    plain = vitral.load(copy.deepcopy(predictor.model), device="cpu", engine="plain", precision="fp32")
    assert np.allclose(found, plain.probabilities(IMAGES), atol=1e-4)
    assert np.abs(found - before).max() > 0.02


def test_the_module_of_the_caller_is_watched_from_the_start():
    model = network()
    predictor = vitral.load(model, device="cpu", engine="packed", precision="fp32")
    before = predictor.probabilities(IMAGES)
    average(model)
    assert np.abs(predictor.probabilities(IMAGES) - before).max() > 0.02


def test_nothing_is_compared_until_the_module_is_read(tmp_path, monkeypatch):
    vitral.convert(network(), tmp_path / "a.safetensors", to="native")
    predictor = vitral.load(tmp_path / "a.safetensors", device="cpu", engine="packed", precision="fp32")
    before = predictor.probabilities(IMAGES)
    looked = list[int]()
    monkeypatch.setattr("vitral.inference.engines.built.digest_of", lambda ts: looked.append(len(ts)) or digest_of(ts))
    assert predictor.network.config.classes == 3
    assert predictor.embed(IMAGES).shape == (2, 32)
    vitral.explain(predictor, IMAGES[0])
    assert np.array_equal(predictor.probabilities(IMAGES), before)
    assert looked == []
    assert predictor.model is predictor.network
    assert len(looked) == 1, "what the module was when it was first read"
    assert np.array_equal(predictor.probabilities(IMAGES), before)
    assert len(looked) == 2


@pytest.mark.parametrize("twin", [copy.copy, lambda predictor: predictor.plainly()])
def test_predictors_of_one_module_see_that_it_is_read(tmp_path, twin):
    vitral.convert(network(), tmp_path / "a.safetensors", to="native")
    predictor = vitral.load(tmp_path / "a.safetensors", device="cpu", engine="packed", precision="fp32")
    before, other = predictor.probabilities(IMAGES), twin(predictor)
    average(other.model)
    found = predictor.probabilities(IMAGES)
    assert np.array_equal(found, other.probabilities(IMAGES))
    assert np.abs(found - before).max() > 0.02


def epsilon(model: Any) -> None:
    model.blocks[0].norm1.eps = 5.0


def scale(model: Any) -> None:
    model.blocks[1].attn.scale *= 9


def activation(model: Any) -> None:
    model.blocks[1].mlp.activation = "relu"


@pytest.mark.parametrize("change", [epsilon, scale, activation])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_changed_setting_is_predicted(change, precision):
    predictor = vitral.load(network(), device="cpu", precision=precision)
    before = predictor.probabilities(IMAGES)
    change(predictor.model)
    found = predictor.probabilities(IMAGES)
    recipe = predictor.preprocessing
    pixels = recipe.standardize(torch.stack([predictor.prepare(image) for image in IMAGES]))
    with torch.no_grad():
        wanted = predictor.model(pixels).softmax(1).numpy()
    assert np.abs(found - wanted).max() < (1e-5 if precision == "fp32" else 0.03)
    assert np.abs(found - before).max() > 0.01
    assert predictor.engine == "plain"


@pytest.mark.parametrize("engine", ["auto", "packed", "plain"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("change", [lambda m: m.double(), lambda m: m.blocks[1].double(), lambda m: m.half()])
def test_another_dtype_of_the_module_is_computed(engine, precision, change):
    if engine == "packed":
        require_packing(precision)
    predictor = vitral.load(network(), device="cpu", engine=engine, precision=precision)
    before = predictor.probabilities(IMAGES)
    change(predictor.model)
    if engine == "plain" and precision == "fp32" and len({p.dtype for p in predictor.model.parameters()}) > 1:
        return  # the module itself, which torch refuses
    assert np.allclose(predictor.probabilities(IMAGES), before, atol=0.03)


class Adapter(nn.Module):
    """As LoRA does: a layer with a low-rank product beside it."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.layer, self.weight = layer, nn.Parameter(torch.randn_like(layer.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + x @ self.weight.T


@pytest.mark.parametrize("wrapped", [Adapter, lambda layer: nn.Sequential(layer, nn.Tanh())])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_wrapped_layer_is_computed(wrapped, precision):
    require_packing(precision)
    predictor = vitral.load(network(), device="cpu", precision=precision)
    before = predictor.probabilities(IMAGES)
    block = predictor.model.blocks[0]
    block.attn.proj = wrapped(block.attn.proj)
    found = predictor.probabilities(IMAGES)
    assert np.abs(found - before).max() > 0.02
    assert "'blocks.0.attn.proj' is" in predictor.note
    packed = vitral.load(network(), device="cpu", precision=precision, engine="packed")
    packed.probabilities(IMAGES)
    packed.model.blocks[0].attn.proj = wrapped(packed.model.blocks[0].attn.proj)
    with pytest.raises(UsageError, match="engine packed cannot compute this network"):
        packed.probabilities(IMAGES)


def test_digests_depend_on_every_value_and_its_place():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64):
        values = torch.arange(24).to(dtype).view(4, 6)
        swapped = values.clone()
        swapped[0, 0], swapped[3, 5] = values[3, 5], values[0, 0]
        for digest in (_weighted_sum, lambda one: digest_of([one])):
            assert digest(values) == digest(values.clone())
            assert digest(values) != digest(swapped)
            assert digest(values.t()) != digest(values)
    assert digest_of([torch.tensor(1.0), torch.zeros(0)]) != digest_of([torch.tensor(2.0), torch.zeros(0)])
