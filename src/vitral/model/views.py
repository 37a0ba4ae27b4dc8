"""Averaging at inference (test-time augmentation): several views of a picture, one answer.

    surer = averaged(network, "mirror")       # the picture and its mirror image
    logits = surer(images)

Nothing is trained, and each view takes the time of a picture. Whatever gives logits for images can be averaged: a
network, or what it was packed, quantized or compiled to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import unknown

Views = Literal["none", "mirror", "shifts", "both"]
"""`mirror`: the picture and its mirror image. `shifts`: the picture as it is and moved by 1/32 of the sides to the
upper left and to the lower right. `both`: these three and their mirror images."""

COUNTS: dict[Views, int] = {"none": 1, "mirror": 2, "shifts": 3, "both": 6}
"""How many views of a picture each of them computes."""


def averaged(network: nn.Module, views: Views) -> nn.Module:
    """A network that answers by the mean probability over views; for "none" the network itself.

    `UsageError` for views that are not known.
    """
    if views not in get_args(Views):
        raise unknown("--tta", views, get_args(Views), elsewhere={"flip": "mirror", "hflip": "mirror", "all": "both"})
    return network if views == "none" else Averaged(network, views)


class Averaged(nn.Module):
    """What `averaged` makes: standardised images (B, C, H, W) in, the logarithm of mean probabilities (B, K) out, which
    softmax turns into them.
    """

    def __init__(self, network: nn.Module, views: Views):
        super().__init__()
        self.network, self.views = network, views
        self.train(network.training)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K) fp32."""
        shares = [self.network(view).float().softmax(-1) for view in views_of(images, self.views)]
        return torch.stack(shares).mean(0).clamp_min(torch.finfo(torch.float32).tiny).log()


def views_of(images: Tensor, views: Views) -> Iterator[Tensor]:
    """The views of images (B, C, H, W), the images themselves first."""
    for moved in [images, *_moved(images)] if views in ("shifts", "both") else [images]:
        yield moved
        if views in ("mirror", "both"):
            yield moved.flip(-1)


def _moved(images: Tensor) -> list[Tensor]:
    """The images a little to the upper left and to the lower right; what comes in is their mirror image."""
    H, W = images.shape[-2:]
    down, across = (max(1, round(side / 32)) for side in (H, W))
    padded = F.pad(images, (across, across, down, down), mode="reflect")
    return [padded[..., :H, :W], padded[..., 2 * down :, 2 * across :]]
