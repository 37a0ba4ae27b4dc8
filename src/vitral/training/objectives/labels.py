"""Several labels an image: binary cross-entropy of each label on its own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.training.objectives.objective import OwnLoss, TwoPartObjective, augmented, mean_of_own, share_of

MOST_WEIGHT = 100.0
"""Largest weight of a label's presence: a single image must not decide the gradient."""


@dataclass(frozen=True, eq=False)
class SeveralLabels(TwoPartObjective):
    """Sigmoid and binary cross-entropy, the mean over images and labels, on augmented images.

    Mixed images have shares of labels, for which this loss is the same mixture of losses. Label smoothing moves every
    target by half of its share towards 1/2. `train_label_accuracy` counts labels of mixed images by their larger share.
    """

    preprocessing: Preprocessing
    augmentation: Augmentation
    labels: int
    label_smoothing: float = 0.0
    presence_weights: Tensor | None = None
    """(K,), on the device: factor of the loss where a label is present."""
    own: OwnLoss | None = None
    """A loss of the user instead, of logits and labels (B, K)."""

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return augmented, standardized images (B, C, H, W) fp32, and labels (B, K) fp32 from 0 to 1."""
        images, labels = augmented(batch, self.preprocessing, self.augmentation, self.labels)
        return images, labels.float(), None

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, _: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics for the result of `prepare`."""
        logits = model(images).float()
        targets = labels * (1 - self.label_smoothing) + self.label_smoothing / 2
        if self.own is None:
            loss = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=self.presence_weights)
        else:
            loss = mean_of_own(self.own, logits, targets)
        right = ((logits.detach() > 0) == (labels > 0.5)).float().mean()
        return share_of(loss), {"train_label_accuracy": share_of(right)}


def presence_weights(labels: np.ndarray) -> np.ndarray:
    """Return for each label (K,) the images without it per image with it, from 1/100 to 100; 1 without any image."""
    present = labels.sum(axis=0, dtype=np.float64)
    ratio = (len(labels) - present) / np.maximum(present, 1)
    return np.where(present > 0, ratio.clip(1 / MOST_WEIGHT, MOST_WEIGHT), 1.0).astype(np.float32)
