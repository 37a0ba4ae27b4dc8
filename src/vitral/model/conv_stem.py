"""A convolutional stem: a few 3×3 convolutions in the place of one large patch (Xiao et al., arXiv 2106.14881).

    images (B, C, H, W) ─ [3×3 convolution ─ norm ─ GELU] × layers ─ features (B, C', H/s, W/s) ─ patches

A layer makes its features smaller by the convolution's stride, or by the greatest of each s × s (`pool`), which sees
every pixel and takes more time.

The paper's patches are cut without a look at their neighbours, and a network has to learn from pictures alone what
pixels side by side have to do with each other. Where there are few of them, or little time, that is what it lacks.
Unlike in the ResNets of the hybrids the norm is over the batch, which learns faster (docs/log.md); once trained it is a
factor and a shift for each channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.model.resnet import bordered

ConvLayers = tuple[tuple[int, int], ...]
"""Channels and stride of each convolution, in order."""


class Conv3x3(nn.Conv2d):
    """A 3×3 convolution, without a bias: a norm follows."""

    def __init__(self, channels: int, out: int, stride: int):
        super().__init__(channels, out, 3, stride, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x, padding = bordered(x, 3)
        return F.conv2d(x, self.weight, None, self.stride, padding)


class ConvLayer(nn.Module):
    """A 3×3 convolution with its norm and GELU; where nothing changes shape, added to what comes in."""

    def __init__(self, channels: int, out: int, stride: int, pool: bool = False):
        super().__init__()
        self.conv = Conv3x3(channels, out, 1 if pool else stride)
        self.norm = nn.BatchNorm2d(out)
        self.pool = stride if pool else 1
        self.residual = (channels, stride) == (out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.pool > 1:
            y = F.max_pool2d(y, self.pool)
        y = F.gelu(self.norm(y))
        return x + y if self.residual else y


class ConvStem(nn.Module):
    """Images (B, C, H, W) to features (B, C', H/s, W/s): C' the last layer's channels, s the product of strides.

    With `pool`, layers after the first take the greatest of s × s instead of a stride.
    """

    def __init__(self, channels: int, layers: Sequence[tuple[int, int]], pool: bool = False):
        super().__init__()
        widths = [channels, *(width for width, _ in layers)]
        self.layers = nn.ModuleList(
            ConvLayer(before, width, stride, pool and number > 0)
            for number, (before, (width, stride)) in enumerate(zip(widths, layers, strict=False))
        )

    def forward(self, images: Tensor, recompute: bool = False) -> Tensor:
        """`recompute` changes nothing: a norm that is computed again would count the batch twice."""
        x = images.contiguous(memory_format=torch.channels_last)  # as tokens lie, and as convolutions are fastest
        for layer in self.layers:
            x = layer(x)
        return x


@torch.no_grad()
def whiten(stem: ConvStem, images: Tensor) -> None:
    """Make the first layer's kernels the directions in which patches of these images (n, C, H, W), standardised, vary,
    those first in which they vary most: scaled to equal variance, uncorrelated, each also with the other sign (arXiv
    2404.00498, section 3.1). Kernels for which there is no direction left stay as they are.
    """
    layer: Any = stem.layers[0]
    weight = layer.conv.weight
    border = int(min(images.shape[-2:]) < 3)  # else there would be no patch at all
    patches = F.unfold(images.float(), 3, padding=border).transpose(1, 2).flatten(0, 1)  # (n · places, C · 9)
    covariance = patches.T @ patches / len(patches)
    variances, directions = torch.linalg.eigh(covariance.cpu())  # Apple GPUs have no such function
    kernels = (directions / (variances.clamp_min(0) + _LEAST_VARIANCE).sqrt()).T.flip(0)
    half = kernels[: len(weight) // 2].reshape(-1, *weight.shape[1:]).to(weight)
    weight[: 2 * len(half)] = torch.cat([half, -half])


_LEAST_VARIANCE = 1e-2
"""Added to each, lest what is hardly there, noise and traces of compression, becomes as loud as the rest."""


def conv_layers(dim: int, patch: int) -> ConvLayers:
    """The stem for tokens of `dim` channels and patches of 2ⁿ pixels: five layers or more. The last two are as wide as
    a token, or twice as wide up to 256, each two before half as wide as what follows them; the last lets tokens see
    their neighbours.
    """
    width = max(dim, min(2 * dim, 256))
    halvings = round(math.log2(patch))
    count = max(4, halvings)
    strides = [2 if (k + 1) * halvings // count > k * halvings // count else 1 for k in range(count)]
    return tuple((width >> (count - k) // 2, stride) for k, stride in enumerate([*strides, 1]))


def deep_layers(dim: int, patch: int) -> ConvLayers:
    """The stem of maxima for small pictures: a layer at full size, two for each halving, and one more. The last ones
    are as wide as those of `conv_layers`; the first halving is a quarter as wide, or, for tokens that
    are wide themselves and meant for a GPU, two thirds.

    It computes several times as much as those for the same picture, most of it near full size.
    """
    width = max(dim, min(2 * dim, 256))
    whole, halved = (width // 8, width // 4) if width <= 256 else (width // 6, 2 * width // 3)
    layers = [(whole, 1)]
    for number in range(round(math.log2(patch))):
        channels = width if number else halved
        layers += [(channels, 2), (channels, 1)]
    return (*layers, (width, 1))
