"""The 14 augmentation ops of TrivialAugment (arXiv 2103.10158) and RandAugment (arXiv 1909.13719) on uint8 batches.

Each image has its own operation and strength, without synchronizing with the device. Strengths (31 steps) and results
equal torchvision's, image by image. torchvision draws one operation per call, for a whole batch, and synchronizes with
a GPU for each of its numbers (docs/log/training-speed.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.kernels import random

BINS = 31
"""Steps of strength, from none to the maximum."""

Operation = Callable[[Tensor, Tensor], Tensor]
"""Images (n, C, H, W) uint8 and a strength for each (n,) to images of the same shape."""


class Limit(NamedTuple):
    """The maximum strength of an operation."""

    strength: float
    of_width: bool = False  # a share of the image's side instead of an absolute value


TRIVIAL: Mapping[str, Limit] = {
    "shear-x": Limit(0.99),
    "shear-y": Limit(0.99),
    "translate-x": Limit(32.0),
    "translate-y": Limit(32.0),
    "rotate": Limit(135.0),
    "brightness": Limit(0.99),
    "color": Limit(0.99),
    "contrast": Limit(0.99),
    "sharpness": Limit(0.99),
    "posterize": Limit(6.0),
    "solarize": Limit(1.0),
    "identity": Limit(0.0),
    "autocontrast": Limit(0.0),
    "equalize": Limit(0.0),
}
"""TrivialAugment's wide space."""
RANDOM: Mapping[str, Limit] = {
    **TRIVIAL,
    **dict.fromkeys(("shear-x", "shear-y"), Limit(0.3)),
    **dict.fromkeys(("translate-x", "translate-y"), Limit(150 / 331, of_width=True)),
    **dict.fromkeys(("brightness", "color", "contrast", "sharpness"), Limit(0.9)),
    "rotate": Limit(30.0),
    "posterize": Limit(4.0),
}
"""RandAugment's space."""


def trivial_augment(images: Tensor) -> Tensor:
    """Apply one random operation of random strength to each image (B, C, H, W) uint8."""
    return _one_each(images, TRIVIAL, torch.randint(BINS, (random.total(len(images)),), device=images.device))


def rand_augment(images: Tensor, operations: int, magnitude: int) -> Tensor:
    """Apply `operations` random operations in sequence to each image (B, C, H, W) uint8, at `magnitude` of 30."""
    steps = torch.full((random.total(len(images)),), magnitude, device=images.device)
    for _ in range(operations):
        images = _one_each(images, RANDOM, steps)
    return images


def _one_each(images: Tensor, space: Mapping[str, Limit], steps: Tensor) -> Tensor:
    """Apply a random operation to each image at its step of strength (B,); operations are equally frequent.

    Steps belong to places in the drawn order.
    """
    B, device = random.total(len(images)), images.device
    order = torch.rand(B, device=device).argsort()
    signs = 1 - 2 * torch.randint(2, (B,), device=device)
    shares = signs * steps / (BINS - 1)
    # Group sizes differ by one at most; the larger groups are drawn at random, so that no operation is favored.
    drawn = int(torch.randint(len(space), ()))
    bounds = [(number * B + drawn) // len(space) for number in range(len(space) + 1)]
    if random.current():
        places, order = random.held(order)
        shares = shares[places]
        bounds = torch.searchsorted(places, torch.tensor(bounds, device=device)).tolist()
    shuffled = images.index_select(0, order)  # seven times as fast as images[order] on a CPU
    groups = {name: (shuffled[a:b], shares[a:b]) for name, (a, b) in zip(space, pairwise(bounds), strict=True)}
    moved = [_matrices(name, *groups.pop(name), limit) for name, limit in space.items() if name in MATRICES]
    parts = [in_pieces(move, shuffled[: bounds[len(moved)]], torch.cat(moved))]
    for name, (group, share) in groups.items():
        parts.append(in_pieces(OPERATIONS[name], group, share * space[name].strength))
    return torch.cat(parts).index_select(0, order.argsort())


def in_pieces(function: Operation, images: Tensor, numbers: Tensor) -> Tensor:
    """Apply a function to images (n, C, H, W) and a row of numbers for each: on a CPU in pieces that fit its caches as
    floats, else in one call.
    """
    count = max(1, _PIECE // max(1, images[:1].numel()))
    if images.device.type != "cpu" or len(images) <= count:
        return function(images, numbers)
    return torch.cat([function(*piece) for piece in zip(images.split(count), numbers.split(count), strict=True)])


_PIECE = 1 << 17
"""Values per piece, over all channels: half a megabyte as floats."""


def _matrices(name: str, images: Tensor, shares: Tensor, limit: Limit) -> Tensor:
    side = images.shape[-2 if name == "translate-y" else -1]
    return MATRICES[name](shares * limit.strength * (side if limit.of_width else 1), *images.shape[-2:])


# ---------------------------------------------------------------- geometric operations


def move(images: Tensor, matrices: Tensor) -> Tensor:
    """Warp each image by its matrix (n, 2, 3) from output to input coordinates, nearest neighbor, black outside.

    Coordinates are pixels from the image's center.
    """
    if not len(images):
        return images
    H, W = images.shape[-2:]
    x, y = matrices.unbind(1)  # rows of the matrices: for the column and for the row of a pixel
    x = torch.stack([x[:, 0], x[:, 1] * (H / W), x[:, 2] * (2 / W)], dim=1)
    y = torch.stack([y[:, 0] * (W / H), y[:, 1], y[:, 2] * (2 / H)], dim=1)
    grid = F.affine_grid(torch.stack([x, y], dim=1), list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return moved.to(images.dtype)


def _matrix(*entries: Tensor | float, like: Tensor) -> Tensor:
    """Matrices (n, 2, 3) of six entries, row by row; a number is the same in all matrices."""
    columns = [entry if isinstance(entry, Tensor) else torch.full_like(like, entry) for entry in entries]
    return torch.stack(columns, dim=1).view(-1, 2, 3)


def _shear_x(by: Tensor, height: int, width: int) -> Tensor:
    return _matrix(1.0, by, by * (height / 2), 0.0, 1.0, 0.0, like=by)


def _shear_y(by: Tensor, height: int, width: int) -> Tensor:
    return _matrix(1.0, 0.0, 0.0, by, 1.0, by * (width / 2), like=by)


def _translate_x(by: Tensor, height: int, width: int) -> Tensor:
    return _matrix(1.0, 0.0, -by.trunc(), 0.0, 1.0, 0.0, like=by)


def _translate_y(by: Tensor, height: int, width: int) -> Tensor:
    return _matrix(1.0, 0.0, 0.0, 0.0, 1.0, -by.trunc(), like=by)


def _rotate(by: Tensor, height: int, width: int) -> Tensor:
    angle = by * (math.pi / 180)
    cos, sin = angle.cos(), angle.sin()
    return _matrix(cos, -sin, 0.0, sin, cos, 0.0, like=by)


MATRICES: Mapping[str, Callable[[Tensor, int, int], Tensor]] = {
    "shear-x": _shear_x,
    "shear-y": _shear_y,
    "translate-x": _translate_x,
    "translate-y": _translate_y,
    "rotate": _rotate,
}
"""Geometric operations: signed strengths (n,) and an image's height and width to matrices for `move`."""


# ---------------------------------------------------------------- color operations


def _blend(images: Tensor, other: Tensor | float, strength: Tensor) -> Tensor:
    """Extrapolate from `other` by a factor of 1 + strength, clamped to 0 … 255."""
    factor = (1 + strength)[:, None, None, None]
    return (images * factor + other * (1 - factor)).clamp(0, 255).to(images.dtype)


def _gray(images: Tensor) -> Tensor:
    """Luma (n, 1, H, W), rounded down; gray images stay as they are."""
    if images.shape[1] != 3:
        return images.float()
    red, green, blue = images.float().split(1, dim=1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).floor()


def brightness(images: Tensor, strength: Tensor) -> Tensor:
    """Brighten; darken for a negative strength."""
    return _blend(images, 0.0, strength)


def color(images: Tensor, strength: Tensor) -> Tensor:
    """Increase saturation; decrease it for a negative strength."""
    return images if images.shape[1] != 3 else _blend(images, _gray(images), strength)


def contrast(images: Tensor, strength: Tensor) -> Tensor:
    """Increase contrast around the mean gray; decrease it for a negative strength."""
    return _blend(images, _gray(images).mean((1, 2, 3), keepdim=True), strength)


def sharpness(images: Tensor, strength: Tensor) -> Tensor:
    """Sharpen against a 3 × 3 smoothing filter; smooth for a negative strength. Border pixels stay."""
    if min(images.shape[-2:]) <= 2:
        return images
    pixels = images.float()
    rows = pixels[..., :-2, :] + pixels[..., 1:-1, :] + pixels[..., 2:, :]
    neighbors = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = pixels[..., 1:-1, 1:-1]
    smooth = ((neighbors + 4 * inner) / 13).round()
    changed = (inner - (smooth - inner) * strength[:, None, None, None]).clamp(0, 255)
    return F.pad(changed, (1, 1, 1, 1)).to(images.dtype).where(_inside(images), images)


def _inside(images: Tensor) -> Tensor:
    """(H, W), True except for border pixels."""
    H, W = images.shape[-2:]
    row, column = (torch.arange(side, device=images.device) for side in (H, W))
    return ((row > 0) & (row < H - 1))[:, None] & ((column > 0) & (column < W - 1))


def posterize(images: Tensor, strength: Tensor) -> Tensor:
    """Clear the lowest bits; their number is the strength, rounded."""
    lost = strength.abs().round().to(torch.uint8)[:, None, None, None]
    return (images >> lost) << lost


def solarize(images: Tensor, strength: Tensor) -> Tensor:
    """Invert values at or above a threshold, which falls with the strength."""
    threshold = (255 * (1 - strength.abs()))[:, None, None, None]
    return torch.where(images >= threshold, 255 - images, images)


def identity(images: Tensor, strength: Tensor) -> Tensor:
    """Return the images unchanged."""
    return images


def autocontrast(images: Tensor, strength: Tensor) -> Tensor:
    """Stretch each channel to 0 … 255, unless it is constant."""
    least, most = (function(images.flatten(2), 2).float() for function in (torch.amin, torch.amax))
    same = least == most
    least, span = least.masked_fill(same, 0.0), ((most - least) * (1 / 255)).masked_fill(same, 1.0)
    return ((images - least[..., None, None]) / span[..., None, None]).clamp(0, 255).to(images.dtype)


def equalize(images: Tensor, strength: Tensor) -> Tensor:
    """Equalize each channel's histogram by Pillow's rule; channels that the rule skips stay as they are."""
    pixels = images.flatten(2).long()
    counts = torch.zeros(*images.shape[:2], 256, dtype=torch.long, device=images.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    up_to = counts.cumsum(2)
    brightest = counts.gather(2, up_to.argmax(2, keepdim=True))
    step = (pixels.shape[2] - brightest) // 255
    table = (((up_to - counts) + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(step == 0, pixels, table.gather(2, pixels)).view_as(images).to(images.dtype)


OPERATIONS: Mapping[str, Operation] = {
    "brightness": brightness,
    "color": color,
    "contrast": contrast,
    "sharpness": sharpness,
    "posterize": posterize,
    "solarize": solarize,
    "identity": identity,
    "autocontrast": autocontrast,
    "equalize": equalize,
}
"""The other operations, by name."""
