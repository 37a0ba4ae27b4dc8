"""Training objectives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.device import choose, seed_everything
from vitral.training.objectives.classification import Classification, balanced_weights, image_weights

PREPROCESSING = Preprocessing((4, 4), 1, mean=(0.5,), std=(0.5,))


class Fixed(nn.Module):
    """A network that returns fixed logits and keeps its input."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen = images
        return self.logits


def batch() -> Batch:
    images = torch.arange(6 * 16, dtype=torch.uint8).view(6, 1, 4, 4)
    return Batch(images, torch.tensor([0, 1, 2, 0, 0, 1]), np.arange(6))


def logits() -> torch.Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(0))


def test_cross_entropy_of_standardized_images():
    model = Fixed(logits())
    loss, metrics = Classification(PREPROCESSING, Augmentation(), 3)(model, batch())
    assert torch.allclose(model.seen, batch().images / 127.5 - 1, atol=1e-6)
    wanted = -logits().log_softmax(1)[range(6), batch().labels].mean()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    right = (logits().argmax(1) == batch().labels).float().mean()
    assert metrics["train_accuracy"].item() == pytest.approx(right.item())


def test_label_smoothing_is_the_formula():
    loss, _ = Classification(PREPROCESSING, Augmentation(), 3, label_smoothing=0.3)(Fixed(logits()), batch())
    shares = 0.7 * F.one_hot(batch().labels, 3) + 0.1
    assert loss.item() == pytest.approx(-(shares * logits().log_softmax(1)).sum(1).mean().item(), rel=1e-6)


def test_class_weights_are_inverse_to_frequency():
    labels = np.array([0] * 8 + [1] * 2)
    weights = balanced_weights(labels, 3)
    assert weights.tolist() == pytest.approx([10 / 16, 10 / 4, 0])
    assert weights[labels].mean() == pytest.approx(1.0)


WEIGHTS = torch.tensor([1.0, 5.0, 0.25])


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_class_weights_multiply_the_loss_of_their_class(smoothing):
    """Each label's smoothed loss is multiplied by the weight of that label's class; then the mean over images."""
    objective = Classification(PREPROCESSING, Augmentation(), 3, smoothing, class_weights=WEIGHTS)
    loss, _ = objective(Fixed(logits()), batch())
    log_p = logits().log_softmax(1)
    of_label = -((1 - smoothing) * log_p + smoothing * log_p.mean(1, keepdim=True))  # (images, labels)
    labels = batch().labels
    assert loss.item() == pytest.approx((WEIGHTS[labels] * of_label[range(6), labels]).mean().item(), rel=1e-6)
    shares = F.one_hot(labels, 3) * 0.6 + F.one_hot(labels.flip(0), 3) * 0.4
    mixed, _ = objective.loss(Fixed(logits()), batch().images.float(), shares, None)
    assert mixed.item() == pytest.approx((shares * WEIGHTS * of_label).sum(1).mean().item(), rel=1e-6)
    torch.testing.assert_close(image_weights(shares, WEIGHTS), shares @ WEIGHTS)
    one, _ = objective.loss(Fixed(logits()), batch().images.float(), F.one_hot(labels, 3).float(), None)
    assert one.item() == pytest.approx(loss.item(), rel=1e-6)


def test_parts_of_a_weighted_batch_add_up_to_it():
    objective = Classification(PREPROCESSING, Augmentation(), 3, 0.1, class_weights=WEIGHTS)
    whole, _ = objective(Fixed(logits()), batch())
    parts = [
        objective(Fixed(logits()[rows]), Batch(batch().images[rows], batch().labels[rows], np.arange(3)))[0]
        for rows in (slice(0, 3), slice(3, 6))
    ]
    assert whole.item() == pytest.approx(sum(map(float, parts)) / 2, rel=1e-6)


def test_logits_in_bf16_give_a_loss_in_fp32():
    loss, _ = Classification(PREPROCESSING, Augmentation(), 3)(Fixed(logits().bfloat16()), batch())
    assert loss.dtype == torch.float32


def test_mixed_images_count_by_the_label_with_the_larger_share():
    torch.manual_seed(0)
    hits = torch.full((6, 3), -5.0)
    hits[range(6), batch().labels] = 5.0
    objective = Classification(PREPROCESSING, Augmentation(mixup=1.0), 3)
    loss, metrics = objective(Fixed(hits), batch())
    assert torch.isfinite(loss)
    assert 0 <= metrics["train_accuracy"] <= 1


def test_augmentation_is_as_precise_under_bf16():
    """Autocast would round sampling coordinates: at 64 pixels by up to a fifth of a pixel."""
    images = torch.randint(0, 256, (4, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    batch = Batch(images, torch.zeros(4, dtype=torch.long), np.arange(4))
    augmentation = Augmentation(augment="affine")
    seen = []

    def model(images):
        seen.append(images)
        return images.flatten(1)[:, :3]

    for precision in ("fp32", "bf16"):
        seed_everything(0)
        with choose("cpu", precision).autocast():
            Classification(Preprocessing((64, 64)), augmentation, 3)(model, batch)
    assert torch.equal(*seen)
