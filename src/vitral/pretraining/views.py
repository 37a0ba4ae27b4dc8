"""Random views of images for the methods with a teacher: crops, mirroring, colors, blur, and solarization, for a whole
batch.

Each image of a batch gets its own random numbers. Images are floats (B, C, H, W) from 0 to 1 on any device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels import random

SMALL = 64
"""Largest side of images that are not blurred, and whose local crops keep more of them."""


@dataclass(frozen=True)
class View:
    """Ranges and probabilities of one kind of view."""

    size: tuple[int, int]
    area: tuple[float, float]
    """Smallest and largest share of the image in a crop."""
    blur: float = 0.0
    """Probability of a Gaussian blur."""
    solarize: float = 0.0
    mirror: bool = True

    def __call__(self, images: Tensor) -> Tensor:
        """One view of each image."""
        x = crop(images, self.size, self.area)
        if self.mirror:
            x = torch.where(_chance(x, 0.5), x.flip(-1), x)
        x = recolored(x)
        if self.blur:
            x = torch.where(_chance(x, self.blur), blurred(x), x)
        if self.solarize:
            x = torch.where(_chance(x, self.solarize) & (x >= 0.5), 1 - x, x)
        return x


def recolored(x: Tensor, jittered: float = 0.8, gray: float = 0.2) -> Tensor:
    """Jitter the colors of images with one probability, then take them away with another; gray images stay the same."""
    if x.shape[1] != 3:
        return x
    x = torch.where(_chance(x, jittered), jitter(x), x)
    return torch.where(_chance(x, gray), luminance(x).expand_as(x), x)


def _chance(x: Tensor, probability: float) -> Tensor:
    return _drawn(x).view(-1, 1, 1, 1) < probability


def _uniform(x: Tensor, low: float, high: float) -> Tensor:
    return _drawn(x, low, high).view(-1, 1, 1, 1)


def _drawn(x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Uniform numbers (B,), one for each image."""
    return random.kept(torch.empty(random.total(len(x)), device=x.device).uniform_(low, high))


def crop(images: Tensor, size: tuple[int, int], area: tuple[float, float]) -> Tensor:
    """Random crops with a share `area` of each image and an aspect from 3/4 to 4/3, resized bilinearly to `size`."""
    B = len(images)
    share = _drawn(images, *area)
    ratio = _drawn(images, math.log(3 / 4), math.log(4 / 3)).exp()
    width, height = (share * ratio).sqrt().clamp(max=1), (share / ratio).sqrt().clamp(max=1)
    left, top = ((2 * _drawn(images) - 1) * (1 - side) for side in (width, height))
    zero = torch.zeros_like(left)
    matrix = torch.stack([torch.stack([width, zero, left], 1), torch.stack([zero, height, top], 1)], 1)
    grid = F.affine_grid(matrix, [B, images.shape[1], *size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def luminance(x: Tensor) -> Tensor:
    """Gray values (B, 1, H, W) of color images, as ITU-R BT.601 weighs the channels."""
    return (x * x.new_tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)


def jitter(x: Tensor) -> Tensor:
    """Change brightness and contrast by up to 40%, saturation by up to 20% and hue by up to a tenth of the circle.

    Hue is a rotation of the chrominance plane (YIQ), which needs no conversion to HSV.
    """
    x = x * _uniform(x, 0.6, 1.4)
    mean = luminance(x).mean((2, 3), keepdim=True)
    x = mean + (x - mean) * _uniform(x, 0.6, 1.4)
    gray = luminance(x)
    chroma = (x - gray) * _uniform(x, 0.8, 1.2)
    angle = 2 * math.pi * _uniform(x, -0.1, 0.1)[:, 0, 0]
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turn = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], dim=-1).view(-1, 3, 3)
    matrix = _YIQ_TO_RGB.to(x) @ turn @ _RGB_TO_YIQ.to(x)
    return (gray + torch.einsum("bij,bjhw->bihw", matrix, chroma)).clamp(0, 1)


_RGB_TO_YIQ = torch.tensor([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])
_YIQ_TO_RGB = torch.linalg.inv(_RGB_TO_YIQ)  # once: on a GPU an inverse waits for it


def blurred(x: Tensor) -> Tensor:
    """Gaussian blur, with a deviation of 0.1 to 2 pixels for an image of 224, in proportion for others."""
    scale = max(x.shape[2:]) / 224
    sigma = _uniform(x, 0.1, 2.0)[:, :, 0] * scale  # (B, 1, 1)
    reach = max(1, math.ceil(4 * scale))
    steps = torch.arange(-reach, reach + 1, device=x.device, dtype=x.dtype)
    kernel = torch.exp(-(steps**2) / (2 * sigma[:, 0] ** 2))
    kernel = kernel / kernel.sum(1, keepdim=True)  # (B, taps)
    for axis in (2, 3):
        pad = (0, 0, reach, reach) if axis == 2 else (reach, reach, 0, 0)
        padded = F.pad(x, pad, mode="replicate")
        weights = kernel[:, :, None, None, None]
        x = sum(weights[:, tap] * padded.narrow(axis, tap, x.shape[axis]) for tap in range(2 * reach + 1))  # type: ignore[assignment]
    return x
