"""int8 networks match the original up to 8-bit rounding."""

from __future__ import annotations

import copy
import os
import platform
import subprocess
import sys

import pytest
import torch
from tiny import KERNELS, VARIANTS, moderate, random_images
from torch import nn

from vitral.errors import UsageError
from vitral.inference.engines import int8
from vitral.inference.engines.int8 import layer_names, observe, quantized, unsupported_reason
from vitral.model import BiT, BiTConfig, ViT

computed = pytest.mark.skipif(bool(int8.unavailable_reason()), reason=int8.unavailable_reason())


def rounded(model: ViT, ranges: int8.Ranges) -> ViT:
    """Reference: inputs and weights of every dense layer rounded to integers, in fp32."""
    twin, most = copy.deepcopy(model), int8.max_weight()
    for name in layer_names(model):
        layer, (least, greatest) = twin.get_submodule(name), ranges[name]
        weight = layer.weight
        if model.config.layer_scale is not None and name.endswith(("proj", "fc2")):  # it is part of these weights
            block = twin.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            gamma = (block.ls1 if name.endswith("proj") else block.ls2).gamma
            steps = (gamma[:, None] * weight).abs().amax(1, keepdim=True) / most
            layer.weight.data = (gamma[:, None] * weight / steps).round() * steps / gamma[:, None]
        else:
            steps = weight.abs().amax(1, keepdim=True) / most
            layer.weight.data = (weight / steps).round() * steps
        step = (greatest - least) / 255
        zero = round(-least / step)

        def before(_, arguments, step=step, zero=zero):
            return ((torch.floor(arguments[0] / step + zero + 0.5).clamp(0, 255) - zero) * step,)

        layer.register_forward_pre_hook(before)
    twin.prune_last_block = False
    return twin


@computed
@pytest.mark.parametrize("name", KERNELS)
def test_logits_are_those_of_rounded_layers(name):
    config = VARIANTS[name]
    model, images = moderate(config).float(), random_images(config).float()
    ranges = observe(model, [images])
    with torch.inference_mode():
        found, wanted, exact = quantized(model, ranges)(images), rounded(model, ranges)(images), model(images)
    size = exact.abs().max()
    assert (found - exact).abs().max() < 0.1 * size
    # A number on the edge between two integers may fall on either side, and all that follows with it.
    assert (found - wanted).abs().max() < 0.5 * (wanted - exact).abs().max() + 1e-4 * size


@computed
def test_images_are_independent_and_half_precision_works():
    config = VARIANTS["paper"]
    model, images = moderate(config).float(), random_images(config).float()
    ranges, in_one_batch = observe(model, images.split(1)), observe(model, [images])
    assert ranges.keys() == in_one_batch.keys()
    for name, bounds in ranges.items():  # products of a batch may be rounded otherwise
        assert bounds == pytest.approx(in_one_batch[name], rel=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        twin = quantized(model.to(dtype), ranges)
        with torch.inference_mode():
            together = twin(images.to(dtype))
            assert together.dtype == dtype
            alone = torch.cat([twin(one.to(dtype)) for one in images.split(1)])
        torch.testing.assert_close(together, alone, rtol=0.02, atol=0.02)


@computed
def test_values_out_of_range_are_clamped_and_hooks_removed():
    config = VARIANTS["paper"]
    model, images = moderate(config).float(), random_images(config).float()
    state = copy.deepcopy(model.state_dict())
    before = {name: (set(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()}
    ranges = observe(model, [images])
    with torch.inference_mode():
        assert quantized(model, ranges)(100 * images).isfinite().all()
    assert {name: (set(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()} == before
    assert model.prune_last_block
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@computed
def test_refusals():
    config = VARIANTS["paper"]
    model = moderate(config).float()
    assert unsupported_reason(model) == ""
    for other in (BiT(BiTConfig(image_size=32, classes=5, layers=(2, 1))), nn.Linear(2, 2)):
        assert unsupported_reason(other) == "only a ViT computes in int8"
    assert "is on the device meta" in unsupported_reason(copy.deepcopy(model).to("meta"))
    with pytest.raises(UsageError, match="another network"):
        quantized(model, {"blocks.0.attn.qkv": (-1.0, 1.0)})
    with pytest.raises(UsageError, match="no images"):
        observe(model, [])


@pytest.mark.skipif("lacks" in int8.unavailable_reason(), reason="this torch has no operators for integers")
def test_reasons_for_unavailability(monkeypatch):
    """The reason for missing operators, and for operators with wrong results, as without VNNI."""
    model, linear = moderate(VARIANTS["paper"]).float(), int8._Linear
    monkeypatch.setattr(int8, "_trial", int8._trial.__wrapped__)
    monkeypatch.setattr(int8.cpu, "supports_linear", lambda *_, **__: False)
    monkeypatch.setattr(linear, "to", lambda self, x, dtype: torch.ops.onednn.no_such_operator(x))
    assert unsupported_reason(model) == "this torch lacks oneDNN's int8 operators"
    for name in ("to", "gelu", "added"):
        monkeypatch.setattr(linear, name, lambda self, x, *_: torch.zeros(len(x), len(self.bias)))
    assert unsupported_reason(model) == int8.WRONG


WITHOUT_VNNI = """
import torch
from tiny import VARIANTS, moderate, random_images
from vitral.inference.engines import int8
from vitral.kernels import cpu
cpu.supports_linear = lambda *_, **__: False  # its kernels look at the CPU itself
config = VARIANTS["paper"]
model, images = moderate(config).float(), random_images(config).float()
ranges = int8.observe(model, [images])
with torch.inference_mode():
    exact = model(images)
    off = [(f(model, ranges)(images) - exact).abs().max() / exact.abs().max() for f in (
        int8.quantized, lambda *given: int8.fake_quantized(*given, int8.SEVEN_BITS))]
print(int8.max_weight(), int8.unavailable_reason() or "right", *map(float, off))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="16-bit sums are x86's")
@computed
def test_weights_of_seven_bits_where_there_is_no_vnni():
    """oneDNN restricted to AVX2, which adds products of bytes in 16 bits: weights of 8 bits fail the self-test."""
    limited = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", WITHOUT_VNNI]
    told = subprocess.run(command, env=limited, capture_output=True, text=True, check=True).stdout.split()
    assert told[:2] == ["64", "right"]
    computed, by_hand = map(float, told[2:])
    assert computed < 0.1
    assert computed < 1.5 * by_hand + 1e-4


def test_the_probe_shows_sums_that_are_cut_off_at_16_bits():
    """Pairs of products added in 16 bits, as on CPUs without VNNI, exceed the tolerance of the self-test."""
    layer, x = int8.probe()
    whole = (layer.linear.weight / layer.steps[:, None]).round()
    unsigned = layer.scale(x).float()
    pairs = (unsigned[:, None] * whole).unflatten(-1, (-1, 2)).sum(-1)  # (5, 32, 32)

    def product(pairs):
        sums = pairs.sum(-1) - layer.scale.zero * whole.sum(1)
        return sums * layer.steps * layer.scale.step + layer.linear.bias

    torch.testing.assert_close(product(pairs), layer(x), rtol=0, atol=1e-4)
    assert (product(pairs.clamp(-(2**15), 2**15 - 1)) - layer(x)).abs().max() > 0.1


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - KERNELS.keys()))
def test_blocks_with_other_parts_are_refused(name):
    assert "parts" in int8.unsupported_reason(moderate(VARIANTS[name]).float())
