"""From uint8 pixels to what the network reads: geometry for one picture, the rest for whole batches on the device.

`Preprocessing` belongs to the model: it is saved with the weights and used by evaluation, prediction and every later
use; torch computes it, to the same pixels as torchvision. `Augmentation` belongs to a training run; the operations of
its large collections, and mixtures, are torchvision's. Random choices are drawn from torch's global generators, which
the caller seeds from (seed, epoch, step or sample), so that any batch can be made again.
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

from vitral.data.kernels import torchvision
from vitral.data.operations import in_pieces, rand_augment, trivial_augment
from vitral.errors import UsageError, unknown

Resize = Literal["stretch", "crop", "letterbox"]
Centre = Literal["round", "floor"]
Crop = Literal["none", "shift", "random-resized"]
Augment = Literal["none", "affine", "randaugment", "trivialaugment"]

INTERPOLATIONS: dict[str, str | Image.Resampling] = {
    "bilinear": "bilinear",  # of torch's `interpolate`
    "bicubic": "bicubic",
    # torch has no kernels for these (torchvision has Lanczos since 0.27, on CPUs): Pillow's, which always
    # antialias. Nearest, too: which of two pixels is as near differs between the two.
    "nearest": Image.Resampling.NEAREST,
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
}
MAX_SIDE = 1 << 14
"""Largest side of `resize_size`: a damaged header must not ask for all the memory."""
RESIZES = ("stretch", "crop", "letterbox")
CENTRES = ("round", "floor")


@dataclass(frozen=True)
class Preprocessing:
    """What the network expects of a picture.

    `resize`: `stretch` to `image_size` (the authors' evaluation); `crop` = short side to `image_size / crop_fraction`,
    then the centre; `letterbox` = the long side fits, the rest is filled with the mean. `mean` and `std` are those of
    pixels scaled to 0..1, one number a channel.

    `resize_size` (height, width) is for published recipes, where the size before the centre is cut is a number of its
    own: `stretch` goes to exactly that size; `crop` makes the picture just cover it; `letterbox` fits it inside. Then
    the centre of `image_size` is cut, and what is lacking is filled (black, or the mean for `letterbox`). Pictures that
    have `image_size` already are resized, too, where without `resize_size` they are left alone. `centre` says where the
    middle is when it falls between two pixels: `round` half to even (torchvision, timm) or `floor` (Hugging Face).
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
    centre: Centre = "round"

    def __post_init__(self) -> None:
        if self.interpolation not in INTERPOLATIONS:
            raise unknown("interpolation", self.interpolation, INTERPOLATIONS)
        if self.resize not in RESIZES:
            raise unknown("resize rule", self.resize, RESIZES)
        if self.centre not in CENTRES:
            raise unknown("rule for the centre", self.centre, CENTRES)
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

    def at(self, image_size: tuple[int, int]) -> Preprocessing:
        """The same recipe for another image size: what is cut away keeps its share of the picture.

        Where `resize_size` is `floor(image_size / crop_fraction)`, as timm defines it, it still is; else it is scaled.
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
        """uint8 (H, W, C) of any size to uint8 (C, height, width) of `image_size`."""
        image = _channels_first(pixels)
        if self.resize_size is not None:
            return self._centre(self.resized(image, self._before_centre(*image.shape[-2:])))
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
        return _on_colour(self.resized(image, inner), self.image_size, (top, left), self._mean_colour)

    def _before_centre(self, height: int, width: int) -> tuple[int, int]:
        """What a picture is resized to before its centre is cut.

        Rounding is the origins': torchvision and Hugging Face cut the long side off to whole pixels; timm, which has a
        resize of its own for oblong targets and for `border`, rounds.
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

    def _centre(self, image: Tensor) -> Tensor:
        """Cut to `image_size` around the middle; a side that is too short is filled first."""
        tall, wide = (max(want, have) for want, have in zip(self.image_size, image.shape[-2:], strict=True))
        if (tall, wide) != image.shape[-2:]:
            place = ((tall - image.shape[-2]) // 2, (wide - image.shape[-1]) // 2)
            colour = self._mean_colour if self.resize == "letterbox" else [0] * self.channels
            image = _on_colour(image, (tall, wide), place, colour)
        return _cut(image, self.image_size, round if self.centre == "round" else math.floor)

    @property
    def _mean_colour(self) -> list[int]:
        return [min(max(round(255 * m), 0), 255) for m in self.mean]

    def resized(self, image: Tensor, size: tuple[int, ...]) -> Tensor:
        """uint8 (C, H, W) at `size`, by this model's interpolation."""
        mode = INTERPOLATIONS[self.interpolation]
        if isinstance(mode, Image.Resampling):
            return _resized_by_pillow(image, size, mode)
        if image.shape[-2:] == size:
            return image
        picture = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)  # strides by which torch sees channels together
        if image.device.type != "cpu" or (mode == "bilinear" and not _resizes_bytes()):
            picture = picture.float()
        found = F.interpolate(picture, list(size), mode=mode, antialias=self.antialias, align_corners=False)
        return found[0].clamp_(0, 255).round_().to(torch.uint8) if found.is_floating_point() else found[0]

    def standardise(self, images: Tensor) -> Tensor:
        """uint8 (B, C, H, W) to float32: (x/255 - mean) / std."""
        images = images.float()
        for channel, (mean, std) in enumerate(zip(self.mean, self.std, strict=True)):
            # numbers, no tensors of them: a GPU would be waited for to take those
            images[:, channel].mul_(1 / (255 * std)).add_(-mean / std)
        return images

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the way back.

        What came later (`resize_size`, `centre`) is written only where it says something: files stay what they were.
        """
        data = dataclasses.asdict(self)
        later = {f.name: f.default for f in dataclasses.fields(self) if f.name in ("resize_size", "centre")}
        return {name: value for name, value in data.items() if name not in later or value != later[name]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Preprocessing:
        """Read `to_json`'s form; a field that is not known raises `UsageError`."""
        fields = {f.name for f in dataclasses.fields(cls)}
        if extra := [name for name in data if name not in fields]:
            raise unknown("field of a model's preprocessing", extra[0], fields)
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data.items()}
        return cls(**values)


def before_crop(image_size: tuple[int, int], crop_fraction: float) -> tuple[int, int]:
    """(height, width) that a picture is resized to, of which `image_size` is the `crop_fraction`.

    Rounded down, as timm (`data/transforms_factory.py`), DeiT and MAE do: 224 / 0.9 is 248.
    """
    return math.floor(image_size[0] / crop_fraction), math.floor(image_size[1] / crop_fraction)


def _is_size(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(n) is int and 0 < n <= MAX_SIDE for n in value)


def _resizes_bytes() -> bool:
    """Whether torch has quick kernels that resize bytes on this processor: the rule of torchvision 0.29. What they give
    differs from what floats do by a level here and there.
    """
    fast = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return fast or platform.machine() in ("aarch64", "arm64")


def _cut(image: Tensor, size: tuple[int, int], rule: Callable[[float], int]) -> Tensor:
    """The middle (height, width) of a picture (C, H, W) that is at least so large; a view."""
    top, left = (rule((have - want) / 2) for have, want in zip(image.shape[-2:], size, strict=True))
    return image[:, top : top + size[0], left : left + size[1]]


def _on_colour(image: Tensor, size: tuple[int, int], place: tuple[int, int], colour: list[int]) -> Tensor:
    """A picture (C, H, W) whose upper left corner lies at `place` on a plain ground of `size`."""
    ground = torch.tensor(colour, dtype=image.dtype)[:, None, None].repeat(1, *size)
    (top, left), (tall, wide) = place, image.shape[-2:]
    ground[:, top : top + tall, left : left + wide] = image
    return ground


def _resized_by_pillow(image: Tensor, size: tuple[int, ...], mode: Image.Resampling) -> Tensor:
    """uint8 (C, H, W) at (height, width), channel by channel: Pillow's filters treat them apart anyway."""
    planes = [Image.fromarray(plane.numpy()).resize((size[1], size[0]), mode) for plane in image.contiguous()]
    return torch.stack([torch.from_numpy(np.array(plane)) for plane in planes])


def _channels_first(pixels: np.ndarray | Tensor) -> Tensor:
    image = torch.from_numpy(pixels) if isinstance(pixels, np.ndarray) else pixels
    return image.permute(2, 0, 1)


@dataclass(frozen=True)
class Augmentation:
    """How training pictures vary. The geometry of `random-resized` is drawn for each picture, the rest in batches."""

    crop: Crop = "none"
    crop_area: float = 0.08  # the smallest share of the picture that a random-resized crop keeps
    scaled: bool = True  # large JPEGs that are cropped at random are decoded at 1/2, 1/4 or 1/8 of their size
    shift: float = 1 / 8  # the farthest that a shift goes, as a share of the width
    flip: bool = False
    augment: Augment = "none"
    randaugment: tuple[int, int] = (2, 10)  # operations, magnitude of 0..30
    erase: float = 0.0  # probability of random erasing
    mixup: float = 0.0  # α of Beta(α, α); 0 is off
    cutmix: float = 0.0

    @property
    def by_torchvision(self) -> bool:
        """Whether any of it is torchvision's."""
        return self.crop == "random-resized" or self.mixup > 0 or self.cutmix > 0

    def geometry(self, pixels: np.ndarray | Tensor, preprocessing: Preprocessing) -> Tensor:
        """One picture: uint8 (H, W, C) of any size to uint8 (C, height, width), cropped at random where asked."""
        if self.crop != "random-resized":
            return preprocessing.geometry(pixels)
        image = _channels_first(pixels)
        area, ratio = [self.crop_area, 1.0], [3 / 4, 4 / 3]
        top, left, height, width = torchvision().transforms.v2.RandomResizedCrop.get_params(
            image, scale=area, ratio=ratio
        )
        return preprocessing.resized(image[:, top : top + height, left : left + width], preprocessing.image_size)

    def pixels(self, images: Tensor) -> Tensor:
        """A batch of uint8 (B, C, H, W), on any device: shift, flip, then what `augment` says."""
        if self.crop == "shift":
            images = random_shift(images, max(1, int(images.shape[-1] * self.shift)))
        if self.flip:
            images = random_mirror(images)
        if self.augment == "affine":
            images = random_affine(images)
        elif self.augment == "trivialaugment":
            images = trivial_augment(images)
        elif self.augment == "randaugment":
            images = rand_augment(images, *self.randaugment)
        return images

    def standardised(self, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """A batch of floats (B, C, H, W) and labels (B,): random erasing, then mixup or cutmix.

        Labels come back as they are, or as shares (B, K) where pictures were mixed.
        """
        if self.erase:
            images = random_erase(images, self.erase)
        mixes = [torchvision().transforms.v2.MixUp(alpha=self.mixup, num_classes=classes)] if self.mixup else []
        mixes += [torchvision().transforms.v2.CutMix(alpha=self.cutmix, num_classes=classes)] if self.cutmix else []
        if mixes and len(images) > 1:
            images, labels = mixes[int(torch.randint(len(mixes), ()))](images, labels)
        return images, labels


def random_mirror(images: Tensor) -> Tensor:
    """Mirror each picture (B, C, H, W) with probability 1/2."""
    mirrored = torch.rand(len(images), device=images.device) < 0.5
    if images.device.type != "cpu":  # how many they are is not asked for: who does waits for the device
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    rows, places = mirrored.nonzero()[:, 0], torch.arange(len(images))
    places[rows] = torch.arange(len(rows)) + len(images)
    return torch.cat([images, images.index_select(0, rows).flip(-1)]).index_select(0, places)


def random_shift(images: Tensor, most: int) -> Tensor:
    """Move each picture (B, C, H, W) by up to `most` pixels on both axes; what comes in is its mirror image, since
    black would be an edge to learn (arXiv 2404.00498 trains so).
    """
    B, _, H, W = images.shape
    down, across = min(most, H - 1), min(most, W - 1)  # of a strip no more can be mirrored
    padded = F.pad(images, (across, across, down, down), mode="reflect")
    places = padded.unfold(2, H, 1).unfold(3, W, 1)  # (B, C, row, column, H, W), a view
    row, column = (torch.randint(2 * way + 1, (B,), device=images.device) for way in (down, across))
    return places[torch.arange(B, device=images.device), :, row, column]


def random_affine(images: Tensor, degrees: float = 10.0, zoom: float = 0.1) -> Tensor:
    """Turn each uint8 picture (B, C, H, W) by up to `degrees`, and stretch each of its sides by up to a factor of
    1 + `zoom` either way; what comes in at the edges is the outermost pixels again.
    """
    B, _, H, W = images.shape
    angle = math.radians(degrees) * (2 * torch.rand(B, device=images.device) - 1)
    down, across = torch.exp(math.log1p(zoom) * (2 * torch.rand(2, B, device=images.device) - 1))
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    # From places of the result to places of the picture, each from -1 to 1 across a side, however long that is.
    rows = [
        torch.stack([cos * across, -sin * across * H / W, zero]),
        torch.stack([sin * down * W / H, cos * down, zero]),
    ]
    return in_pieces(_mapped, images, torch.stack(rows).permute(2, 0, 1))


def _mapped(images: Tensor, matrices: Tensor) -> Tensor:
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return moved.round().to(images.dtype)


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
    if device.type == "cpu":
        return _erased(images, *(side.int().tolist() for side in (top, left, height, width)))
    row, column = torch.arange(H, device=device), torch.arange(W, device=device)
    in_rows = (row >= top[:, None]) & (row < (top + height)[:, None])
    in_columns = (column >= left[:, None]) & (column < (left + width)[:, None])
    inside = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    return torch.where(inside, torch.randn_like(images), images)


def _erased(images: Tensor, *rectangles: list[int]) -> Tensor:
    """Noise drawn for the rectangles alone (tops, lefts, heights, widths), which on a GPU would be a call for each."""
    images = images.clone()
    for image, top, left, height, width in zip(images, *rectangles, strict=True):
        image[:, top : top + height, left : left + width] = torch.randn(len(image), height, width, dtype=image.dtype)
    return images
