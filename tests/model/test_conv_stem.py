"""The convolutional stem: its effects on the rest of the library.

That its logits equal the formulas is in test_network_contract.py, over the variants with one.
"""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny import VARIANTS, network, random_images
from torch import nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError, WeightsError
from vitral.explanation.inspect.filters import patch_filters
from vitral.model import ViT, ViTConfig, config, create, summarize
from vitral.model.conv_stem import ConvStem, conv_layers, deep_layers, whiten
from vitral.training.optimizer_set import OptimizerSet, parameter_groups
from vitral.training.options import Run
from vitral.weights import native
from vitral.weights.convert import convert
from vitral.weights.transform.adapt import adapt

SHAPE = VARIANTS["conv-stem"]


@pytest.mark.parametrize("patch", [2, 4, 8, 16, 32])
def test_a_name_gives_layers_that_end_in_tokens(patch):
    layers = conv_layers(192, patch)
    assert len(layers) >= 5
    assert math.prod(stride for _, stride in layers) == patch
    assert [width for width, _ in layers][-5:] == [64, 128, 128, 256, 256]
    shape = config(f"C+Ti/{patch}")
    assert (shape.conv_stem, shape.patch, shape.grid) == (layers, (patch, patch), (224 // patch, 224 // patch))


@pytest.mark.parametrize(
    ("patch", "strides", "widths"),
    [
        (2, (1, 2, 1, 1), (16, 32, 32, 128)),
        (4, (1, 2, 1, 2, 1, 1), (16, 32, 32, 128, 128, 128)),
        (8, (1, 2, 1, 2, 1, 2, 1, 1), (16, 32, 32, 128, 128, 128, 128, 128)),
    ],
)
def test_for_small_images_a_network_that_is_mostly_stem_halves_by_maxima(patch, strides, widths):
    shape = config(f"C+Femto/{patch}")
    assert shape.conv_pool
    assert shape.conv_stem == deep_layers(64, patch) == tuple(zip(widths, strides, strict=True))
    assert (shape.patch, shape.grid) == ((patch, patch), (224 // patch, 224 // patch))
    layers = ViT(dataclasses.replace(shape, image_size=32)).patch_embed.backbone.layers
    assert [layer.conv.stride[0] * layer.pool for layer in layers] == [*strides]
    assert {layer.conv.stride[0] for layer in layers[1:]} == {1}
    larger = config("C+Femto/16")
    assert (larger.conv_stem, larger.conv_pool) == (conv_layers(64, 16), False)


def test_the_summary_counts_its_operations():
    rows = {row.name: row for row in summarize("C+Nano/4", image_size=32).layers}
    assert rows["patch_embed.backbone"].output_shape == (1, 256, 8, 8)
    assert rows["patch_embed.backbone.layers.2.conv"].flops == 2 * 16 * 16 * 128 * 128 * 9
    rows = {row.name: row for row in summarize("C+Micro/4", image_size=32).layers}
    assert rows["patch_embed.backbone.layers.1.conv"].flops == 2 * 32 * 32 * 32 * 64 * 9


def test_it_learns_and_its_norms_see_batches_only_in_training():
    torch.manual_seed(0)
    model = create("C+Nano/4", image_size=16, classes=3, dim=24, depth=1, heads=2, mlp_dim=24)
    images, labels = torch.randn(6, 3, 16, 16), torch.tensor([0, 2, 1, 1, 0, 2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = F.cross_entropy(model(images), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(images)[:2], model(images[:2]))


def test_recomputing_blocks_changes_no_bit_of_the_norms():
    states = []
    for recompute in (False, True):
        model = network(SHAPE).train()
        model.checkpointing = recompute
        model(random_images(SHAPE)).sum().backward()
        states.append({**model.state_dict(), "grad": model.patch_embed.backbone.layers[0].conv.weight.grad})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_its_own_file_brings_the_same_logits(tmp_path):
    model = network(SHAPE).float()
    weights = native.Weights(SHAPE, model.state_dict(), Preprocessing(SHAPE.image), tuple("abcde"), {})
    native.save(tmp_path / "model.safetensors", weights)
    again = native.build(native.read(tmp_path / "model.safetensors"))
    assert again.config == SHAPE
    with torch.no_grad():
        assert torch.equal(again(random_images(SHAPE).float()), model(random_images(SHAPE).float()))
    assert ViTConfig.from_json(json.loads(json.dumps(SHAPE.to_json()))) == SHAPE


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["timm", "torchvision", "jax"])
def test_other_formats_do_not_support_it(kind, channels, tmp_path):
    shape = dataclasses.replace(SHAPE, channels=channels)
    preprocessing = Preprocessing(shape.image, channels=channels, mean=(0.5,) * channels, std=(0.5,) * channels)
    weights = native.Weights(shape, network(shape).float().state_dict(), preprocessing, tuple("abcde"), {})
    native.save(tmp_path / "model.safetensors", weights)
    with pytest.raises(WeightsError, match=r"(?s)cannot be written.*--model Ti/16"):
        convert(tmp_path / "model.safetensors", tmp_path / "out", to=kind)


def test_weights_for_color_take_gray_images():
    model = network(SHAPE).float()
    gray = dataclasses.replace(SHAPE, channels=1)
    state, *_ = adapt(model.state_dict(), SHAPE, {"channels": 1}, scheme="bilinear", new_head=False)
    adapted = ViT(gray).eval()
    adapted.load_state_dict(state)
    one = torch.randn(2, 1, *SHAPE.image)
    with torch.no_grad():
        torch.testing.assert_close(adapted(one), model(one.expand(-1, 3, -1, -1)), rtol=1e-4, atol=1e-4)


def test_filters_are_those_that_see_the_image():
    found = patch_filters(network(SHAPE))
    assert found.kernels.shape == (6, 3, 3, 3)
    assert "first convolution" in found.source


BAD = {
    "two stems": ({"stem": (), "patch_size": 4}, "two stems"),
    "empty": ({"conv_stem": ()}, "channels and a stride"),
    "maxima of nothing": ({"conv_stem": None, "conv_pool": True}, "there is none"),
    "no stride": ({"conv_stem": ((4, 0),)}, "channels and a stride"),
    "too far": ({"conv_stem": ((4, 4), (4, 2))}, "does not fit the stem"),
    "not pairs": ({"conv_stem": (4, 2)}, "conv_stem cannot be"),
    "three numbers": ({"conv_stem": ((4, 2, 1),)}, "conv_stem cannot be"),
}


@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD)
def test_invalid_stems_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(SHAPE, **changes)


# ---------------------------------------------------------------- Muon on kernels


class _Dense(nn.Module):
    """The same values as matrices, for torch's own Muon."""

    def __init__(self, model: ViT, names: list[str]):
        super().__init__()
        self.matrices = nn.ParameterList(model.get_parameter(name).detach().clone().flatten(1) for name in names)


def test_muon_takes_a_kernel_for_the_matrix_of_its_numbers(monkeypatch):
    # torch's own computes in bf16 everywhere
    monkeypatch.setattr("vitral.training.optimizers.muon.has_bf16", lambda device: True)
    model = network(SHAPE).float().train()
    run = Run(optimizer="muon", lr=0.02, weight_decay=0.1, momentum=0.9)
    groups = parameter_groups(model, run)
    kernels = [name for g in groups if g["hidden"] for name in g["names"] if "backbone" in name]
    assert kernels == [f"patch_embed.backbone.layers.{k}.conv.weight" for k in (1, 2, 3)]
    dense = _Dense(model, kernels)
    wanted = torch.optim.Muon(
        dense.parameters(), lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    ours = OptimizerSet(model, run)
    for step in range(3):
        model(random_images(SHAPE, seed=step).float()).square().sum().backward()
        for name, matrix in zip(kernels, dense.matrices, strict=True):
            matrix.grad = model.get_parameter(name).grad.flatten(1).clone()
        ours.step()
        wanted.step()
        assert all(p.grad is None for p in model.parameters())
    for name, matrix in zip(kernels, dense.matrices, strict=True):
        torch.testing.assert_close(model.get_parameter(name).detach().flatten(1), matrix.detach(), rtol=0, atol=0)


def test_the_state_of_kernels_is_saved_and_restored():
    def three_steps(pause: bool) -> dict[str, torch.Tensor]:
        model = network(SHAPE).float().train()
        optimizer = OptimizerSet(model, Run(optimizer="muon", lr=0.02))
        for step in range(3):
            if pause and step == 2:
                saved = {name: value.clone() for name, value in optimizer.state().items()}
                optimizer = OptimizerSet(model, Run(optimizer="muon", lr=0.02))
                optimizer.load_state(saved)
            model(random_images(SHAPE, seed=step).float()).square().sum().backward()
            optimizer.step()
        return model.state_dict()

    straight, paused = three_steps(False), three_steps(True)
    assert all(np.array_equal(straight[name].numpy(), paused[name].numpy()) for name in straight)


def test_a_whitened_layer_sees_variations_of_equal_size_and_without_correlation():
    torch.manual_seed(0)
    mixing = torch.randn(3, 3)
    images = F.avg_pool2d(torch.einsum("cd,ndhw->nchw", mixing, torch.randn(64, 3, 18, 18)), 3, 1)
    stem = ConvStem(3, ((24, 1), (32, 2)), pool=True)
    whiten(stem, images)
    kernels = stem.layers[0].conv.weight.detach()
    assert kernels[12:].equal(-kernels[:12])
    seen = F.conv2d(images, kernels[:12]).transpose(0, 1).flatten(1)
    covariance = seen @ seen.T / seen.shape[1]
    assert (covariance - torch.diag(covariance.diagonal())).abs().max() < 1e-3
    assert covariance.diagonal().max() < 1
    assert covariance.diagonal()[0] > 0.95, "the first varies most, and is not held back"


def test_whitening_takes_images_that_are_smaller_than_a_kernel():
    stem = ConvStem(3, ((24, 1), (32, 2)), pool=True)
    whiten(stem, torch.randn(40, 3, 2, 2))
    assert stem.layers[0].conv.weight.isfinite().all()


def test_whitening_leaves_kernels_for_which_there_is_no_direction():
    stem = ConvStem(1, ((24, 1), (32, 2)), pool=True)
    before = stem.layers[0].conv.weight.detach().clone()
    whiten(stem, torch.randn(4, 1, 8, 8))
    after = stem.layers[0].conv.weight.detach()
    assert after[18:].equal(before[18:])
    assert not after[:18].equal(before[:18])
