"""Random augmentation of uint8 batches on the device: mirror, shift, affine, erase, and the policies."""

from __future__ import annotations

import math
import random as python_random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data.images.augmentation_ops import in_pieces, rand_augment, trivial_augment
from vitral.data.images.lazy_torchvision import torchvision
from vitral.data.images.preprocessing import Preprocessing, channels_first
from vitral.errors import UsageError, type_of
from vitral.kernels import random
from vitral.model.own import is_own, own_function

Crop = Literal["none", "shift", "random-resized"]
Box = tuple[int, int, int, int]
"""Top, left, height and width of a crop, in pixels."""
Augment = Literal["none", "affine", "randaugment", "trivialaugment"]


@dataclass(frozen=True)
class Augmentation:
    """Augmentation of training images. The crop of `random-resized` is drawn per image, the rest per batch."""

    crop: Crop = "none"
    crop_area: float = 0.08  # smallest share of the image that a random-resized crop keeps
    scaled: bool = True  # decode large, randomly cropped JPEGs at 1/2, 1/4 or 1/8 of their size
    shift: float = 1 / 8  # largest shift, as a share of the width
    flip: bool = False
    augment: Augment = "none"
    randaugment: tuple[int, int] = (2, 10)  # operations, magnitude of 0..30
    erase: float = 0.0  # probability of random erasing
    mixup: float = 0.0  # α of Beta(α, α); 0 is off
    cutmix: float = 0.0

    @property
    def needs_torchvision(self) -> bool:
        """True if any transform comes from torchvision."""
        return self.crop == "random-resized" or self.mixes

    @property
    def mixes(self) -> bool:
        """True if images of a batch are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0

    def geometry(self, pixels: np.ndarray | Tensor, preprocessing: Preprocessing) -> Tensor:
        """One image: uint8 (H, W, C) of any size to uint8 (C, height, width), with a random crop if set."""
        if self.crop != "random-resized":
            return preprocessing.geometry(pixels)
        image = channels_first(pixels)
        top, left, height, width = self.box(*image.shape[-2:])
        return preprocessing.resized(image[:, top : top + height, left : left + width], preprocessing.image_size)

    def box(self, height: int, width: int) -> Box:
        """Draw the crop of an image of this size."""
        image, ratio = torch.empty(3, height, width, device="meta"), [3 / 4, 4 / 3]
        found: Box = torchvision().transforms.v2.RandomResizedCrop.get_params(
            image, scale=[self.crop_area, 1.0], ratio=ratio
        )
        return found

    def pixels(self, images: Tensor) -> Tensor:
        """Shift, flip, then apply `augment` to a batch of uint8 (B, C, H, W), on any device."""
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
        elif is_own(self.augment):
            images = own_augmented(images, own_function("augment", self.augment))
        return images

    def standardized(self, images: Tensor, labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
        """Apply random erasing, then mixup or CutMix, to floats (B, C, H, W) and labels (B,).

        Labels are returned unchanged, or as class probabilities (B, K) if images were mixed. Each image is mixed with
        the one before it, so the halo of a rank's rows is dropped here.
        """
        if self.erase:
            images = random_erase(images, self.erase)
        mixes = [torchvision().transforms.v2.MixUp(alpha=self.mixup, num_classes=classes)] if self.mixup else []
        mixes += [torchvision().transforms.v2.CutMix(alpha=self.cutmix, num_classes=classes)] if self.cutmix else []
        if mixes and len(images) > 1:
            images, labels = mixes[int(torch.randint(len(mixes), ()))](images, labels)
        rows = random.current()
        return (images[1:], labels[1:]) if rows and rows.halo else (images, labels)


def own_augmented(images: Tensor, function: Callable[..., object]) -> Tensor:
    """Apply a function of the user to each image of a batch, uint8 (B, C, H, W): a function of a uint8 tensor
    (C, H, W), such as a transform of torchvision's v2, or a transform of albumentations.

    Raises `UsageError` for a result of another shape or type.
    """
    try:
        with _seeded(function):
            changed = _changed_by(function, images)
    except Exception as error:  # code of the user may raise anything
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        hint = "a function of a uint8 tensor (C, H, W), or a transform of torchvision.transforms.v2 or albumentations"
        raise UsageError(
            f"your augment fails for an image uint8 {tuple(images.shape[1:])}", why=why, hint=hint
        ) from error
    for one in changed:
        if not isinstance(one, Tensor) or one.shape != images.shape[1:] or one.dtype != torch.uint8:
            got = (
                f"{str(one.dtype).removeprefix('torch.')} {tuple(one.shape)}"
                if isinstance(one, Tensor)
                else type_of(one)
            )
            why = f"it made {got} of an image uint8 {tuple(images.shape[1:])}"
            if not isinstance(one, Tensor):
                hint = "return the changed image as a tensor"
            elif one.dtype != torch.uint8:
                hint = "leave out the conversion to floats and the normalization, which vitral does afterwards"
            else:
                hint = f"crop to {images.shape[-2]} × {images.shape[-1]} pixels; --image-size sets the size of a run"
            raise UsageError("your augment must keep the shape and the type of an image", why=why, hint=hint)
    return torch.stack(changed).to(images.device)


@contextmanager
def _seeded(function: Callable[..., object]) -> Iterator[None]:
    """Seed the other random generators of Python by torch's, so that a run repeats, and restore them afterwards."""
    seed = int(torch.randint(2**31, ()))
    states = python_random.getstate(), np.random.get_state()
    python_random.seed(seed)
    np.random.seed(seed)
    if hasattr(function, "set_random_seed"):  # albumentations have generators of their own
        function.set_random_seed(seed)
    try:
        yield
    finally:
        python_random.setstate(states[0])
        np.random.set_state(states[1])


def _changed_by(function: Callable[..., Any], images: Tensor) -> list[Any]:
    if type(function).__module__.partition(".")[0] != "albumentations":
        return [function(one) for one in images]
    arrays = images.permute(0, 2, 3, 1).cpu().numpy()
    changed = [function(image=one)["image"] for one in arrays]
    return [  # ToTensorV2 makes a tensor (C, H, W)
        one if isinstance(one, Tensor) else torch.from_numpy(np.ascontiguousarray(one)).permute(2, 0, 1)
        for one in changed
    ]


def random_mirror(images: Tensor) -> Tensor:
    """Mirror each image (B, C, H, W) with probability 1/2."""
    mirrored = random.kept(torch.rand(random.total(len(images)), device=images.device)) < 0.5
    if images.device.type != "cpu":  # reading their number would synchronize with the device
        return torch.where(mirrored[:, None, None, None], images.flip(-1), images)
    rows, places = mirrored.nonzero()[:, 0], torch.arange(len(images))
    places[rows] = torch.arange(len(rows)) + len(images)
    return torch.cat([images, images.index_select(0, rows).flip(-1)]).index_select(0, places)


def random_shift(images: Tensor, most: int) -> Tensor:
    """Shift each image (B, C, H, W) by up to `most` pixels on both axes, with reflection padding.

    Black padding would add edges to learn (arXiv 2404.00498 pads by reflection, too).
    """
    B, _, H, W = images.shape
    down, across = min(most, H - 1), min(most, W - 1)  # reflection padding is limited to the side minus one
    padded = F.pad(images, (across, across, down, down), mode="reflect")
    places = padded.unfold(2, H, 1).unfold(3, W, 1)  # (B, C, row, column, H, W), a view
    drawn = (torch.randint(2 * pad + 1, (random.total(B),), device=images.device) for pad in (down, across))
    row, column = map(random.kept, drawn)
    return places[torch.arange(B, device=images.device), :, row, column]


def random_affine(images: Tensor, degrees: float = 10.0, zoom: float = 0.1) -> Tensor:
    """Rotate each uint8 image (B, C, H, W) by up to `degrees`, and scale each side by a factor from 1 / (1 + `zoom`)
    to 1 + `zoom`, with border padding.
    """
    B, _, H, W = images.shape
    turns = torch.rand(random.total(B), device=images.device)
    zooms = torch.rand(2, random.total(B), device=images.device)
    angle = math.radians(degrees) * (2 * random.kept(turns) - 1)
    down, across = torch.exp(math.log1p(zoom) * (2 * random.kept(zooms, 1) - 1))
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    # From coordinates of the result to those of the image, each from -1 to 1 along a side of any length.
    rows = [
        torch.stack([cos * across, -sin * across * H / W, zero]),
        torch.stack([sin * down * W / H, cos * down, zero]),
    ]
    return in_pieces(_warp, images, torch.stack(rows).permute(2, 0, 1))


def _warp(images: Tensor, matrices: Tensor) -> Tensor:
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, mode="bilinear", padding_mode="border", align_corners=False)
    return moved.round().to(images.dtype)


def random_erase(images: Tensor, probability: float, area: tuple[float, float] = (0.02, 1 / 3)) -> Tensor:
    """Fill a random rectangle with noise in each image with this probability (arXiv 1708.04896, as DeiT uses it)."""
    B, _, H, W = images.shape
    B, device = random.total(B), images.device
    share = torch.empty(B, device=device).uniform_(*area)
    ratio = torch.empty(B, device=device).uniform_(-1.2, 1.2).exp()  # height : width from 0.3 to 3.3
    height = (share * H * W * ratio).sqrt().clamp(1, H).round()
    width = (share * H * W / ratio).sqrt().clamp(1, W).round()
    top = (torch.rand(B, device=device) * (H - height + 1)).floor()
    left = (torch.rand(B, device=device) * (W - width + 1)).floor()
    height = torch.where(torch.rand(B, device=device) < probability, height, 0)
    if device.type == "cpu":
        return _erase_each(images, *(side.int().tolist() for side in (top, left, height, width)))
    top, left, height, width = map(random.kept, (top, left, height, width))
    row, column = torch.arange(H, device=device), torch.arange(W, device=device)
    in_rows = (row >= top[:, None]) & (row < (top + height)[:, None])
    in_columns = (column >= left[:, None]) & (column < (left + width)[:, None])
    inside = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    noise = torch.randn((B, *images.shape[1:]), dtype=images.dtype, device=device)
    return torch.where(inside, random.kept(noise), images)


def _erase_each(images: Tensor, *rectangles: list[int]) -> Tensor:
    """Draw noise for the rectangles alone (tops, lefts, heights, widths of all rows); on a GPU this would take a call
    for each.
    """
    images = images.clone()
    own = random.kept(torch.arange(len(rectangles[0]))).tolist()
    numbers = {row: number for number, row in enumerate(own)}
    for row, (top, left, height, width) in enumerate(zip(*rectangles, strict=True)):
        noise = torch.randn(images.shape[1], height, width, dtype=images.dtype)
        if row in numbers:
            images[numbers[row], :, top : top + height, left : left + width] = noise
    return images
