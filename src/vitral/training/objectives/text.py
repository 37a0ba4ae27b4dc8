"""One text an image: cross-entropy of each token given the image and the tokens before it (teacher forcing)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.training.objectives.objective import TwoPartObjective, augmented, share_of


@dataclass(frozen=True, eq=False)
class ReadingText(TwoPartObjective):
    """Mean over the images of the mean cross-entropy of their tokens, the end among them.

    `train_characters` is the share of tokens that are the likeliest ones, given the right ones before them.
    """

    preprocessing: Preprocessing
    augmentation: Augmentation
    start: int
    padding: int
    label_smoothing: float = 0.0

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Tensor, Tensor, None]:
        """Return augmented, standardized images (B, C, H, W) fp32, and tokens (B, length)."""
        images, tokens = augmented(batch, self.preprocessing, self.augmentation, 0)
        return images, tokens, None

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, teacher_logits: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics for the result of `prepare`. The network sees each text from its start, shifted by one."""
        before = F.pad(labels[:, :-1], (1, 0), value=self.start)
        logits = model(images, before).float()
        counts = labels != self.padding
        losses = F.cross_entropy(
            logits.transpose(1, 2),
            labels,
            ignore_index=self.padding,
            label_smoothing=self.label_smoothing,
            reduction="none",
        )
        right = (logits.detach().argmax(2) == labels) & counts
        lengths = counts.sum(1)
        loss, rate = (losses.sum(1) / lengths).mean(), (right.sum(1) / lengths).mean()
        return share_of(loss), {"train_characters": share_of(rate)}
