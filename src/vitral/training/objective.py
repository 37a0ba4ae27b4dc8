"""What a step minimises: a function of model and batch. Another objective is another function, never another loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.loader import Batch
from vitral.data.transforms import Augmentation, Preprocessing

Objective = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]
"""(model, batch) → (loss, metrics): scalars; metrics are averaged over an epoch's pictures under their names."""


def classification(
    preprocessing: Preprocessing,
    augmentation: Augmentation,
    classes: int,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> Objective:
    """Cross-entropy on augmented pictures. `train_accuracy` counts the heavier label where pictures are mixed."""

    def objective(model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.no_grad():
            images = preprocessing.standardise(augmentation.pixels(batch.images))
            images, labels = augmentation.standardised(images, batch.labels, classes)
        logits = model(images).float()
        loss = F.cross_entropy(logits, labels, weight=class_weights, label_smoothing=label_smoothing)
        hard = labels if labels.ndim == 1 else labels.argmax(1)
        return loss, {"train_accuracy": (logits.detach().argmax(1) == hard).float().mean()}

    return objective


def balanced_weights(labels: np.ndarray, classes: int) -> np.ndarray:
    """A weight for each class, inverse to its frequency, of mean 1 over the pictures; 0 for a class without any."""
    counts = np.bincount(labels, minlength=classes)
    present = counts > 0
    return np.where(present, len(labels) / (present.sum() * np.maximum(counts, 1)), 0.0).astype(np.float32)
