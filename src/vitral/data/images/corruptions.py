"""Corruptions of images in five strengths, made here: noise, blur, weather, compression, light, and geometry.

They are of the kinds of Hendrycks & Dietterich 2019, "Benchmarking Neural Network Robustness to Common Corruptions and
Perturbations", but with other definitions, so that figures cannot be compared with ImageNet-C's. An image is corrupted
at the size of the network, after preprocessing; sizes of blurs and shifts are shares of its side. Each corruption is a
function of the image, its number and the strength.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.device import derive_seed

STRENGTHS = (1, 2, 3, 4, 5)

Corruption = Callable[[Tensor, int, torch.Generator], Tensor]
"""(image (C, H, W) fp32 from 0 to 1, strength from 1 to 5, generator) → such an image; values outside are clipped."""


def corrupted(images: Tensor, name: str, strength: int, numbers: np.ndarray) -> Tensor:
    """Corrupt images (B, C, H, W) uint8 on the CPU; `numbers` (B,) identify them, and seed what is random."""
    made = []
    for image, number in zip(images, numbers.tolist(), strict=True):
        generator = torch.Generator().manual_seed(derive_seed(list(CORRUPTIONS).index(name), strength, number))
        found = CORRUPTIONS[name](image.float() / 255, strength, generator)
        made.append((found.clamp(0, 1) * 255).round().to(torch.uint8))
    return torch.stack(made)


def _gaussian_noise(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    return image + (0.04, 0.06, 0.09, 0.13, 0.18)[strength - 1] * torch.randn(image.shape, generator=generator)


def _shot_noise(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    photons = (250, 100, 50, 30, 15)[strength - 1]
    return torch.poisson(image * photons, generator=generator) / photons


def _impulse_noise(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    share = (0.01, 0.03, 0.06, 0.1, 0.17)[strength - 1]
    chance = torch.rand(image.shape, generator=generator)
    return torch.where(chance < share / 2, 0.0, torch.where(chance < share, 1.0, image))


def _blur(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    sigma = (0.010, 0.015, 0.020, 0.026, 0.034)[strength - 1] * min(image.shape[-2:])
    reach = max(1, math.ceil(3 * sigma))
    bell = torch.exp(-torch.arange(-reach, reach + 1).float().square() / (2 * sigma**2))
    bell = bell / bell.sum()
    return _filtered(_filtered(image, bell[None, :]), bell[:, None])


def _motion_blur(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    length = 1 + (0.03, 0.05, 0.075, 0.11, 0.16)[strength - 1] * image.shape[-1]
    reach = math.ceil(length / 2)
    covered = (length / 2 + 0.5 - torch.arange(-reach, reach + 1).abs()).clamp(0, 1)  # the ends in part
    return _filtered(image, (covered / covered.sum())[None, :])


def _pixelate(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    size = [max(1, round(side * (0.7, 0.55, 0.45, 0.35, 0.25)[strength - 1])) for side in image.shape[-2:]]
    small = F.interpolate(image[None], size, mode="area")
    return F.interpolate(small, image.shape[-2:], mode="nearest")[0]


def _jpeg(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    pixels = (image.permute(1, 2, 0) * 255).round().to(torch.uint8).numpy()
    file = io.BytesIO()
    whole = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    whole.save(file, "JPEG", quality=(40, 25, 18, 12, 7)[strength - 1])
    with Image.open(file) as read:
        again = torch.from_numpy(np.array(read)).float() / 255
    return again[None] if again.ndim == 2 else again.permute(2, 0, 1)


def _bright(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    return image + (0.1, 0.2, 0.3, 0.4, 0.5)[strength - 1]


def _dark(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    return image * (0.75, 0.55, 0.4, 0.28, 0.18)[strength - 1]


def _low_contrast(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    mean = image.mean((1, 2), keepdim=True)
    return mean + (image - mean) * (0.6, 0.45, 0.32, 0.22, 0.14)[strength - 1]


def _fog(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    """Blend with clouds: noise of all scales, the coarse ones strongest."""
    height, width = image.shape[-2:]
    clouds = torch.zeros(1, 1, height, width)
    for level in range(1, 5):
        noise = torch.rand(1, 1, 2**level, 2**level, generator=generator)
        clouds += F.interpolate(noise, (height, width), mode="bilinear", align_corners=True) / 2**level
    density = (0.25, 0.38, 0.5, 0.6, 0.7)[strength - 1]
    return image * (1 - density) + density * (0.4 + 0.6 * clouds[0] / clouds.max())


def _snow(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    """Add white flakes, stretched downward, and lighten the image."""
    share = (0.01, 0.02, 0.03, 0.045, 0.06)[strength - 1]
    flakes = (torch.rand(1, *image.shape[-2:], generator=generator) < share).float()
    length = max(2, round(0.06 * image.shape[-2]))
    fallen = _filtered(flakes, torch.full((length, 1), 1.0)).clamp(max=1)
    return torch.maximum(image * 0.85 + 0.1, 0.95 * fallen)


def _rotated(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    angle = math.radians((5, 10, 20, 30, 45)[strength - 1]) * (1 if torch.rand((), generator=generator) < 0.5 else -1)
    matrix = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = F.affine_grid(matrix[None], [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid, padding_mode="reflection", align_corners=False)[0]


def _shifted(image: Tensor, strength: int, generator: torch.Generator) -> Tensor:
    angle = 2 * math.pi * float(torch.rand((), generator=generator))
    share = (0.04, 0.08, 0.12, 0.18, 0.25)[strength - 1]
    moved = [share * math.cos(angle), share * math.sin(angle)]
    matrix = torch.tensor([[1.0, 0.0, 2 * moved[0]], [0.0, 1.0, 2 * moved[1]]])
    grid = F.affine_grid(matrix[None], [1, *image.shape], align_corners=False)
    return F.grid_sample(image[None], grid, padding_mode="border", align_corners=False)[0]


def _filtered(image: Tensor, kernel: Tensor) -> Tensor:
    """Correlate each channel with a kernel (h, w); borders are repeated."""
    height, width = kernel.shape
    pad = ((width - 1) // 2, width // 2, (height - 1) // 2, height // 2)
    padded = F.pad(image[None], pad, mode="replicate")[0]
    return F.conv2d(padded[:, None], kernel[None, None])[:, 0]


CORRUPTIONS: Mapping[str, Corruption] = {
    "gaussian noise": _gaussian_noise,
    "shot noise": _shot_noise,
    "impulse noise": _impulse_noise,
    "blur": _blur,
    "motion blur": _motion_blur,
    "pixelate": _pixelate,
    "jpeg": _jpeg,
    "bright": _bright,
    "dark": _dark,
    "low contrast": _low_contrast,
    "fog": _fog,
    "snow": _snow,
    "rotated": _rotated,
    "shifted": _shifted,
}
"""Name → function. New ones are appended: the position seeds what is random."""
