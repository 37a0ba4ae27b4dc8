"""Numbers an image: squared or Huber's error of standardized targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.training.objectives.objective import OwnLoss, TwoPartObjective, augmented, mean_of_own, share_of

Kind = Literal["mse", "huber"]
"""Squared error, or Huber's (1964), which is linear beyond one deviation."""


@dataclass(frozen=True, eq=False)
class NumberError(TwoPartObjective):
    """Error of the numbers, standardized by the mean and the deviation of the training images, on augmented images."""

    preprocessing: Preprocessing
    augmentation: Augmentation
    mean: Tensor
    """(T,) float64 on the device (fp32 where it has no float64)."""
    deviation: Tensor
    kind: Kind = "mse"
    own: OwnLoss | None = None
    """A loss of the user instead, of standardized numbers (B, T)."""

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return augmented, standardized images (B, C, H, W) fp32, and standardized numbers (B, T) fp32."""
        images, numbers = augmented(batch, self.preprocessing, self.augmentation, len(self.mean))
        standardized = ((numbers - self.mean) / self.deviation).float()
        return images, standardized, None

    def loss(
        self, model: nn.Module, images: Tensor, numbers: Tensor, _: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss for the result of `prepare`; validation has the metrics."""
        predicted = model(images).float()
        if self.own is not None:
            return share_of(mean_of_own(self.own, predicted, numbers)), {}
        error = F.mse_loss if self.kind == "mse" else F.huber_loss
        return share_of(error(predicted, numbers)), {}
