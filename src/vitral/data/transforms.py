"""From uint8 pixels to what the network reads: geometry for one picture, the rest for whole batches on the device.

`Preprocessing` belongs to the model: it is saved with the weights and used by evaluation, prediction and every later
use. `Augmentation` belongs to a training run. Both call torchvision's kernels. Random choices are drawn from torch's
global generators, which the caller seeds from (seed, epoch, step or sample), so that any batch can be made again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as tv

from vitral.errors import UsageError, unknown

Resize = Literal["stretch", "crop", "letterbox"]
Crop = Literal["none", "shift", "random-resized"]
Augment = Literal["none", "randaugment", "trivialaugment"]

INTERPOLATIONS = {"bilinear": InterpolationMode.BILINEAR, "bicubic": InterpolationMode.BICUBIC}


@dataclass(frozen=True)
class Preprocessing:
    """What the network expects of a picture.

    `resize`: `stretch` to `image_size` (the authors' evaluation); `crop` = short side to `image_size / crop_fraction`,
    then the centre; `letterbox` = the long side fits, the rest is filled with the mean. `mean` and `std` are those of
    pixels scaled to 0..1, one number a channel.
    """

    image_size: tuple[int, int]
    channels: int = 3
    resize: Resize = "stretch"
    crop_fraction: float = 0.875
    interpolation: str = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise unknown("interpolation", self.interpolation, INTERPOLATIONS)
        if self.resize not in ("stretch", "crop", "letterbox"):
            raise unknown("resize rule", self.resize, ("stretch", "crop", "letterbox"))
        if len(self.mean) != self.channels or len(self.std) != self.channels or min(self.std) <= 0:
            raise UsageError(f"mean and std need {self.channels} numbers each, std above 0")
        if not 0 < self.crop_fraction <= 1:
            raise UsageError(f"crop fraction {self.crop_fraction} is not between 0 and 1")

    def geometry(self, pixels: np.ndarray | Tensor) -> Tensor:
        """uint8 (H, W, C) of any size to uint8 (C, height, width) of `image_size`."""
        image = _channels_first(pixels)
        height, width = self.image_size
        if image.shape[-2:] == (height, width):
            return image
        if self.resize == "stretch":
            return self.resized(image, (height, width))
        if self.resize == "crop":
            scale = max(height / image.shape[-2], width / image.shape[-1]) / self.crop_fraction
            size = tuple(
                max(round(n * scale), least) for n, least in zip(image.shape[-2:], self.image_size, strict=True)
            )
            return tv.center_crop(self.resized(image, size), [height, width])
        scale = min(height / image.shape[-2], width / image.shape[-1])
        inner = tuple(
            min(max(round(n * scale), 1), most) for n, most in zip(image.shape[-2:], (height, width), strict=True)
        )
        top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
        fill = [round(255 * m) for m in self.mean]
        padding = [left, top, width - inner[1] - left, height - inner[0] - top]
        return tv.pad(self.resized(image, inner), padding, fill=fill)

    def resized(self, image: Tensor, size: tuple[int, ...]) -> Tensor:
        """uint8 (C, H, W) at `size`, by this model's interpolation."""
        mode = INTERPOLATIONS[self.interpolation]
        return tv.resize(image, list(size), interpolation=mode, antialias=self.antialias)

    def standardise(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to float32: (x/255 - mean) / std."""
        scale = torch.tensor([1 / (255 * s) for s in self.std], device=images.device)[:, None, None]
        shift = torch.tensor([-m / s for m, s in zip(self.mean, self.std, strict=True)], device=images.device)
        return images.float().mul_(scale).add_(shift[:, None, None])

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the way back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocessing:
        """Read `to_json`'s form; a field that is not known raises `UsageError`."""
        fields = {f.name for f in dataclasses.fields(cls)}
        if extra := [name for name in data if name not in fields]:
            raise unknown("field of a model's preprocessing", extra[0], fields)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


def _channels_first(pixels: np.ndarray | Tensor) -> Tensor:
    image = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
    return image.permute(2, 0, 1)


@dataclass(frozen=True)
class Augmentation:
    """How training pictures vary. The geometry of `random-resized` is drawn for each picture, the rest in batches."""

    crop: Crop = "none"
    crop_area: float = 0.08  # the smallest share of the picture that a random-resized crop keeps
    flip: bool = False
    augment: Augment = "none"
    randaugment: tuple[int, int] = (2, 10)  # operations, magnitude of 0..30
    erase: float = 0.0  # probability of random erasing
    mixup: float = 0.0  # α of Beta(α, α); 0 is off
    cutmix: float = 0.0

    def geometry(self, pixels: np.ndarray | Tensor, preprocessing: Preprocessing) -> Tensor:
        """One picture: uint8 (H, W, C) of any size to uint8 (C, height, width), cropped at random where asked."""
        if self.crop != "random-resized":
            return preprocessing.geometry(pixels)
        image = _channels_first(pixels)
        area, ratio = [self.crop_area, 1.0], [3 / 4, 4 / 3]
        top, left, height, width = v2.RandomResizedCrop.get_params(image, scale=area, ratio=ratio)
        return preprocessing.resized(image[:, top : top + height, left : left + width], preprocessing.image_size)

    def pixels(self, images: Tensor) -> Tensor:
        """A batch of uint8 (B, C, H, W), on any device: shift, flip, RandAugment or TrivialAugment."""
        if self.crop == "shift":
            images = random_shift(images, max(1, images.shape[-1] // 8))
        if self.flip:
            flipped = torch.rand(len(images), device=images.device) < 0.5
            images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
        if self.augment != "none":
            images = _in_groups(self._operations(), images)
        return images

    def _operations(self) -> Any:
        if self.augment == "trivialaugment":
            return v2.TrivialAugmentWide()
        return v2.RandAugment(num_ops=self.randaugment[0], magnitude=self.randaugment[1])

    def standardised(self, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """A batch of floats (B, C, H, W) and labels (B,): random erasing, then mixup or cutmix.

        Labels come back as they are, or as shares (B, K) where pictures were mixed.
        """
        if self.erase:
            images = random_erase(images, self.erase)
        mixes = [v2.MixUp(alpha=self.mixup, num_classes=classes)] if self.mixup else []
        mixes += [v2.CutMix(alpha=self.cutmix, num_classes=classes)] if self.cutmix else []
        if mixes and len(images) > 1:
            images, labels = mixes[int(torch.randint(len(mixes), ()))](images, labels)
        return images, labels


def random_shift(images: Tensor, most: int) -> Tensor:
    """Move each picture (B, C, H, W) by up to `most` pixels on both axes; black comes in."""
    B, C, H, W = images.shape
    padded = F.pad(images, (most, most, most, most))
    top, left = torch.randint(0, 2 * most + 1, (2, B, 1), device=images.device)
    rows = top + torch.arange(H, device=images.device)
    columns = left + torch.arange(W, device=images.device)
    picture = torch.arange(B, device=images.device)
    return padded[picture[:, None, None, None], torch.arange(C, device=images.device)[:, None, None],
                  rows[:, None, :, None], columns[:, None, None, :]]  # fmt: skip


def random_erase(images: Tensor, probability: float, area: tuple[float, float] = (0.02, 1 / 3)) -> Tensor:
    """Fill a random rectangle of some pictures with noise (arXiv 1708.04896, as DeiT uses it), all at once."""
    B, _, H, W = images.shape
    device = images.device
    share = torch.empty(B, device=device).uniform_(*area)
    ratio = torch.empty(B, device=device).uniform_(-1.2, 1.2).exp()  # height : width from 0.3 to 3.3
    height = (share * H * W * ratio).sqrt().clamp(1, H).round()
    width = (share * H * W / ratio).sqrt().clamp(1, W).round()
    top = (torch.rand(B, device=device) * (H - height + 1)).floor()
    left = (torch.rand(B, device=device) * (W - width + 1)).floor()
    height = torch.where(torch.rand(B, device=device) < probability, height, 0)
    row, column = torch.arange(H, device=device), torch.arange(W, device=device)
    in_rows = (row >= top[:, None]) & (row < (top + height)[:, None])
    in_columns = (column >= left[:, None]) & (column < (left + width)[:, None])
    inside = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    return torch.where(inside, torch.randn_like(images), images)


def _in_groups(operation: Any, images: Tensor, groups: int = 32) -> Tensor:
    """torchvision draws one operation a call; a call for each of some groups keeps a batch varied and costs little.

    Which pictures share a group changes with the order of the epoch.
    """
    parts: Sequence[Tensor] = images.chunk(min(groups, len(images)))
    return torch.cat([operation(part) for part in parts])
