"""Distillation: learn the features of another network, of any kind, on images without labels.

A linear layer predicts the teacher's features from the features of the network. They are compared at mean 0 and
deviation 1 in each dimension (as in "Theia", arXiv 2407.20179), by the smooth L1 distance. If the teacher is a
classifier, its head also makes logits of both, which are compared as in arXiv 1503.02531 (a reused head: "SimKD", arXiv
2203.14001).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch
from vitral.data.pixel_cache import Entry
from vitral.device import Machine, seeded, without_autocast
from vitral.errors import UsageError
from vitral.inference.features import head_inputs
from vitral.model import Network, ViT, ViTConfig
from vitral.pretraining.method import Draw, Inputs, Method, Unlabeled
from vitral.pretraining.views import recolored
from vitral.training.distillation import at_size
from vitral.training.objectives.objective import share_of
from vitral.training.options import Run
from vitral.weights import native
from vitral.weights.native import Weights

LEAST_DEVIATION = 0.01
"""Least deviation of a feature that it is divided by, as a fraction of the mean one: some features hardly vary."""


class Head(NamedTuple):
    """The teacher's last layer."""

    weight: Tensor
    """(K, D)"""
    bias: Tensor | None


@dataclass(frozen=True, eq=False)
class FeatureTeacher:
    """A trained network in evaluation mode, used only for its features."""

    network: Network
    preprocessing: Preprocessing
    machine: Machine

    @classmethod
    def of(cls, weights: Weights, machine: Machine, source: str) -> FeatureTeacher:
        """Build a teacher. Raises `UsageError` for a network without features of an image of one size."""
        if weights.preprocessing.native:
            why = "it takes images of their own sizes, packed into sequences (--pack)"
            raise UsageError(
                "this teacher has no features of a crop", where=source, why=why, hint="choose another --teacher"
            )
        with seeded(0):  # some libraries draw random weights first
            network = native.build(weights).requires_grad_(False).to(machine.device)
        return cls(network, weights.preprocessing, machine)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Features (B, D) fp32 of uint8 crops (B, C, H, W), which are resized to the teacher's own size."""
        with without_autocast(pixels.device):
            images = at_size(pixels.float(), self.preprocessing).clamp(0, 255)
            return head_inputs(self.network, images, self.preprocessing, self.machine).clone()

    @property
    def head(self) -> Head | None:
        """The dense layer that makes logits of the features; None if there is none."""
        head = getattr(self.network, "head", None)
        return Head(head.weight, head.bias) if isinstance(head, nn.Linear) else None

    def width(self) -> int:
        """Number of features. Raises `UsageError` if they are not one vector for an image."""
        channels, size = self.preprocessing.channels, self.preprocessing.image_size
        found = self(torch.zeros(1, channels, *size, dtype=torch.uint8, device=self.machine.device))
        if found.ndim != 2:
            why = f"the input of its head is {tuple(found.shape)} for one image"
            raise UsageError("this teacher has no feature vector of an image", why=why, hint="choose another --teacher")
        return found.shape[1]


class FeatureDistillation(Method):
    """The network, and a linear layer that predicts the teacher's features."""

    mean: Tensor
    deviation: Tensor

    def __init__(
        self, encoder: ViT, width: int, head: Head | None = None, *, weight: float = 0.0, temperature: float = 1.0
    ):
        """`width`: features of the teacher. `weight` is the fraction of the loss for the logits of its `head`."""
        super().__init__()
        self.encoder = encoder
        self.project = nn.Linear(encoder.config.features, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))
        self.head = head if weight else None
        self.weight, self.temperature = weight, temperature

    @classmethod
    def of(cls, encoder: ViT, run: Run, steps: int, teacher: FeatureTeacher) -> FeatureDistillation:
        """The method as a run describes it."""
        width, weight = teacher.width(), run.distill_weight
        return cls(encoder, width, teacher.head, weight=weight, temperature=run.distill_temperature)

    @staticmethod
    def draw(run: Run, config: ViTConfig) -> Draw:
        """Standardized images in other colors. The teacher's features are no part of the drawing."""

        def draw(pixels: Tensor, preprocessing: Preprocessing) -> Inputs:
            images = recolored(pixels.float() / 255)
            return preprocessing.standardize(images * 255), images[:0], None

        return draw

    def measure(self, features: Tensor) -> None:
        """Take mean and deviation of each dimension from the teacher's features (n, D) of some images."""
        deviation = features.std(0, correction=0)
        self.mean.copy_(features.mean(0))
        self.deviation.copy_(deviation.clamp(min=LEAST_DEVIATION * float(deviation.mean()) + 1e-12))

    def forward(self, images: Tensor, features: Tensor, _: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of standardized images (B, C, H, W), of which the teacher has these features (B, D)."""
        predicted = self.project(self.encoder(images)).float()
        wanted = (features - self.mean) / self.deviation
        loss = share_of(F.smooth_l1_loss(predicted, wanted))
        metrics = {"feature_loss": loss.detach()}
        if self.head is None:
            return loss, metrics
        with without_autocast(images.device):
            logit_loss = share_of(self._logit_loss(predicted * self.deviation + self.mean, features))
        loss = (1 - self.weight) * loss + self.weight * logit_loss
        return loss, {**metrics, "logit_loss": logit_loss.detach()}

    def _logit_loss(self, predicted: Tensor, features: Tensor) -> Tensor:
        """T² KL of the logits that the teacher's head makes of its own and of the predicted features (B, D)."""
        assert self.head is not None
        T, (weight, bias) = self.temperature, self.head
        student, teacher = (F.log_softmax(F.linear(x, weight, bias) / T, dim=1) for x in (predicted, features))
        return F.kl_div(student, teacher, reduction="batchmean", log_target=True) * T**2


@dataclass(frozen=True, eq=False)
class Taught(Unlabeled):
    """The objective of distillation: the teacher sees the crops of a batch before they are mirrored and recolored."""

    features: Callable[[Batch], Tensor]
    """Features (B, D) of the crops of a batch: computed now, or kept."""

    @torch.no_grad()
    def prepare(self, batch: Batch) -> Inputs:
        """Augment the images of a batch, and find their features."""
        images, _, _ = super().prepare(batch)
        return images, self.features(batch), None


@dataclass(frozen=True, eq=False)
class KeptFeatures:
    """Features of each view of each image, on disk in fp16."""

    views: Sequence[Entry]
    """A row of 2 D bytes for each image, in the order of the split."""

    def __call__(self, batch: Batch) -> Tensor:
        """Features (B, D) fp32 of the crops of a batch."""
        rows = self.views[batch.view].gather(batch.indices)
        return rows.flatten(1).view(torch.float16).float().to(batch.images.device)


def blank_features(model: nn.Module) -> Callable[[Batch], Tensor]:
    """Return features for trial steps: as many as the method in `model` learns, all zero."""
    assert isinstance(model, FeatureDistillation)
    return lambda batch: model.mean.new_zeros(len(batch.indices), len(model.mean))


def as_rows(features: Tensor) -> Tensor:
    """Features (B, D) as bytes to keep, uint8 (B, 1, 1, 2 D)."""
    kept = features.clamp(-_LARGEST, _LARGEST).half().contiguous()
    return kept.view(torch.uint8)[:, None, None].cpu()


_LARGEST = torch.finfo(torch.float16).max
