"""Distillation: the loss formula, preprocessing for the teacher, and its classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from images import noise
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.errors import UsageError
from vitral.model import BiTConfig, ModelConfig, ViT, ViTConfig, network
from vitral.training.distillation import Teacher, class_order
from vitral.training.objectives.classification import Classification
from vitral.weights.native import Weights

CPU = torch.device("cpu")
CLASSES = ("ant", "bee", "cat")
GIVEN = Preprocessing((8, 8), mean=(0.5, 0.4, 0.3), std=(0.5, 0.25, 0.2))
SMALL = ViTConfig(image_size=8, patch_size=4, classes=3, dim=8, depth=2, heads=2, mlp_dim=8)


def weights_of(config: ModelConfig, preprocessing: Preprocessing, classes: tuple[str, ...] = CLASSES) -> Weights:
    torch.manual_seed(5)
    model = network(config)
    state = {name: value.normal_(std=0.3) for name, value in model.state_dict().items()}
    return Weights(config, state, preprocessing, classes, {})


def teacher_of(
    weights: Weights, weight: float = 0.5, temperature: float = 1.0, given: Preprocessing = GIVEN
) -> Teacher:
    return Teacher.of(weights, given, CLASSES, CPU, weight=weight, temperature=temperature)


def student() -> ViT:
    torch.manual_seed(1)
    model = ViT(SMALL)
    with torch.no_grad():
        model.head.weight.normal_(std=0.3)
    return model


def batch() -> Batch:
    images = torch.stack([torch.from_numpy(noise(i, (8, 8))).permute(2, 0, 1) for i in range(6)])
    return Batch(images, torch.tensor([0, 1, 2, 0, 0, 1]), np.arange(6))


@pytest.mark.parametrize("temperature", [1.0, 3.0])
@pytest.mark.parametrize("weight", [0.3, 1.0])
def test_the_loss_is_the_formula(weight, temperature):
    """(1 - w) × cross-entropy + w T² Σ p log(p / q), with softened p and q, in NumPy."""
    teacher, model = teacher_of(weights_of(SMALL, GIVEN), weight, temperature), student()
    loss, metrics = Classification(GIVEN, Augmentation(), 3, 0.1, teacher=teacher)(model, batch())
    plain, _ = Classification(GIVEN, Augmentation(), 3, 0.1)(model, batch())
    images = GIVEN.standardize(batch().images)
    q, p = (np.exp(net(images).detach().double().numpy() / temperature) for net in (model, teacher.network))
    q, p = q / q.sum(1, keepdims=True), p / p.sum(1, keepdims=True)
    apart = temperature**2 * (p * np.log(p / q)).sum(1).mean()
    assert loss.item() == pytest.approx((1 - weight) * plain.item() + weight * apart, rel=1e-5)
    assert metrics["distill_loss"].item() == pytest.approx(apart, rel=1e-5)
    assert not metrics["distill_loss"].requires_grad


def test_a_student_equal_to_the_teacher_has_zero_loss():
    teacher = teacher_of(weights_of(SMALL, GIVEN), weight=1.0, temperature=2.0)
    model = ViT(SMALL)
    model.load_state_dict(teacher.network.state_dict())
    loss, _ = Classification(GIVEN, Augmentation(), 3, teacher=teacher)(model, batch())
    loss.backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert all(p.grad.abs().max() < 1e-6 for p in model.parameters())


def test_gradients_reach_the_student_and_never_the_teacher():
    teacher, model = teacher_of(weights_of(SMALL, GIVEN), weight=1.0), student()
    before = {name: value.clone() for name, value in teacher.network.state_dict().items()}
    loss, _ = Classification(GIVEN, Augmentation(), 3, teacher=teacher)(model, batch())
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert not any(p.requires_grad or p.grad is not None for p in teacher.network.parameters())
    assert not teacher.network.training
    assert all(torch.equal(before[name], value) for name, value in teacher.network.state_dict().items())


def test_the_temperature_keeps_the_size_of_gradients():
    """The purpose of T² (arXiv 1503.02531, section 2.1)."""
    sizes = []
    for temperature in (20.0, 200.0):
        logits = torch.tensor([[1.0, -2.0, 0.5]], requires_grad=True)
        teacher_of(weights_of(SMALL, GIVEN), 1.0, temperature).loss(logits, torch.tensor([[0.0, 1.0, -1.0]])).backward()
        sizes.append(logits.grad.norm().item())
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_images_are_prepared_for_the_teacher():
    own = Preprocessing((16, 12), mean=(0.2, 0.3, 0.6), std=(0.1, 0.3, 0.5))
    shape = ViTConfig(image_size=(16, 12), patch_size=4, classes=3, dim=8, depth=1, heads=2, mlp_dim=8)
    teacher = teacher_of(weights_of(shape, own))
    pixels = batch().images.float() / 255
    resized = F.interpolate(pixels, size=(16, 12), mode="bilinear", antialias=True)
    wanted = (resized - torch.tensor(own.mean)[:, None, None]) / torch.tensor(own.std)[:, None, None]
    torch.testing.assert_close(teacher.prepare(GIVEN.standardize(batch().images)), wanted, atol=1e-4, rtol=1e-4)
    same = Preprocessing((8, 8), mean=GIVEN.mean, std=GIVEN.std)
    images = GIVEN.standardize(batch().images)
    assert torch.equal(teacher_of(weights_of(SMALL, same)).prepare(images), images)


def test_teacher_and_student_see_the_same_view():
    """The same mirrored, shifted, erased and mixed images."""
    seen: list[torch.Tensor] = []
    teacher, model = teacher_of(weights_of(SMALL, GIVEN)), student()
    for net in (teacher.network, model):
        net.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    augmentation = Augmentation(crop="shift", flip=True, erase=0.5, mixup=0.5)
    Classification(GIVEN, augmentation, 3, teacher=teacher)(model, batch())
    assert torch.equal(seen[0], seen[1])
    assert not torch.equal(seen[0], GIVEN.standardize(batch().images))


def test_a_resnet_teaches():
    teacher = teacher_of(weights_of(BiTConfig(image_size=32, classes=3, layers=(1, 1)), Preprocessing((32, 32))))
    loss, metrics = Classification(GIVEN, Augmentation(), 3, teacher=teacher)(student(), batch())
    assert math.isfinite(loss.item())
    assert metrics["distill_loss"] > 0


def test_classes_in_another_order_are_the_same_classes():
    weights = weights_of(SMALL, GIVEN, ("cat", "ant", "bee"))
    images = GIVEN.standardize(batch().images)
    logits = teacher_of(weights).network(images)
    assert torch.equal(teacher_of(weights)(images), logits[:, [1, 2, 0]])


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (("ant", "bee", "dog"), "it does not know cat; it also knows dog"),
        (("ant", "bee"), "it does not know cat"),
        (("ant", "bee", "cat", "dog", "emu", "fly", "gnu"), "it also knows dog, emu, fly and 1 more"),
    ],
)
def test_other_classes_are_refused_with_the_difference(known, said):
    with pytest.raises(UsageError, match="the teacher's classes are not the data's") as caught:
        class_order(CLASSES, known, "runs/x")
    assert said in str(caught.value)
    assert "runs/x" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_without_a_teacher_the_loss_is_the_same_to_the_bit():
    losses = []
    for more in ({}, {"teacher": None}):
        torch.manual_seed(3)
        loss, metrics = Classification(GIVEN, Augmentation(crop="shift", flip=True), 3, **more)(student(), batch())
        losses.append(loss)
        assert set(metrics) == {"train_accuracy"}
    assert losses[0] == losses[1]
