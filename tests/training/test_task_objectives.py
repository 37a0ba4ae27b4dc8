"""Losses of labels and numbers against PyTorch's definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.training.objectives.labels import SeveralLabels, presence_weights
from vitral.training.objectives.numbers import NumberError

PREPROCESSING = Preprocessing((8, 8))
LOGITS = torch.tensor([[1.0, -2.0, 0.5], [0.2, 0.1, -3.0]])
LABELS = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=torch.uint8)


class Fixed(nn.Module):
    def forward(self, images):
        return LOGITS[: len(images)]


def batch(labels: torch.Tensor) -> Batch:
    return Batch(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), labels, np.arange(2))


def test_the_loss_of_labels_is_binary_cross_entropy():
    loss, metrics = SeveralLabels(PREPROCESSING, Augmentation(), 3)(Fixed(), batch(LABELS))
    assert loss == pytest.approx(float(F.binary_cross_entropy_with_logits(LOGITS, LABELS.float())))
    assert metrics["train_label_accuracy"] == pytest.approx(3 / 6)


def test_smoothing_moves_both_sides_to_the_middle():
    loss, _ = SeveralLabels(PREPROCESSING, Augmentation(), 3, label_smoothing=0.2)(Fixed(), batch(LABELS))
    assert loss == pytest.approx(float(F.binary_cross_entropy_with_logits(LOGITS, LABELS * 0.8 + 0.1)))


def test_presence_is_weighted_by_absence():
    weights = presence_weights(np.array([[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]], np.uint8))
    assert weights.tolist() == [1.0, 3.0, 1.0]  # no image has the last one
    loss, _ = SeveralLabels(PREPROCESSING, Augmentation(), 3, 0.0, torch.tensor(weights))(Fixed(), batch(LABELS))
    each = F.binary_cross_entropy_with_logits(LOGITS, LABELS.float(), reduction="none")
    assert loss == pytest.approx(float((each * torch.where(LABELS > 0, torch.tensor(weights), 1.0)).mean()))


def test_a_mixed_image_has_the_mixed_loss():
    torch.manual_seed(0)
    objective = SeveralLabels(PREPROCESSING, Augmentation(mixup=1.0), 3)
    _, labels, _ = objective.prepare(batch(LABELS))
    share = float(labels[0, 0])  # 1 in the first image, 0 in the second
    assert 0 < share < 1
    whole = LABELS.float()
    assert torch.allclose(labels, share * whole + (1 - share) * whole.roll(1, 0))
    losses = [F.binary_cross_entropy_with_logits(LOGITS, part) for part in (whole, whole.roll(1, 0))]
    mixed = objective.loss(Fixed(), torch.zeros(2, 3, 8, 8), labels, None)[0]
    assert mixed == pytest.approx(float(share * losses[0] + (1 - share) * losses[1]), abs=1e-6)


@pytest.mark.parametrize("kind", ["mse", "huber"])
def test_the_loss_of_numbers_is_that_of_standardized_ones(kind):
    numbers = torch.tensor([[1e9, 2.0, 3.0], [1e9 + 1, 0.0, -9.0]], dtype=torch.float64)
    mean, deviation = (torch.tensor(one, dtype=torch.float64) for one in ((1e9, 1.0, 0.0), (0.5, 1.0, 2.0)))
    loss, _ = NumberError(PREPROCESSING, Augmentation(), mean, deviation, kind)(Fixed(), batch(numbers))
    standardized = ((numbers - mean) / deviation).float()  # in fp32 the first column would be lost
    expected = F.mse_loss(LOGITS, standardized) if kind == "mse" else F.huber_loss(LOGITS, standardized)
    assert loss == pytest.approx(float(expected))
