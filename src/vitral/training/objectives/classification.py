"""Classification: cross-entropy, with class weights, label smoothing and a teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.augmentation import Augmentation
from vitral.data.loader import Batch
from vitral.data.preprocessing import Preprocessing
from vitral.distributed.ranks import summed
from vitral.kernels import random
from vitral.training.distillation import Teacher
from vitral.training.objectives.objective import at_size, augmented, share_of


@dataclass(frozen=True, eq=False)
class Classification:
    """Cross-entropy on augmented images. For mixed images, `train_accuracy` counts the label with the larger share.

    In two parts: `prepare` draws random numbers for augmentation; `loss` draws none but the network's own, and can be
    compiled as one graph (`vitral.training.compiling`).
    """

    preprocessing: Preprocessing
    augmentation: Augmentation
    classes: int
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None
    """(K,), on the device."""
    size: Callable[[], tuple[int, int]] | None = field(default=None, kw_only=True)
    """Height and width of the next batch for the network; None keeps the images' size."""
    teacher: Teacher | None = field(default=None, kw_only=True)
    """The loss is (1 - w) times cross-entropy plus w times the teacher's, which sees the same images at full size."""

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(model, *self.prepare(batch))

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return augmented, standardized images (B, C, H, W) fp32; labels (B,), or probabilities (B, K) for mixed
        images; and the teacher's logits (B, K).
        """
        images, labels = augmented(batch, self.preprocessing, self.augmentation, self.classes)
        teacher_logits = self.teacher(images) if self.teacher else None
        return at_size(images, self.size), labels, teacher_logits

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics for the result of `prepare`."""
        logits = model(images).float()
        loss = F.cross_entropy(logits, labels, weight=self.class_weights, label_smoothing=self.label_smoothing)
        loss = self._share(loss, labels)
        hard = labels if labels.ndim == 1 else labels.argmax(1)
        metrics = {"train_accuracy": share_of((logits.detach().argmax(1) == hard).float().mean())}
        if self.teacher and teacher_logits is not None:
            distill_loss = share_of(self.teacher.loss(logits, teacher_logits))
            loss = (1 - self.teacher.weight) * loss + self.teacher.weight * distill_loss
            metrics["distill_loss"] = distill_loss.detach()
        return loss, metrics

    def _share(self, cross_entropy: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the batch's cross-entropy, which is a mean over the weights of the labels."""
        if random.current() is None or self.class_weights is None or labels.ndim == 2:
            return share_of(cross_entropy)
        weight = self.class_weights[labels].sum()
        return cross_entropy * (weight / summed(weight))


def balanced_weights(labels: np.ndarray, classes: int) -> np.ndarray:
    """Class weights, inverse to frequency, with mean 1 over the images; 0 for a class without images."""
    counts = np.bincount(labels, minlength=classes)
    present = counts > 0
    return np.where(present, len(labels) / (present.sum() * np.maximum(counts, 1)), 0.0).astype(np.float32)
