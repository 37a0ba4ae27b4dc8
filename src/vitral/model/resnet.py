"""ResNets of the authors: the stem of hybrids, and BiT.

    hybrid   images (B, C, H, W) ─ root, stride 4 ─ stages, post-activation ─ features (B, C', H/s, W/s) ─ patches
    BiT      images (B, C, H, W) ─ root, stride 4 ─ stages, pre-activation ─ norm, ReLU ─ mean ─ head ─ logits (B, K)

Both use weight standardization and group normalization, so that images of a batch stay independent. They differ in the
position of the activation and in padding. The hybrid's padding is SAME, with the odd pixel after the image. BiT's is
symmetric. Module names are as in most published weights.

Sources: vit_jax `models_resnet.py`; big_transfer and big_vision `models/bit_paper.py` (arXiv 1912.11370).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitral.errors import UsageError
from vitral.kinds import named_fields
from vitral.model.config_base import ConfigBase, pair
from vitral.model.heads import reset_head

ROOT = 64
"""Channels of the root and of the first stage's bottlenecks at width 1."""


class Numerics(NamedTuple):
    """Epsilons and padding in which implementations of one network differ; each source of weights needs its own."""

    spread: Literal["std", "variance"]  # where `standard_eps` goes: w / (std + ε), or w / √(variance + ε)
    standard_eps: float
    norm_eps: float
    pool_border: float = 0.0  # padding value of the max pooling in BiT's root


HybridNumerics = Literal["authors", "timm"]
HYBRID_NUMERICS: dict[str, Numerics] = {
    "authors": Numerics("std", 1e-5, 1e-6),  # vit_jax; the norm's ε is Flax's default
    "timm": Numerics("variance", 1e-8, 1e-5),
}
BiTNumerics = Literal["authors", "big_vision", "timm"]
BIT_NUMERICS: dict[str, Numerics] = {
    "authors": Numerics("variance", 1e-10, 1e-5),
    "big_vision": Numerics("variance", 1e-10, 1e-5, pool_border=-torch.inf),
    "timm": Numerics("variance", 1e-8, 1e-5),
}


@named_fields
@dataclass(frozen=True)
class BiTConfig(ConfigBase):
    """Shape and arithmetic of a BiT ResNet. Defaults: BiT-R50x1.

    Args:
        image_size: Height and width of the images in pixels; an integer is a square. The network accepts other sizes.
        channels: Channels of the images.
        classes: Outputs of the head; 0 leaves the head out.
        layers: Bottlenecks of each stage.
        width: Factor on all channels.
        head_bias_init: Initial bias of the head.
        numerics: A name in `BIT_NUMERICS`: epsilons and padding of the authors or of another library.

    Example:
        config = vitral.BiTConfig(classes=10, layers=(1, 1, 1, 1))
        model = vitral.BiT(config)
    """

    image_size: int | tuple[int, int] = 224
    channels: int = 3
    classes: int = 1000

    layers: tuple[int, ...] = (3, 4, 6, 3)
    width: int = 1

    head_bias_init: float = 0.0
    numerics: BiTNumerics = "authors"

    def __post_init__(self) -> None:
        object.__setattr__(self, "image_size", pair(self.image_size))
        self.check_kinds()
        self._check_bounds()
        sizes = {"image_size": min(self.image), "channels": self.channels, "width": self.width}
        sizes["layers"] = min(self.layers, default=0)
        if bad := [f"{name}={getattr(self, name)}" for name, size in sizes.items() if size < 1]:
            raise UsageError(f"sizes must be positive: {', '.join(bad)}")
        if self.classes < 0:
            raise UsageError("classes cannot be negative")

    @property
    def image(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image_size  # type: ignore[return-value]

    @property
    def dim(self) -> int:
        """Channels after the last stage."""
        return 4 * ROOT * self.width * 2 ** (len(self.layers) - 1)

    @property
    def features(self) -> int:
        """Width of the pooled features."""
        return self.dim


class BiT(nn.Module):
    """ResNet-V2 (BiT): images (B, C, H, W), standardized as the weights expect, to logits (B, K).

    Example:
        model = vitral.create("BiT-R50x1", classes=10, image_size=64)
        logits = model(torch.zeros(1, 3, 64, 64))
    """

    def __init__(self, config: BiTConfig):
        super().__init__()
        self.config = config
        self.checkpointing = False  # recompute bottlenecks in backward: less memory, more time
        numerics = BIT_NUMERICS[config.numerics]
        root = ROOT * config.width
        self.stem = PaddedRoot(config.channels, root, numerics)
        self.stages = stages(PreBottleneck, config.layers, root, numerics)
        self.norm = group_norm(config.dim, numerics)
        if config.classes:
            self.head = nn.Linear(config.dim, config.classes)
        if not next(self.parameters()).is_meta:  # a meta tensor has no values to draw
            self.init_weights()

    @property
    def num_features(self) -> int:
        """Width of the pooled features, the input of the head."""
        return self.config.features

    def reset_classifier(self, classes: int) -> None:
        """Replace the head by a new one with `classes` outputs; 0 removes the head. Build the optimizer afterwards."""
        self.config = replace(self.config, classes=classes)
        reset_head(self, "head", self.num_features, classes, self.config.head_bias_init)

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); with `classes=0` the pooled features (B, D)."""
        return self.classify(self.pool(self.encode(images)))

    def encode(self, images: Tensor) -> Tensor:
        """Features (B, D, H/32, W/32), rounded up, after the last stage, before the final norm."""
        if images.ndim != 4 or images.shape[1] != self.config.channels:
            expected = f"(B, {self.config.channels}, {self.config.image[0]}, {self.config.image[1]})"
            raise UsageError("images of the wrong shape", why=f"got {tuple(images.shape)}, want {expected}")
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x, self.checkpointing)
        return x

    def pool(self, x: Tensor) -> Tensor:
        """Pooled features (B, D)."""
        return F.relu(self.norm(x)).mean((2, 3))

    def classify(self, x: Tensor) -> Tensor:
        """Logits (B, K) from the output of `pool`."""
        return self.head(x) if self.config.classes else x

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize as the authors' code does (big_vision `bit_paper.py`, Flax defaults)."""
        table: list[tuple[str, Callable[[Tensor], object]]] = [
            ("head.weight", nn.init.zeros_),
            ("head.bias", partial(nn.init.constant_, val=self.config.head_bias_init)),
            ("*norm*.weight", nn.init.ones_),
            ("*conv*.weight", lecun_normal_),
            ("*norm*.bias", nn.init.zeros_),
        ]
        for name, parameter in self.named_parameters():
            next(initialize for pattern, initialize in table if fnmatchcase(name, pattern))(parameter)


class HybridStem(nn.Module):
    """ResNet before the patches: images (B, C, H, W) to features (B, `stem_width`, H/s, W/s), s `stem_stride`.

    `layers` are the numbers of bottlenecks of the stages; without stages it is only the root.
    """

    def __init__(self, channels: int, layers: Sequence[int], numerics: HybridNumerics = "authors"):
        super().__init__()
        settings = HYBRID_NUMERICS[numerics]
        self.stem = SameRoot(channels, ROOT, settings)
        if layers:
            self.stages = stages(PostBottleneck, layers, ROOT, settings)
        self.staged = bool(layers)

    def forward(self, images: Tensor, recompute: bool = False) -> Tensor:
        """With `recompute`, backward recomputes the bottlenecks to save memory."""
        x = self.stem(images)
        for stage in self.stages if self.staged else ():
            x = stage(x, recompute)
        return x


def stem_stride(layers: Sequence[int]) -> int:
    """Stride of a stem in pixels: 4 after the root and the first stage, doubled by each further stage."""
    return 4 * 2 ** max(len(layers) - 1, 0)


def stem_width(layers: Sequence[int]) -> int:
    """Channels of the output of a stem."""
    return 4 * ROOT * 2 ** (len(layers) - 1) if layers else ROOT


# Parts ----------------------------------------------------------------------------------------------------------------


class StdConv2d(nn.Conv2d):
    """Convolution with its kernel standardized for each output channel (weight standardization, arXiv 1903.10520)."""

    def __init__(self, channels: int, out: int, kernel: int, stride: int, numerics: Numerics, *, same: bool):
        super().__init__(channels, out, kernel, stride, 0 if same else (kernel - 1) // 2, bias=False)
        self.numerics, self.same = numerics, same

    def forward(self, x: Tensor) -> Tensor:
        if self.same:
            x, padding = pad_same(x, self.kernel_size[0], self.stride[0]), 0
        else:
            x, padding = bordered(x, self.kernel_size[0])
        return F.conv2d(x, self.standardized().to(x.dtype), None, self.stride, padding)

    def standardized(self) -> Tensor:
        """Standardized kernel, in fp32 at least: subtracting the mean in half precision loses too many digits."""
        weight = self.weight.flatten(1)
        if weight.dtype in (torch.bfloat16, torch.float16):
            weight = weight.float()
        if self.numerics.spread == "variance":
            weight = F.layer_norm(weight, weight.shape[1:], eps=self.numerics.standard_eps)  # the same, in one kernel
        else:
            std, mean = torch.std_mean(weight, dim=1, correction=0, keepdim=True)
            weight = (weight - mean) / (std + self.numerics.standard_eps)
        return weight.view_as(self.weight)


def bordered(x: Tensor, kernel: int) -> tuple[Tensor, int]:
    """Images (B, C, H, W) and the padding to pass to a convolution of this kernel size.

    With an image of one column and padding by the convolution, oneDNN's bf16 gradient of a strided kernel reads
    uninitialized memory (torch 2.15), which sometimes gives NaN. Such images are padded here instead.
    """
    border = (kernel - 1) // 2
    return (F.pad(x, [border] * 4), 0) if 1 in x.shape[-2:] else (x, border)


def pad_same(x: Tensor, kernel: int, stride: int, value: float = 0.0) -> Tensor:
    """Pad (…, H, W) for an output of ⌈H / stride⌉ × ⌈W / stride⌉; an odd pixel goes below and right, as in XLA."""
    pads: list[int] = []
    for n in (x.shape[-1], x.shape[-2]):  # the last axis first
        total = max((-(-n // stride) - 1) * stride + kernel - n, 0)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads, value=value) if any(pads) else x


def group_norm(channels: int, numerics: Numerics) -> nn.GroupNorm:
    """Group norm with 32 groups, as in all of these networks."""
    return nn.GroupNorm(32, channels, eps=numerics.norm_eps)


class SameRoot(nn.Module):
    """7×7 convolution with stride 2, norm, ReLU, and 3×3 max pooling with stride 2."""

    def __init__(self, channels: int, out: int, numerics: Numerics):
        super().__init__()
        self.conv = StdConv2d(channels, out, 7, 2, numerics, same=True)
        self.norm = group_norm(out, numerics)

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(pad_same(F.relu(self.norm(self.conv(x))), 3, 2, -torch.inf), 3, 2)


class PaddedRoot(nn.Module):
    """7×7 convolution and 3×3 max pooling, each with stride 2. The first norm is in the first bottleneck.

    The pooling is padded with zeros (authors, timm), which exceed negative features, or with −∞ (big_vision).
    """

    def __init__(self, channels: int, out: int, numerics: Numerics):
        super().__init__()
        self.conv = StdConv2d(channels, out, 7, 2, numerics, same=False)
        self.border = numerics.pool_border

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(F.pad(self.conv(x), (1, 1, 1, 1), value=self.border), 3, 2)


class Projection(nn.Module):
    """Shortcut of a bottleneck that changes the shape: 1×1 convolution, with a norm in post-activation networks."""

    def __init__(self, channels: int, out: int, stride: int, numerics: Numerics, *, post: bool):
        super().__init__()
        self.conv = StdConv2d(channels, out, 1, stride, numerics, same=post)
        if post:
            self.norm = group_norm(out, numerics)
        self.post = post

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.norm(x) if self.post else x


class PostBottleneck(nn.Module):
    """1×1, 3×3 (strided) and 1×1 convolution, each followed by a norm; ReLU after the sum (hybrids)."""

    def __init__(self, channels: int, mid: int, stride: int, numerics: Numerics):
        super().__init__()
        self.projected = stride != 1 or channels != 4 * mid
        if self.projected:
            self.downsample = Projection(channels, 4 * mid, stride, numerics, post=True)
        self.conv1 = StdConv2d(channels, mid, 1, 1, numerics, same=True)
        self.norm1 = group_norm(mid, numerics)
        self.conv2 = StdConv2d(mid, mid, 3, stride, numerics, same=True)
        self.norm2 = group_norm(mid, numerics)
        self.conv3 = StdConv2d(mid, 4 * mid, 1, 1, numerics, same=True)
        self.norm3 = group_norm(4 * mid, numerics)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.downsample(x) if self.projected else x
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return F.relu(shortcut + self.norm3(self.conv3(x)))


class PreBottleneck(nn.Module):
    """Norm and ReLU before each of 1×1, 3×3 (strided) and 1×1 convolution; nothing after the sum (BiT)."""

    def __init__(self, channels: int, mid: int, stride: int, numerics: Numerics):
        super().__init__()
        self.norm1 = group_norm(channels, numerics)
        self.projected = stride != 1 or channels != 4 * mid
        if self.projected:
            self.downsample = Projection(channels, 4 * mid, stride, numerics, post=False)
        self.conv1 = StdConv2d(channels, mid, 1, 1, numerics, same=False)
        self.norm2 = group_norm(mid, numerics)
        self.conv2 = StdConv2d(mid, mid, 3, stride, numerics, same=False)
        self.norm3 = group_norm(mid, numerics)
        self.conv3 = StdConv2d(mid, 4 * mid, 1, 1, numerics, same=False)

    def forward(self, x: Tensor) -> Tensor:
        activated = F.relu(self.norm1(x))
        shortcut = self.downsample(activated) if self.projected else x
        x = self.conv1(activated)
        x = self.conv2(F.relu(self.norm2(x)))
        return shortcut + self.conv3(F.relu(self.norm3(x)))


class Stage(nn.Module):
    """Bottlenecks at one resolution; the first one may halve it."""

    def __init__(self, bottlenecks: Sequence[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(bottlenecks)

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if recompute and self.training else block(x)
        return x


def stages(
    bottleneck: Callable[[int, int, int, Numerics], nn.Module], layers: Sequence[int], root: int, numerics: Numerics
) -> nn.ModuleList:
    """Stages of `layers` bottlenecks after a root of `root` channels. Each stage doubles the width; all but the first
    halve the resolution.
    """
    result, channels = nn.ModuleList(), root
    for number, count in enumerate(layers):
        mid = root * 2**number
        first = bottleneck(channels, mid, 1 if number == 0 else 2, numerics)
        result.append(Stage([first, *(bottleneck(4 * mid, mid, 1, numerics) for _ in range(count - 1))]))
        channels = 4 * mid
    return result


def lecun_normal_(p: Tensor) -> Tensor:
    """Truncated normal of variance 1/fan-in, cut at two deviations and rescaled to keep the variance (Flax)."""
    std = (1 / p[0].numel()) ** 0.5 / 0.87962566103423978  # std of a unit normal truncated at ±2
    return nn.init.trunc_normal_(p, std=std, a=-2 * std, b=2 * std)
