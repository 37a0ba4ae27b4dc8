"""Integer networks compute what the network computes, up to what 8 bits can hold."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import VARIANTS, moderate, pictures
from torch import nn

from vitral.errors import UsageError
from vitral.model import BiT, BiTConfig, ViT
from vitral.model import quantized as module
from vitral.model.quantized import layer_names, observe, quantized, refusal

computed = pytest.mark.skipif(bool(module.lacking()), reason=module.lacking())


def rounded(model: ViT, ranges: module.Ranges) -> ViT:
    """The same network with every dense layer's input and weights rounded to integers, in fp32 and by hand."""
    twin = copy.deepcopy(model)
    for name in layer_names(model):
        layer, (least, greatest) = twin.get_submodule(name), ranges[name]
        weight = layer.weight
        if model.config.layer_scale is not None and name.endswith(("proj", "fc2")):  # it is part of these weights
            block = twin.get_submodule(name.rpartition(".")[0].rpartition(".")[0])
            gamma = (block.ls1 if name.endswith("proj") else block.ls2).gamma
            steps = (gamma[:, None] * weight).abs().amax(1, keepdim=True) / 127
            layer.weight.data = (gamma[:, None] * weight / steps).round() * steps / gamma[:, None]
        else:
            steps = weight.abs().amax(1, keepdim=True) / 127
            layer.weight.data = (weight / steps).round() * steps
        step = (greatest - least) / 255
        zero = round(-least / step)

        def before(_, arguments, step=step, zero=zero):
            return ((torch.floor(arguments[0] / step + zero + 0.5).clamp(0, 255) - zero) * step,)

        layer.register_forward_pre_hook(before)
    twin.lean = False
    return twin


@computed
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_rounded_layers(name):
    config = VARIANTS[name]
    model, images = moderate(config).float(), pictures(config).float()
    ranges = observe(model, [images])
    with torch.inference_mode():
        found, wanted, exact = quantized(model, ranges)(images), rounded(model, ranges)(images), model(images)
    size = exact.abs().max()
    assert (found - exact).abs().max() < 0.1 * size
    # A number on the edge between two integers may fall on either side, and all that follows with it.
    assert (found - wanted).abs().max() < 0.5 * (wanted - exact).abs().max() + 1e-4 * size


@computed
def test_a_batch_is_its_pictures_and_half_precision_works():
    config = VARIANTS["paper"]
    model, images = moderate(config).float(), pictures(config).float()
    ranges = observe(model, images.split(1))
    assert ranges == observe(model, [images])
    for dtype in (torch.float32, torch.bfloat16):
        twin = quantized(model.to(dtype), ranges)
        with torch.inference_mode():
            together = twin(images.to(dtype))
            assert together.dtype == dtype
            alone = torch.cat([twin(one.to(dtype)) for one in images.split(1)])
        torch.testing.assert_close(together, alone, rtol=0.02, atol=0.02)


@computed
def test_what_was_not_seen_is_cut_off_and_nothing_is_left_behind():
    config = VARIANTS["paper"]
    model, images = moderate(config).float(), pictures(config).float()
    state = copy.deepcopy(model.state_dict())
    before = {name: (set(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()}
    ranges = observe(model, [images])
    with torch.inference_mode():
        assert quantized(model, ranges)(100 * images).isfinite().all()
    assert {name: (set(vars(part)), len(part._forward_pre_hooks)) for name, part in model.named_modules()} == before
    assert model.lean
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@computed
def test_refusals():
    config = VARIANTS["paper"]
    model = moderate(config).float()
    assert refusal(model) == ""
    for other in (BiT(BiTConfig(image_size=32, classes=5, layers=(2, 1))), nn.Linear(2, 2)):
        assert refusal(other) == "only a ViT computes in int8"
    assert "is on a GPU" in refusal(copy.deepcopy(model).to("meta"))
    with pytest.raises(UsageError, match="another network"):
        quantized(model, {"blocks.0.attn.qkv": (-1.0, 1.0)})
    with pytest.raises(UsageError, match="no pictures"):
        observe(model, [])


@pytest.mark.skipif("lacks" in module.lacking(), reason="this torch has no operators for integers")
def test_why_it_cannot_be(monkeypatch):
    """What is said where operators are missing, and where they compute something else, as without VNNI."""
    model, linear = moderate(VARIANTS["paper"]).float(), module._Linear
    monkeypatch.setattr(module, "lacking", module.lacking.__wrapped__)
    monkeypatch.setattr(module.avx512, "serves", lambda *_, **__: False)
    monkeypatch.setattr(linear, "to", lambda self, x, dtype: torch.ops.onednn.no_such_operator(x))
    assert refusal(model) == "this torch lacks oneDNN's operators for integers"
    for name in ("to", "gelu", "added"):
        monkeypatch.setattr(linear, name, lambda self, x, *_: torch.zeros(len(x), len(self.bias)))
    assert refusal(model) == module.WRONG


def test_the_probe_shows_sums_that_are_cut_off_at_16_bits():
    """Products added two by two in 16 bits, as processors without VNNI do, are further off than the trial allows."""
    layer, x = module.probe()
    whole = (layer.linear.weight / layer.steps[:, None]).round()
    unsigned = layer.scale(x).float()
    pairs = (unsigned[:, None] * whole).unflatten(-1, (-1, 2)).sum(-1)  # (5, 32, 32)

    def product(pairs):
        sums = pairs.sum(-1) - layer.scale.zero * whole.sum(1)
        return sums * layer.steps * layer.scale.step + layer.linear.bias

    torch.testing.assert_close(product(pairs), layer(x), rtol=0, atol=1e-4)
    assert (product(pairs.clamp(-(2**15), 2**15 - 1)) - layer(x)).abs().max() > 0.1
