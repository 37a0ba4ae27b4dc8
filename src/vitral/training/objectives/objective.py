"""The protocol of an objective, and what objectives share: augmented inputs, and a rank's share of a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.device import without_autocast
from vitral.errors import UsageError, type_of
from vitral.kernels import random
from vitral.model.own import is_own, own_function

Objective = Callable[[nn.Module, Batch], tuple[Tensor, dict[str, Tensor]]]
"""(model, batch) → (loss, metrics): scalars; metrics are averaged over an epoch's images under their names. Of a batch
that ranks share, each rank returns its share of the mean: ranks' values add up.
"""


class TwoPartObjective(Protocol):
    """An objective in two parts: prepare a batch, then compute its loss."""

    def __call__(self, model: nn.Module, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return self.loss(model, *self.prepare(batch))

    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]: ...
    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


def augmented(
    batch: Batch, preprocessing: Preprocessing, augmentation: Augmentation, outputs: int
) -> tuple[Tensor, Tensor]:
    """Return augmented, standardized images (B, C, H, W) fp32, and the labels: mixed, if images were mixed."""
    # in bf16 a rotation is off by up to 0.4 pixels of 128
    with without_autocast(batch.images.device), random.drawing(batch.rows):
        images = preprocessing.standardize(augmentation.pixels(batch.images))
        return augmentation.standardized(images, batch.labels, outputs)


OwnLoss = Callable[[Tensor, Tensor], Tensor]
"""A loss of the user: the network's outputs (B, K) and the targets → a number, or one number per image."""


def own_loss(name: str, device: torch.device) -> OwnLoss | None:
    """Return the loss of the user that an option names, on the device; None for a loss of vitral."""
    if not is_own(name):
        return None
    function = own_function("loss", name)
    return function.to(device) if isinstance(function, nn.Module) else function


def mean_of_own(function: OwnLoss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute a loss of the user. Raises `UsageError` if it fails, or returns no tensor to differentiate."""
    shapes = f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}, {targets.dtype}"
    try:
        loss = function(outputs, targets)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        numbers = outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()
        hint = f"targets are class numbers; F.one_hot(targets, {outputs.shape[1]}).float() has a column per class"
        raise UsageError(f"your loss cannot compute {shapes}", why=why, hint=hint if numbers else None) from error
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        why = f"it returned {type_of(loss)}" if not isinstance(loss, Tensor) else "its tensor has no gradient"
        raise UsageError(f"your loss makes no loss of {shapes}", why=why)
    return loss.mean()


def share_of(mean: Tensor) -> Tensor:
    """A rank's share of a mean over the images of a batch, from the mean over its own."""
    rows = random.current()
    return mean if rows is None else mean * rows.share
