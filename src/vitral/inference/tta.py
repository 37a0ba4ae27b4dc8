"""Test-time augmentation (TTA): average the predictions over several views of an image.

    tta = averaged(network, "mirror")       # the image and its mirror image
    logits = tta(images)

Nothing is trained, and each view costs as much as an image. Any module from images to logits can be averaged: a
network, or its packed, quantized or compiled form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import unknown

Views = Literal["none", "mirror", "shifts", "both"]
"""`mirror`: the image and its mirror image. `shifts`: the image, and the image shifted by 1/32 of its sides to the
upper left and to the lower right. `both`: these three and their mirror images."""

COUNTS: dict[Views, int] = {"none": 1, "mirror": 2, "shifts": 3, "both": 6}
"""Number of views of each."""


def averaged(network: nn.Module, views: Views, temperature: float = 1.0) -> nn.Module:
    """A network that predicts the mean probabilities over views; for "none" the network itself.

    `UsageError` for unknown views.
    """
    if views not in get_args(Views):
        raise unknown("--tta", views, get_args(Views), elsewhere={"flip": "mirror", "hflip": "mirror", "all": "both"})
    return network if views == "none" else Averaged(network, views, temperature)


class Averaged(nn.Module):
    """Standardized images (B, C, H, W) to logits (B, K) whose softmax at the temperature is the mean over views.

    The temperature divides the logits of each view, because it was fitted to those of one view. The logarithm of a mean
    of probabilities is not such logits.
    """

    def __init__(self, network: nn.Module, views: Views, temperature: float = 1.0):
        super().__init__()
        self.network, self.views, self.temperature = network, views, temperature
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) fp32."""
        logits = [self.network(view).float() / self.temperature for view in views_of(images, self.views)]
        mean = torch.stack([one.softmax(-1) for one in logits]).mean(0)
        return mean.clamp_min(torch.finfo(torch.float32).tiny).log() * self.temperature


def views_of(images: Tensor, views: Views) -> Iterator[Tensor]:
    """Views of images (B, C, H, W), the images themselves first."""
    for shifted in [images, *_shifted(images)] if views in ("shifts", "both") else [images]:
        yield shifted
        if views in ("mirror", "both"):
            yield shifted.flip(-1)


def _shifted(images: Tensor) -> list[Tensor]:
    """Images shifted to the upper left and to the lower right, padded by reflection."""
    H, W = images.shape[-2:]
    down, across = (max(1, round(side / 32)) for side in (H, W))
    padded = F.pad(images, (across, across, down, down), mode="reflect")
    return [padded[..., :H, :W], padded[..., 2 * down :, 2 * across :]]
