"""The fourteen operations of TrivialAugment (arXiv 2103.10158) and RandAugment (arXiv 1909.13719) on batches of uint8
pictures: each picture has an operation and a strength of its own, all without waiting for the device.

Strengths are torchvision's (31 steps), and so are the results, picture by picture; torchvision draws one operation a
call, for a whole batch, and asks a GPU for each of its numbers (docs/log.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BINS = 31
"""Steps of strength, from none to the most."""

Operation = Callable[[Tensor, Tensor], Tensor]
"""Pictures (n, C, H, W) uint8 and a strength for each (n,) to pictures of the same shape."""


class Most(NamedTuple):
    """The strongest of an operation."""

    strength: float
    of_width: bool = False  # a share of the picture's side, else as it is


TRIVIAL: Mapping[str, Most] = {
    "shear-x": Most(0.99), "shear-y": Most(0.99), "translate-x": Most(32.0), "translate-y": Most(32.0),
    "rotate": Most(135.0), "brightness": Most(0.99), "colour": Most(0.99), "contrast": Most(0.99),
    "sharpness": Most(0.99), "posterize": Most(6.0), "solarize": Most(1.0), "identity": Most(0.0),
    "autocontrast": Most(0.0), "equalize": Most(0.0),
}  # fmt: skip
"""TrivialAugment's wide space."""
RANDOM: Mapping[str, Most] = {
    **TRIVIAL,
    **dict.fromkeys(("shear-x", "shear-y"), Most(0.3)),
    **dict.fromkeys(("translate-x", "translate-y"), Most(150 / 331, of_width=True)),
    **dict.fromkeys(("brightness", "colour", "contrast", "sharpness"), Most(0.9)),
    "rotate": Most(30.0),
    "posterize": Most(4.0),
}
"""RandAugment's."""


def trivial_augment(images: Tensor) -> Tensor:
    """One operation for each picture (B, C, H, W) uint8, of a random strength."""
    return _one_each(images, TRIVIAL, torch.randint(BINS, (len(images),), device=images.device))


def rand_augment(images: Tensor, operations: int, magnitude: int) -> Tensor:
    """So many operations for each picture (B, C, H, W) uint8, one after the other, of strength `magnitude` of 30."""
    steps = torch.full((len(images),), magnitude, device=images.device)
    for _ in range(operations):
        images = _one_each(images, RANDOM, steps)
    return images


def _one_each(images: Tensor, space: Mapping[str, Most], steps: Tensor) -> Tensor:
    """A random operation for each picture, each as often as the others, at its step of strength (B,)."""
    B, device = len(images), images.device
    order = torch.rand(B, device=device).argsort()
    signs = 1 - 2 * torch.randint(2, (B,), device=device)
    shares = signs * steps / (BINS - 1)
    # Of sizes that differ by one at most; which are larger is drawn, so that none is favoured.
    drawn = int(torch.randint(len(space), ()))
    bounds = [(number * B + drawn) // len(space) for number in range(len(space) + 1)]
    shuffled = images.index_select(0, order)  # of rows seven times as fast as images[order], on a processor
    groups = {name: (shuffled[a:b], shares[a:b]) for name, (a, b) in zip(space, pairwise(bounds), strict=True)}
    moved = [_matrices(name, *groups.pop(name), most) for name, most in space.items() if name in MATRICES]
    parts = [in_pieces(move, shuffled[: bounds[len(moved)]], torch.cat(moved))]
    for name, (pictures, share) in groups.items():
        parts.append(in_pieces(OPERATIONS[name], pictures, share * space[name].strength))
    return torch.cat(parts).index_select(0, order.argsort())


def in_pieces(function: Operation, images: Tensor, numbers: Tensor) -> Tensor:
    """What the function makes of pictures (n, C, H, W) and a row of numbers for each: on a processor of so many at a
    time as its caches hold, as floats too, else of all at once.
    """
    count = max(1, _PIECE // max(1, images[:1].numel()))
    if images.device.type != "cpu" or len(images) <= count:
        return function(images, numbers)
    return torch.cat([function(*piece) for piece in zip(images.split(count), numbers.split(count), strict=True)])


_PIECE = 1 << 17
"""Pixels, all channels counted: half a megabyte as floats."""


def _matrices(name: str, pictures: Tensor, shares: Tensor, most: Most) -> Tensor:
    side = pictures.shape[-2 if name == "translate-y" else -1]
    return MATRICES[name](shares * most.strength * (side if most.of_width else 1), *pictures.shape[-2:])


# ---------------------------------------------------------------- what moves pixels


def move(images: Tensor, matrices: Tensor) -> Tensor:
    """Each pixel of a result is the nearest one to where its picture's matrix (n, 2, 3) leads from there, counted in
    pixels from the picture's middle; black outside.
    """
    if not len(images):
        return images
    H, W = images.shape[-2:]
    x, y = matrices.unbind(1)  # what a place's column and row follow from
    x = torch.stack([x[:, 0], x[:, 1] * (H / W), x[:, 2] * (2 / W)], dim=1)
    y = torch.stack([y[:, 0] * (W / H), y[:, 1], y[:, 2] * (2 / H)], dim=1)
    grid = F.affine_grid(torch.stack([x, y], dim=1), list(images.shape), align_corners=False)
    moved = F.grid_sample(images.float(), grid, mode="nearest", padding_mode="zeros", align_corners=False)
    return moved.to(images.dtype)


def _matrix(*entries: Tensor | float, like: Tensor) -> Tensor:
    """Matrices (n, 2, 3) of six entries, row by row; numbers are the same in all."""
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
    "shear-x": _shear_x, "shear-y": _shear_y, "translate-x": _translate_x, "translate-y": _translate_y,
    "rotate": _rotate,
}  # fmt: skip
"""Operations that move pixels: strengths (n,), signed, and a picture's height and width, to matrices of `move`."""


# ---------------------------------------------------------------- what changes colours


def _blend(images: Tensor, other: Tensor | float, strength: Tensor) -> Tensor:
    """Away from `other` by 1 + strength; of what is outside 0 … 255, the nearest."""
    factor = (1 + strength)[:, None, None, None]
    return (images * factor + other * (1 - factor)).clamp(0, 255).to(images.dtype)


def _grey(images: Tensor) -> Tensor:
    """Luma (n, 1, H, W), rounded down; of grey pictures, themselves."""
    if images.shape[1] != 3:
        return images.float()
    red, green, blue = images.float().split(1, dim=1)
    return (0.2989 * red + 0.587 * green + 0.114 * blue).floor()


def brightness(images: Tensor, strength: Tensor) -> Tensor:
    """Brighter, or where the strength is below 0, darker."""
    return _blend(images, 0.0, strength)


def colour(images: Tensor, strength: Tensor) -> Tensor:
    """More colourful, or nearer to grey."""
    return images if images.shape[1] != 3 else _blend(images, _grey(images), strength)


def contrast(images: Tensor, strength: Tensor) -> Tensor:
    """Away from the mean grey, or nearer to it."""
    return _blend(images, _grey(images).mean((1, 2, 3), keepdim=True), strength)


def sharpness(images: Tensor, strength: Tensor) -> Tensor:
    """Away from the picture as a 3 × 3 filter smooths it, or nearer to that; the outermost pixels stay."""
    if min(images.shape[-2:]) <= 2:
        return images
    pixels = images.float()
    rows = pixels[..., :-2, :] + pixels[..., 1:-1, :] + pixels[..., 2:, :]
    neighbours = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    inner = pixels[..., 1:-1, 1:-1]
    smooth = ((neighbours + 4 * inner) / 13).round()
    changed = (inner - (smooth - inner) * strength[:, None, None, None]).clamp(0, 255)
    return F.pad(changed, (1, 1, 1, 1)).to(images.dtype).where(_inside(images), images)


def _inside(images: Tensor) -> Tensor:
    """(H, W), True but for the outermost pixels."""
    H, W = images.shape[-2:]
    row, column = (torch.arange(side, device=images.device) for side in (H, W))
    return ((row > 0) & (row < H - 1))[:, None] & ((column > 0) & (column < W - 1))


def posterize(images: Tensor, strength: Tensor) -> Tensor:
    """Without the lowest bits, so many as the strength, rounded."""
    lost = strength.abs().round().to(torch.uint8)[:, None, None, None]
    return (images >> lost) << lost


def solarize(images: Tensor, strength: Tensor) -> Tensor:
    """What is brighter than a threshold, which falls with the strength, turned into its negative."""
    threshold = (255 * (1 - strength.abs()))[:, None, None, None]
    return torch.where(images >= threshold, 255 - images, images)


def identity(images: Tensor, strength: Tensor) -> Tensor:
    """As they are."""
    return images


def autocontrast(images: Tensor, strength: Tensor) -> Tensor:
    """Each channel stretched to 0 … 255, unless it is all one value."""
    least, most = (function(images.flatten(2), 2).float() for function in (torch.amin, torch.amax))
    same = least == most
    least, span = least.masked_fill(same, 0.0), ((most - least) * (1 / 255)).masked_fill(same, 1.0)
    return ((images - least[..., None, None]) / span[..., None, None]).clamp(0, 255).to(images.dtype)


def equalize(images: Tensor, strength: Tensor) -> Tensor:
    """Each channel so that its values are about equally frequent, by Pillow's rule; what that leaves, as it is."""
    pixels = images.flatten(2).long()
    counts = torch.zeros(*images.shape[:2], 256, dtype=torch.long, device=images.device)
    counts.scatter_add_(2, pixels, torch.ones_like(pixels))
    up_to = counts.cumsum(2)
    brightest = counts.gather(2, up_to.argmax(2, keepdim=True))
    step = (pixels.shape[2] - brightest) // 255
    table = (((up_to - counts) + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(step == 0, pixels, table.gather(2, pixels)).view_as(images).to(images.dtype)


OPERATIONS: Mapping[str, Operation] = {
    "brightness": brightness, "colour": colour, "contrast": contrast, "sharpness": sharpness, "posterize": posterize,
    "solarize": solarize, "identity": identity, "autocontrast": autocontrast, "equalize": equalize,
}  # fmt: skip
"""The others, by name."""
