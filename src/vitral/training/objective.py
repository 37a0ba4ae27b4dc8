"""What a step minimises: a function of model and batch. Another objective is another function, never another loop."""

from __future__ import annotations

from collections.abc import Callable

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


def classification(
    preprocessing: Preprocessing,
    augmentation: Augmentation,
    classes: int,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
    *,
    size: Callable[[], tuple[int, int]] | None = None,
    teacher: Teacher | None = None,
) -> Objective:
    """Cross-entropy on augmented pictures. `train_accuracy` counts the heavier label where pictures are mixed.

    `size` says at which height and width the network sees the next batch. With a `teacher` the loss is (1 - w) times
    this plus w times the teacher's; it sees the same pictures, always whole.
    """

    def objective(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            with without_autocast(batch.images.device):  # in bf16 a rotation is off by up to 0.4 pixels of 128
                images = preprocessing.standardise(augmentation.pixels(batch.images))
                images, labels = augmentation.standardised(images, batch.labels, classes)
            answers = teacher(images) if teacher else None
            if size and (now := size()) != tuple(images.shape[2:]):
                images = F.interpolate(images, size=now, mode="bilinear", antialias=True)
        logits = model(images).float()
        loss = F.cross_entropy(logits, labels, weight=class_weights, label_smoothing=label_smoothing)
        hard = labels if labels.ndim == 1 else labels.argmax(1)
        metrics = {"train_accuracy": (logits.detach().argmax(1) == hard).float().mean()}
        if teacher and answers is not None:
            apart = teacher.loss(logits, answers)
            loss = (1 - teacher.weight) * loss + teacher.weight * apart
            metrics["distill_loss"] = apart.detach()
        return loss, metrics

    return objective


def balanced_weights(labels: np.ndarray, classes: int) -> np.ndarray:
    """A weight for each class, inverse to its frequency, of mean 1 over the pictures; 0 for a class without any."""
    counts = np.bincount(labels, minlength=classes)
    present = counts > 0
    return np.where(present, len(labels) / (present.sum() * np.maximum(counts, 1)), 0.0).astype(np.float32)
