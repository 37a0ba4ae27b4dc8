"""Convolutional stem: a few 3×3 convolutions instead of one large patch (Xiao et al., arXiv 2106.14881).

    images (B, C, H, W) ─ [3×3 convolution ─ norm ─ GELU] × layers ─ features (B, C', H/s, W/s) ─ patches

A layer downsamples by the convolution's stride, or by s × s max pooling (`pool`), which sees every pixel and takes
longer.

Plain patches are cut independently, so a network has to learn from data how neighboring pixels relate. With few images
or little training time it does not; convolutions have that prior. Unlike in the ResNets of the hybrids, the norm is
batch normalization, which trains faster (docs/log/accuracy.md). In evaluation it is a scale and a shift a channel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ConvLayers = tuple[tuple[int, int], ...]
"""Channels and stride of each convolution, in order."""


class ConvLayer(nn.Module):
    """3×3 convolution, norm and GELU; residual if input and output have the same shape."""

    def __init__(self, channels: int, out: int, stride: int, pool: bool = False):
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, 1 if pool else stride, padding=1, bias=False)  # a norm follows
        self.norm = nn.BatchNorm2d(out)
        self.pool = stride if pool else 1
        self.residual = (channels, stride) == (out, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolved(x)
        if self.pool > 1:
            y = F.max_pool2d(y, self.pool)
        y = F.gelu(self.norm(y))
        return x + y if self.residual else y

    def convolved(self, x: Tensor) -> Tensor:
        """`self.conv(x)`. Images of one column get a wider border, whose outputs are dropped again (see `bordered`)."""
        if 1 not in x.shape[-2:]:
            y: Tensor = self.conv(x)
            return y
        border = self.conv.stride[0]
        return self.conv(F.pad(x, [border] * 4))[..., 1:-1, 1:-1]


class ConvStem(nn.Module):
    """Images (B, C, H, W) to features (B, C', H/s, W/s): C' channels of the last layer, s the product of strides.

    With `pool`, layers after the first use max pooling instead of a stride.
    """

    def __init__(self, channels: int, layers: Sequence[tuple[int, int]], pool: bool = False):
        super().__init__()
        widths = [channels, *(width for width, _ in layers)]
        self.layers = nn.ModuleList(
            ConvLayer(before, width, stride, pool and number > 0)
            for number, (before, (width, stride)) in enumerate(zip(widths, layers, strict=False))
        )

    def forward(self, images: Tensor, recompute: bool = False) -> Tensor:
        """Ignore `recompute`: recomputing a batch norm would update its running statistics twice."""
        x = images.contiguous(memory_format=torch.channels_last)  # the layout of tokens, and fastest for convolutions
        for layer in self.layers:
            x = layer(x)
        return x


@torch.no_grad()
def whiten(stem: ConvStem, images: Tensor) -> None:
    """Initialize the first layer by PCA whitening of 3×3 patches of standardized images (n, C, H, W).

    Kernels are the principal directions of the patches, largest variance first, scaled to unit variance, each with both
    signs (arXiv 2404.00498, section 3.1). Kernels beyond the number of directions keep their values.
    """
    layer: Any = stem.layers[0]
    weight = layer.conv.weight
    border = int(min(images.shape[-2:]) < 3)  # otherwise there would be no patch at all
    patches = F.unfold(images.float(), 3, padding=border).transpose(1, 2).flatten(0, 1)  # (n · positions, C · 9)
    covariance = patches.T @ patches / len(patches)
    variances, directions = torch.linalg.eigh(covariance.cpu())  # not implemented on Apple GPUs
    kernels = (directions / (variances.clamp_min(0) + _WHITENING_EPS).sqrt()).T.flip(0)
    half = kernels[: len(weight) // 2].reshape(-1, *weight.shape[1:]).to(weight)
    weight[: 2 * len(half)] = torch.cat([half, -half])


_WHITENING_EPS = 1e-2
"""Added to each variance, so that noise and compression artifacts are not amplified to unit variance."""


def conv_layers(dim: int, patch: int) -> ConvLayers:
    """Layers of a stem for `dim` channels and patches of 2ⁿ pixels: at least five.

    The last layer is as wide as a token, or twice as wide up to 256. Going backward, the width halves every two layers.
    The last layer has stride 1, so that tokens see their neighbors.
    """
    width = max(dim, min(2 * dim, 256))
    halvings = round(math.log2(patch))
    count = max(4, halvings)
    strides = [2 if (k + 1) * halvings // count > k * halvings // count else 1 for k in range(count)]
    return tuple((width >> (count - k) // 2, stride) for k, stride in enumerate([*strides, 1]))


def deep_layers(dim: int, patch: int) -> ConvLayers:
    """Layers of a max-pooling stem for small images: one at full size, two for each halving, and one more.

    The last layers are as wide as in `conv_layers`. The first halving is a quarter as wide, or two thirds for wide
    tokens, which are meant for a GPU. This stem costs several times the FLOPs of `conv_layers`, most near full size.
    """
    width = max(dim, min(2 * dim, 256))
    whole, halved = (width // 8, width // 4) if width <= 256 else (width // 6, 2 * width // 3)
    layers = [(whole, 1)]
    for number in range(round(math.log2(patch))):
        channels = width if number else halved
        layers += [(channels, 2), (channels, 1)]
    return (*layers, (width, 1))
