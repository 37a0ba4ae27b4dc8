"""Classification: cross-entropy, with class weights, label smoothing and a teacher."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.training.distillation import Teacher
from vitral.training.objectives.objective import OwnLoss, TwoPartObjective, augmented, mean_of_own, share_of


@dataclass(frozen=True, eq=False)
class Classification(TwoPartObjective):
    """Cross-entropy on augmented images. For mixed images, `train_accuracy` counts the label with the larger share.

    In two parts: `prepare` draws random numbers for augmentation; `loss` draws none but the network's own, and can be
    compiled as one graph (`vitral.training.compiling`).
    """

    preprocessing: Preprocessing
    augmentation: Augmentation
    classes: int
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None
    """(K,), on the device. The loss is the mean over images of weight times loss."""
    teacher: Teacher | None = field(default=None, kw_only=True)
    """The loss is (1 - w) times cross-entropy plus w times the teacher's, which sees the same images at full size."""
    own: OwnLoss | None = field(default=None, kw_only=True)
    """A loss of the user instead of cross-entropy, of logits and the labels of `prepare`."""

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return augmented, standardized images (B, C, H, W) fp32; labels (B,), or probabilities (B, K) for mixed
        images; and the teacher's logits (B, K).
        """
        images, labels = augmented(batch, self.preprocessing, self.augmentation, self.classes)
        teacher_logits = self.teacher(images) if self.teacher else None
        return images, labels, teacher_logits

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics for the result of `prepare`."""
        logits = model(images).float()
        loss = share_of(self._cross_entropy(logits, labels))
        hard = labels if labels.ndim == 1 else labels.argmax(1)
        metrics = {"train_accuracy": share_of((logits.detach().argmax(1) == hard).float().mean())}
        if self.teacher and teacher_logits is not None:
            weights = None if self.class_weights is None else image_weights(labels, self.class_weights)
            distill_loss = share_of(self.teacher.loss(logits, teacher_logits, weights))
            loss = (1 - self.teacher.weight) * loss + self.teacher.weight * distill_loss
            metrics["distill_loss"] = distill_loss.detach()
        return loss, metrics

    def _cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.own is not None:
            return mean_of_own(self.own, logits, labels)
        if self.class_weights is None:
            return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing)
        return image_losses(logits, labels, self.class_weights, self.label_smoothing).mean()


def image_losses(logits: Tensor, labels: Tensor, class_weights: Tensor | None, label_smoothing: float) -> Tensor:
    """Cross-entropy of each image (B,) from logits (B, K) and labels (B,), or their shares (B, K) for mixed images.

    The loss of a label, smoothed, is multiplied by the weight of its class. Trap: `F.cross_entropy` with `weight`
    multiplies the smoothed share by the weights of the other classes, and divides by the sum of the batch's weights,
    which differs between micro-batches. Balanced weights have a mean of 1 over the training images instead.
    """
    if class_weights is None:
        return F.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
    if labels.ndim == 1:
        return class_weights[labels] * image_losses(logits, labels, None, label_smoothing)
    log_p, weighted = logits.log_softmax(1), labels * class_weights
    smoothed = label_smoothing * weighted.sum(1) * log_p.mean(1)
    return -(1 - label_smoothing) * (weighted * log_p).sum(1) - smoothed


def image_weights(labels: Tensor, class_weights: Tensor) -> Tensor:
    """Weight of each image (B,): that of its class, or the mean over the shares of a mixed image."""
    return class_weights[labels] if labels.ndim == 1 else labels @ class_weights


def balanced_weights(labels: np.ndarray, classes: int) -> np.ndarray:
    """Class weights, inverse to frequency, with mean 1 over the images; 0 for a class without images."""
    counts = np.bincount(labels, minlength=classes)
    present = counts > 0
    return np.where(present, len(labels) / (present.sum() * np.maximum(counts, 1)), 0.0).astype(np.float32)
