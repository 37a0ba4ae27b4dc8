"""What a step minimises: a function of model and batch. Another objective is another function, never another loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.loader import Batch
from vitral.data.transforms import Augmentation, Preprocessing
from vitral.device import without_autocast
from vitral.training.distillation import Teacher

Objective = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]
"""(model, batch) → (loss, metrics): scalars; metrics are averaged over an epoch's pictures under their names."""


class Halves(Protocol):
    """An objective in two halves: what is shown of a batch, and what is computed of that."""

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]: ...
    def shown(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]: ...
    def judged(
        self, model: nn.Module, images: Tensor, labels: Tensor, answers: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True, eq=False)
class Classification:
    """Cross-entropy on augmented pictures. `train_accuracy` counts the heavier label where pictures are mixed.

    It is made of two halves: what a step shows (`shown`), which draws random numbers, and what it computes of that
    (`judged`), which draws none but the network's own and is compiled as one (`vitral.training.compiling`).
    """

    preprocessing: Preprocessing
    augmentation: Augmentation
    classes: int
    label_smoothing: float = 0.0
    class_weights: Tensor | None = None
    """(K,), on the device."""
    size: Callable[[], tuple[int, int]] | None = field(default=None, kw_only=True)
    """At which height and width the network sees the next batch; without it, as they are."""
    teacher: Teacher | None = field(default=None, kw_only=True)
    """The loss is (1 - w) times cross-entropy plus w times this teacher's; it sees the same pictures, always whole."""

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.judged(model, *self.shown(batch))

    @torch.no_grad()
    def shown(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Augmented, standardised pictures (B, C, H, W) fp32; labels (B,), or shares (B, K) of mixed pictures; and the
        teacher's logits (B, K).
        """
        with without_autocast(batch.images.device):  # in bf16 a rotation is off by up to 0.4 pixels of 128
            images = self.preprocessing.standardise(self.augmentation.pixels(batch.images))
            images, labels = self.augmentation.standardised(images, batch.labels, self.classes)
        answers = self.teacher(images) if self.teacher else None
        if self.size and (now := self.size()) != tuple(images.shape[2:]):
            images = F.interpolate(images, size=now, mode="bilinear", antialias=True)
        return images, labels, answers

    def judged(
        self, model: nn.Module, images: Tensor, labels: Tensor, answers: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of what `shown` gave."""
        logits = model(images).float()
        loss = F.cross_entropy(logits, labels, weight=self.class_weights, label_smoothing=self.label_smoothing)
        hard = labels if labels.ndim == 1 else labels.argmax(1)
        metrics = {"train_accuracy": (logits.detach().argmax(1) == hard).float().mean()}
        if self.teacher and answers is not None:
            apart = self.teacher.loss(logits, answers)
            loss = (1 - self.teacher.weight) * loss + self.teacher.weight * apart
            metrics["distill_loss"] = apart.detach()
        return loss, metrics


def balanced_weights(labels: np.ndarray, classes: int) -> np.ndarray:
    """A weight for each class, inverse to its frequency, of mean 1 over the pictures; 0 for a class without any."""
    counts = np.bincount(labels, minlength=classes)
    present = counts > 0
    return np.where(present, len(labels) / (present.sum() * np.maximum(counts, 1)), 0.0).astype(np.float32)
