"""Distillation of features against loops in NumPy; teachers of several kinds, and what they see."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from running import write_teacher
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.device import choose
from vitral.errors import UsageError
from vitral.model import ForeignConfig, ViT, ViTConfig, network
from vitral.pretraining.distill import FeatureDistillation, FeatureTeacher, Head, as_rows
from vitral.training.options import Run
from vitral.weights import native
from vitral.weights.native import Weights

CONFIG = ViTConfig(image_size=8, patch_size=4, classes=0, dim=16, depth=1, heads=2, mlp_dim=16)
CPU = choose("cpu", "fp32")


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()


@torch.no_grad()
@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_loss_is_that_of_a_loop(weight):
    torch.manual_seed(0)
    head = Head(torch.randn(4, 6), torch.randn(4))
    model = FeatureDistillation(ViT(CONFIG), 6, head, weight=weight, temperature=2.0)
    features, images = 3 * torch.randn(5, 6) + 1, torch.randn(5, 3, 8, 8)
    model.measure(features)
    loss, metrics = model(images, features, None)
    near, divergence = [], []
    for image, wanted in zip(images, features.double().numpy(), strict=True):
        got = model.project(model.encoder(image[None]))[0].double().numpy()
        mean, deviation = (of.double().numpy() for of in (model.mean, model.deviation))
        for one, other in zip(got, (wanted - mean) / deviation, strict=True):
            distance = abs(one - other)
            near.append(distance**2 / 2 if distance < 1 else distance - 0.5)
        weights, bias = head.weight.double().numpy(), head.bias.double().numpy()
        student, teacher = (softmax((weights @ x + bias) / 2) for x in (got * deviation + mean, wanted))
        divergence.append(4 * float((teacher * (np.log(teacher) - np.log(student))).sum()))
    assert float(metrics["feature_loss"]) == pytest.approx(np.mean(near), rel=1e-5)
    assert float(loss) == pytest.approx((1 - weight) * np.mean(near) + weight * np.mean(divergence), rel=1e-4)
    assert ("logit_loss" in metrics) == (weight > 0)


def test_features_are_standardized_and_a_constant_one_stays_finite():
    model = FeatureDistillation(ViT(CONFIG), 3)
    features = torch.randn(400, 3) * torch.tensor([5.0, 0.1, 0.0]) + torch.tensor([1.0, 2.0, 3.0])
    model.measure(features)
    standard = (features - model.mean) / model.deviation
    assert torch.allclose(standard.mean(0), torch.zeros(3), atol=1e-4)
    assert torch.allclose(standard.std(0, correction=0), torch.tensor([1.0, 1.0, 0.0]), atol=1e-4)


def test_only_the_network_and_the_layer_learn():
    model = FeatureDistillation(ViT(CONFIG), 6, Head(torch.randn(4, 6), None), weight=0.5)
    model(torch.randn(2, 3, 8, 8), torch.randn(2, 6), None)[0].backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert {name.split(".")[0] for name, _ in model.named_parameters()} == {"encoder", "project"}
    assert set(model.state_dict()) >= {"mean", "deviation"}
    assert model.kept is model.encoder


def test_the_teacher_sees_crops_at_its_own_size_and_deviation(tmp_path):
    weights = native.read(write_teacher(tmp_path))
    own = Preprocessing((12, 12), interpolation="bicubic", mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7))
    teacher = FeatureTeacher.of(Weights(weights.config, weights.state, own, weights.classes, {}), CPU, "")
    pixels = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    before = pixels.clone()
    larger = F.interpolate(pixels.float(), size=(12, 12), mode="bicubic", antialias=True).clamp(0, 255) / 255
    mean, std = (torch.tensor(of)[:, None, None] for of in (own.mean, own.std))
    with torch.no_grad():
        network = native.build(weights)
        expected = network.pool(network.encode((larger - mean) / std))
    torch.testing.assert_close(teacher(pixels), expected)
    assert torch.equal(pixels, before)
    assert teacher.width() == 16
    assert torch.allclose(F.linear(teacher(pixels), *teacher.head), network((larger - mean) / std), atol=1e-5)


def test_rows_keep_what_fp16_can_hold():
    features = torch.tensor([[1.0, -0.3331, 1e6], [0.0, 2.5, -1e9]])
    rows = as_rows(features)
    assert rows.shape == (2, 1, 1, 6)
    assert torch.equal(rows.flatten(1).view(torch.float16), features.clamp(-65504, 65504).half())


def foreign(source: str, classes: int = 3) -> Weights:
    config = ForeignConfig(source=source, image_size=32, classes=classes)
    return Weights(config, network(config).state_dict(), Preprocessing((32, 32)), ("a", "b", "c"), {})


@pytest.mark.parametrize("source", ["timm:test_efficientnet", "torchvision:shufflenet_v2_x0_5"])
def test_a_network_of_another_library_teaches_the_input_of_its_last_layer(source):
    teacher = FeatureTeacher.of(foreign(source), CPU, source)
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8)
    features, body = teacher(pixels), teacher.network.body  # type: ignore[union-attr]
    assert features.shape == (2, teacher.width())
    larger = F.interpolate(pixels.float(), size=(32, 32), mode="bilinear", antialias=True)
    with torch.no_grad():
        logits = body(larger / 127.5 - 1)
    torch.testing.assert_close(F.linear(features, *teacher.head), logits)


def test_a_batch_of_a_teacher_needs_no_gradients_of_it(tmp_path):
    teacher = FeatureTeacher.of(native.read(write_teacher(tmp_path)), CPU, "")
    pixels = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    model = FeatureDistillation(ViT(CONFIG), teacher.width(), teacher.head, weight=0.5)
    model(torch.randn(2, 3, 8, 8), teacher(pixels), None)[0].backward()
    assert all(parameter.grad is None for parameter in teacher.network.parameters())
    assert not teacher.network.training


def test_colors_are_the_students_own():
    run = Run(recipe="distill", image_size=8, crop="random-resized")
    pixels = torch.randint(0, 256, (16, 3, 8, 8), dtype=torch.uint8)
    before = pixels.clone()
    images, _, _ = FeatureDistillation.draw(run, CONFIG)(pixels, Preprocessing((8, 8)))
    plain = Preprocessing((8, 8)).standardize(pixels)
    changed = (images - plain).abs().flatten(1).amax(1) > 1e-3
    assert 4 < changed.sum() <= 16
    assert torch.equal(pixels, before)
    assert Batch(pixels, torch.zeros(16), np.arange(16)).view == 0


def test_a_teacher_without_features_is_refused():
    """Its last layer is a convolution."""
    with pytest.raises(UsageError, match="no features of torchvision:squeezenet1_0"):
        FeatureTeacher.of(foreign("torchvision:squeezenet1_0"), CPU, "x").width()
