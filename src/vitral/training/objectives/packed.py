"""Training on images of their own sizes (NaViT): any task's objective, on packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.augmentation import Augmentation, random_erase
from vitral.data.images.canvas import from_canvases
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.device import without_autocast
from vitral.distributed.strategies import through
from vitral.kernels import random
from vitral.model.packing import packed_logits
from vitral.training.objectives.objective import TwoPartObjective


@dataclass(frozen=True, eq=False)
class Packed(TwoPartObjective):
    """The loss of `objective` on the logits of packed images, each augmented, and reduced to a size of its own."""

    objective: TwoPartObjective
    preprocessing: Preprocessing
    augmentation: Augmentation
    least: int | None = None
    """Longest side, in pixels, from which the size of an image is drawn up to its own; None keeps its own."""
    drop: Callable[[], float] = lambda: 0.0
    """Share of the patches of each image that is dropped in the next batch."""

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Any, Tensor, None]:
        """Return augmented, standardized images (C, h, w) fp32, in a list, and their labels (B,)."""
        with without_autocast(batch.images.device):
            images = random.each(from_canvases(batch.images), self._image)
            return images, batch.labels, None

    def _image(self, pixels: Tensor) -> Tensor:
        image = self.preprocessing.standardized(self.augmentation.pixels(pixels[None]))
        if self.least is not None and (size := self._drawn(pixels, self.least)) != tuple(pixels.shape[1:]):
            image = F.interpolate(image, size=size, mode="bilinear", antialias=True)
        return random_erase(image, self.augmentation.erase)[0] if self.augmentation.erase else image[0]

    def _drawn(self, pixels: Tensor, least: int) -> tuple[int, int]:
        height, width = pixels.shape[1:]
        longest = max(height, width)
        side = min(least, longest) + round(float(torch.rand(())) * (longest - min(least, longest)))
        return self.preprocessing.own_size(height, width, (side, side))

    def loss(
        self, model: nn.Module, images: Any, labels: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics for the result of `prepare`."""

        def logits(images: Any) -> Tensor:
            drop = self.drop() if model.training else 0.0
            return through(model, lambda network: packed_logits(network, images, drop=drop))

        return self.objective.loss(logits, images, labels, teacher_logits)  # type: ignore[arg-type]  # it only calls it
