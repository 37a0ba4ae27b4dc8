"""Preprocessing from uint8 pixels to the network's input: geometry per image, standardization per batch on the device.

`Preprocessing` belongs to the model: it is saved with the weights and used by evaluation, prediction and every later
use; torch computes it, to the same pixels as torchvision. `Augmentation` belongs to a training run; its random-resized
crop, mixup and CutMix are torchvision's. Random numbers come from torch's global generators, which the caller seeds
from (seed, epoch, step or sample), so that any batch can be reproduced.
"""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vitral.data.images.canvas import LEAST_WIDTH, on_canvas, sizes_on
from vitral.data.images.levels import check_levels
from vitral.errors import UsageError, unknown
from vitral.kinds import named_fields
from vitral.model.config_base import MAX_SIDE

Resize = Literal["stretch", "crop", "letterbox", "native"]
Center = Literal["round", "floor"]
INTERPOLATIONS: dict[str, str | Image.Resampling] = {
    "bilinear": "bilinear",  # of torch's `interpolate`
    "bicubic": "bicubic",
    # torch has no kernels for these (torchvision has Lanczos since 0.27, on CPUs), so they are Pillow's, which always
    # antialias. So is nearest: torch and Pillow break ties between two equally near pixels differently.
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}

RESIZES = ("stretch", "crop", "letterbox", "native")
CENTERS = ("round", "floor")


@named_fields
@dataclass(frozen=True)
class Preprocessing:
    """Preprocessing that a network expects.

    `resize` is one of these:

    - `stretch`: resize to `image_size`, as in the authors' evaluation;
    - `crop`: resize the short side to `image_size / crop_fraction`, then cut out the center;
    - `letterbox`: resize the long side to fit, and fill the rest with the mean;
    - `native`: keep the aspect ratio. Images larger than `image_size` are reduced to fit. Height and width are rounded
      to multiples of `multiple` (height, width).

    The pixels are scaled to 0..1 first. `mean` and `std` apply to these values, one number per channel.

    `resize_size` (height, width) is the size before the center crop, which some published recipes state. `stretch`
    resizes to exactly this size, `crop` covers it, and `letterbox` fits inside it. Then the center of `image_size` is
    cropped, with padding (black, or the mean for `letterbox`) if a side is too short. With `resize_size`, images that
    already have `image_size` are resized, too; without it they are left alone. `center` rounds the offset of the
    center crop: `round` half to even (torchvision, timm) or `floor` (Hugging Face).

    `levels` are the pixel values that mean black and white, in images of floats and in gray images of 16 or 32 bits.
    None means 0 to 65535 for integers. For floats, the values of each image decide: they mean 0 to 1, or 0 to 255.

    Example:
        preprocessing = vitral.Preprocessing((64, 64), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        model = vitral.create("Ti/16", classes=2, image_size=64)
        predictor = vitral.Predictor(model, preprocessing, ["cat", "dog"])
    """

    image_size: tuple[int, int]
    channels: int = 3
    resize: Resize = "stretch"
    crop_fraction: float = 0.875
    interpolation: str = "bilinear"
    antialias: bool = True
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    resize_size: tuple[int, int] | None = None
    center: Center = "round"
    multiple: tuple[int, int] = (1, 1)
    levels: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise unknown("interpolation", self.interpolation, INTERPOLATIONS)
        if self.resize not in RESIZES:
            raise unknown("resize rule", self.resize, RESIZES)
        if self.center not in CENTERS:
            raise unknown("rule for the center", self.center, CENTERS)
        if len(self.mean) != self.channels or len(self.std) != self.channels or min(self.std) <= 0:
            raise UsageError(f"mean and std need {self.channels} numbers each, std above 0")
        if not all(map(math.isfinite, (*self.mean, *self.std))):
            raise UsageError("mean and std must be finite")
        if not 0 < self.crop_fraction <= 1:
            raise UsageError(f"crop fraction {self.crop_fraction} is not between 0 and 1")
        if self.resize_size is not None and not _is_size(self.resize_size):
            raise UsageError(f"resize_size {self.resize_size} is not a height and a width of 1 to {MAX_SIDE} pixels")
        if isinstance(INTERPOLATIONS[self.interpolation], Image.Resampling) and not self.antialias:
            raise UsageError(f"there is no {self.interpolation} interpolation without antialias")
        check_levels(self.levels)
        if self.native:
            self._check_native()

    def _check_native(self) -> None:
        if self.resize_size is not None:
            raise UsageError("images of their own sizes are not cropped", hint="leave out --resize-size")
        if not _is_size(self.multiple) or any(n < m for n, m in zip(self.image_size, self.multiple, strict=True)):
            raise UsageError(f"no image of {self.image_size} pixels has sides in multiples of {self.multiple}")
        if self.image_size[1] < LEAST_WIDTH:
            raise UsageError(f"images of their own sizes may be at least {LEAST_WIDTH} pixels wide, not less")

    @property
    def native(self) -> bool:
        """True if images keep their own sizes: `geometry` returns padded canvases, `own_sizes` removes the padding."""
        return self.resize == "native"

    @property
    def kept_size(self) -> tuple[int, int]:
        """Height and width of the result of `geometry`."""
        return (self.image_size[0] + self.native, self.image_size[1])

    def at(self, image_size: tuple[int, int]) -> Preprocessing:
        """Adapt to another image size; the center crop keeps its share of the image.

        If `resize_size` is `floor(image_size / crop_fraction)`, as in timm, it is computed again for the new size. Any
        other `resize_size` is scaled.
        """
        if self.resize_size is None:
            return dataclasses.replace(self, image_size=image_size)
        if self.resize_size == before_crop(self.image_size, self.crop_fraction):
            resized = before_crop(image_size, self.crop_fraction)
        else:
            sides = zip(self.resize_size, image_size, self.image_size, strict=True)
            tall, wide = (max(1, n * new // old) for n, new, old in sides)
            resized = (tall, wide)
        return dataclasses.replace(self, image_size=image_size, resize_size=resized)

    def geometry(self, pixels: np.ndarray | Tensor) -> Tensor:
        """Resize and crop uint8 (H, W, C) of any size to uint8 (C, height, width) of `image_size`.

        With `resize="native"`, the image keeps its own size. It is returned in the corner of a canvas of `image_size`
        with one more row, which stores height and width of the image (`vitral.data.images.canvas`).
        """
        image = channels_first(pixels)
        if self.native:
            return on_canvas(self.resized(image, self.own_size(*image.shape[-2:])), self.image_size)
        if self.resize_size is not None:
            return self._center(self.resized(image, self._before_center(*image.shape[-2:])))
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
            return _cut(self.resized(image, size), self.image_size, round)
        scale = min(height / image.shape[-2], width / image.shape[-1])
        inner = tuple(
            min(max(round(n * scale), 1), most) for n, most in zip(image.shape[-2:], (height, width), strict=True)
        )
        top, left = (height - inner[0]) // 2, (width - inner[1]) // 2
        return _on_color(self.resized(image, inner), self.image_size, (top, left), self.mean_color)

    def own_size(self, height: int, width: int, most: tuple[int, int] | None = None) -> tuple[int, int]:
        """Return the size to which `native` resizes an image of this height and width.

        It is reduced to fit into `most` (default: `image_size`) and rounded to multiples of `multiple`.
        """
        limits = most or self.image_size
        scale = min(1.0, limits[0] / height, limits[1] / width)
        sides = zip((height, width), limits, self.multiple, strict=True)
        tall, wide = (min(max(round(n * scale / m), 1), max(limit // m, 1)) * m for n, limit, m in sides)
        return tall, wide

    def _before_center(self, height: int, width: int) -> tuple[int, int]:
        """Size (height, width) before the center crop.

        Rounding follows the original libraries: torchvision and Hugging Face truncate the long side to whole pixels;
        timm, which has its own resize for oblong targets and for `border`, rounds.
        """
        assert self.resize_size is not None
        tall, wide = self.resize_size
        if self.resize == "stretch":
            return tall, wide
        if self.resize == "crop" and tall == wide:
            return (int(tall * height / width), tall) if width <= height else (tall, int(tall * width / height))
        rule = min if self.resize == "crop" else max
        ratio = rule(height / tall, width / wide)
        return max(1, round(height / ratio)), max(1, round(width / ratio))

    def _center(self, image: Tensor) -> Tensor:
        """Crop the center of `image_size`, after padding a side that is too short."""
        tall, wide = (max(want, have) for want, have in zip(self.image_size, image.shape[-2:], strict=True))
        if (tall, wide) != image.shape[-2:]:
            corner = ((tall - image.shape[-2]) // 2, (wide - image.shape[-1]) // 2)
            color = self.mean_color if self.resize == "letterbox" else [0] * self.channels
            image = _on_color(image, (tall, wide), corner, color)
        return _cut(image, self.image_size, round if self.center == "round" else math.floor)

    @property
    def mean_color(self) -> list[int]:
        """The mean as a color, for each channel 0 to 255."""
        return [min(max(round(255 * m), 0), 255) for m in self.mean]

    def resized(self, image: Tensor, size: tuple[int, ...]) -> Tensor:
        """Resize uint8 (C, H, W) to `size` with this model's interpolation."""
        mode = INTERPOLATIONS[self.interpolation]
        if isinstance(mode, Image.Resampling):
            return _resized_by_pillow(image, size, mode)
        if image.shape[-2:] == size:
            return image
        batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # strides that torch recognizes as channels last
        if image.device.type != "cpu" or (mode == "bilinear" and not _has_fast_uint8_resize()):
            batch = batch.float()
        out = F.interpolate(batch, list(size), mode=mode, antialias=self.antialias, align_corners=False)
        return out[0].clamp_(0, 255).round_().to(torch.uint8) if out.is_floating_point() else out[0]

    def standardize(self, images: Tensor) -> Tensor:
        """Convert uint8 (B, C, H, W) to float32: (x/255 - mean) / std.

        Raises `UsageError` with `resize="native"`: images of different sizes form no batch. Use `own_sizes` instead.
        """
        if self.native:
            why = "the network takes images of their own sizes, packed into sequences (--pack)"
            raise UsageError("this is not supported with --pack", why=why, hint="vitral predict, or vitral evaluate")
        return self.standardized(images)

    def own_sizes(self, canvases: Tensor) -> list[Tensor]:
        """Standardized images (C, h, w) fp32, each of its own size, from the canvases of `geometry`."""
        images = zip(self.standardized(canvases), sizes_on(canvases), strict=True)
        return [image[:, :height, :width] for image, (height, width) in images]

    def standardized(self, images: Tensor) -> Tensor:
        """Standardize as `standardize` does, but accept canvases, too."""
        images = images.float()
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            # Python numbers: copying tensors of them to a GPU would synchronize with it
            images[:, channel].mul_(1 / (255 * std)).add_(-mean / std)
        return images

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data, for `from_json`.

        Fields added later (`resize_size` and those after it) are written only if they differ from their defaults, so
        that older files stay the same.
        """
        data = dataclasses.asdict(self)
        names = [f.name for f in dataclasses.fields(self)]
        added = names[names.index("resize_size") :]
        later = {f.name: f.default for f in dataclasses.fields(self) if f.name in added}
        return {name: value for name, value in data.items() if name not in later or value != later[name]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocessing:
        """Read the form that `to_json` writes; an unknown field raises `UsageError`."""
        fields = {f.name for f in dataclasses.fields(cls)}
        if extra := [name for name in data if name not in fields]:
            raise unknown("field of a model's preprocessing", extra[0], fields)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


def before_crop(image_size: tuple[int, int], crop_fraction: float) -> tuple[int, int]:
    """Size (height, width) before a center crop of `image_size` that keeps `crop_fraction`.

    Rounded down, as in timm (`data/transforms_factory.py`), DeiT and MAE: 224 / 0.9 is 248.
    """
    return math.floor(image_size[0] / crop_fraction), math.floor(image_size[1] / crop_fraction)


def _is_size(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(n) is int and 0 < n <= MAX_SIDE for n in value)


def _has_fast_uint8_resize() -> bool:
    """True if torch has fast kernels that resize uint8 on this CPU (the rule of torchvision 0.29).

    Their results differ from those in float by one level in some pixels.
    """
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return fast or platform.machine() in ("aarch64", "arm64")


def _cut(image: Tensor, size: tuple[int, int], rule: Callable[[float], int]) -> Tensor:
    """View of the center `size` (height, width) of an image (C, H, W) that is at least that large."""
    top, left = (rule((have - want) / 2) for have, want in zip(image.shape[-2:], size, strict=True))
    return image[:, top : top + size[0], left : left + size[1]]


def _on_color(image: Tensor, size: tuple[int, int], corner: tuple[int, int], color: list[int]) -> Tensor:
    """Paste an image (C, H, W) with its upper left `corner` on a solid background of `size`."""
    canvas = torch.tensor(color, dtype=image.dtype)[:, None, None].repeat(1, *size)
    (top, left), (tall, wide) = corner, image.shape[-2:]
    canvas[:, top : top + tall, left : left + wide] = image
    return canvas


def _resized_by_pillow(image: Tensor, size: tuple[int, ...], mode: Image.Resampling) -> Tensor:
    """Resize uint8 (C, H, W) to (height, width), channel by channel, as Pillow's filters do internally."""
    planes = [Image.fromarray(plane.numpy()).resize((size[1], size[0]), mode) for plane in image.contiguous()]
    return torch.stack([torch.from_numpy(np.array(plane)) for plane in planes])


def channels_first(pixels: np.ndarray | Tensor) -> Tensor:
    image = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
    return image.permute(2, 0, 1)
