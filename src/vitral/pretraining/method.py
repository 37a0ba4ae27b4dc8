"""A method of pretraining: a network around the ViT that is kept, and its loss on images without labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.device import without_autocast
from vitral.kernels import random
from vitral.model import ViT
from vitral.training.objectives.objective import TwoPartObjective

Inputs = tuple[Tensor, Tensor, Tensor | None]
"""All that a method computes its loss from: images or views of them, and random numbers."""

Draw = Callable[[Tensor, Preprocessing], Inputs]
"""Augmented uint8 images (B, C, H, W) and the network's preprocessing → the inputs of a step. All random numbers of a
step but the network's own are drawn here."""


class Method(nn.Module):
    """The network that is trained. Parameters of the ViT have the prefix `encoder.`; the loss is `forward`."""

    encoder: ViT
    may_leave_unused = True
    """Some parameters may have no gradient in some steps, or in all."""

    @property
    def kept(self) -> ViT:
        """The network to measure, to save and to use."""
        return self.encoder

    @property
    def checkpointing(self) -> bool:
        """As in `ViT`."""
        return self.encoder.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.encoder.checkpointing = on

    def follow(self) -> None:
        """Called after each optimizer step: a method with a teacher updates it."""


def kept(model: nn.Module) -> Any:
    """The network in `model` that is measured and saved: `model` itself unless it is a method."""
    return model.kept if isinstance(model, Method) else model


class Following:
    """Let a method follow each optimizer step, in the place of averaged weights (`vitral.training.loop.State`).

    All that it changes are tensors of the method, which are saved with it.
    """

    def __init__(self, method: Method):
        self.module = method

    def update_parameters(self, model: nn.Module) -> None:
        """Called after each optimizer step."""
        self.module.follow()

    def state_dict(self) -> dict[str, Tensor]:
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Do nothing: there is no state."""


@dataclass(frozen=True, eq=False)
class Unlabeled(TwoPartObjective):
    """The objective of pretraining: labels are not read. In two parts, as `training.objectives.objective` describes."""

    preprocessing: Preprocessing
    augmentation: Augmentation
    draw: Draw

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Inputs:
        """Augment the images of a batch, and draw the random numbers of the method."""
        with without_autocast(batch.images.device), random.drawing(batch.rows):
            return self.draw(self.augmentation.pixels(batch.images), self.preprocessing)

    def loss(
        self, model: nn.Module, images: Tensor, second: Tensor, third: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics for the result of `prepare`."""
        loss, metrics = model(images, second, third)
        return loss, metrics
