"""Preprocessing in the graph: from an image of any size to probabilities, with the same bytes as in training.

torch resizes bytes in integers: each output is a sum of pixels times rounded weights, shifted and clamped to a byte,
first along rows, then along columns. Here each of the two passes is a product with a matrix that depends on the image's
size. Integers below 2⁵³ are exact in double precision, so the bytes are the same. Cropping and filling need no extra
step: the matrix has only those rows of the resized image that the network reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError


class Filter(NamedTuple):
    """An interpolation kernel."""

    support: float
    """Half of the width, in pixels of the smaller of the two images."""
    weight: Callable[[Tensor], Tensor]


def _cubic(x: Tensor) -> Tensor:
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


FILTERS = {"bilinear": Filter(1.0, lambda x: (1 - x).clamp_min(0)), "bicubic": Filter(2.0, _cubic)}
"""Interpolation → kernel, a function of the distance. Pillow's other filters depend on its version: it resizes rows or
columns first, whichever is faster.
"""


def check_exact(preprocessing: Preprocessing, hint: str) -> None:
    """Raise `UsageError` for an interpolation that is not exported, and for images of more than a byte a channel."""
    if preprocessing.levels is not None:
        why = "it reads images of 16 bits by --levels, and a graph or a browser takes 8 bits of them"
        raise UsageError("this preprocessing cannot be exported", why=why, hint=hint)
    if not preprocessing.antialias or preprocessing.interpolation not in FILTERS:
        antialias = "" if preprocessing.antialias else " without antialias"
        how = f"{preprocessing.interpolation} interpolation{antialias}"
        why = f"it resizes by {how}; bilinear and bicubic with antialias can be exported"
        raise UsageError("this preprocessing cannot be exported", why=why, hint=hint)


class WithPreprocessing(nn.Module):
    """A network with its preprocessing: uint8 (H, W, C) to probabilities (K,)."""

    factor: Tensor
    shift: Tensor
    fill: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing, temperature: float = 1.0):
        super().__init__()
        check_exact(preprocessing, hint="leave out --with-preprocessing")
        self.network, self.preprocessing, self.temperature = network, preprocessing, temperature
        of_channels = {
            "factor": [1 / (255 * std) for std in preprocessing.std],
            "shift": [-mean / std for mean, std in zip(preprocessing.mean, preprocessing.std, strict=True)],
        }
        for name, values in of_channels.items():
            self.register_buffer(name, torch.tensor(values)[:, None, None])
        fill = preprocessing.mean_color if preprocessing.resize == "letterbox" else [0] * preprocessing.channels
        self.register_buffer("fill", torch.tensor(fill, dtype=torch.float64)[:, None, None])

    def forward(self, image: Tensor) -> Tensor:
        bytes_ = self.geometry(image)
        images = (bytes_.float() * self.factor + self.shift)[None]
        probabilities: Tensor = (self.network(images) / self.temperature).softmax(1)[0]
        return probabilities

    def geometry(self, image: Tensor) -> Tensor:
        """Resize and crop as `Preprocessing.geometry` does: float64 (C, height, width)."""
        height, width = self.preprocessing.image_size
        pixels = image.permute(2, 0, 1).double()
        rows, columns = (torch.ones_like(pixels[0].select(1 - axis, 0)).sum() for axis in (0, 1))
        (tall, top), (wide, left) = placed(self.preprocessing, rows, columns)
        along_rows, inner_columns, unit_of_rows = self.matrix(image.shape[1], columns, wide, left, width)
        along_columns, inner_rows, unit_of_columns = self.matrix(image.shape[0], rows, tall, top, height)
        resized = _to_bytes(pixels @ along_rows.T, unit_of_rows)
        resized = _to_bytes(along_columns @ resized, unit_of_columns)
        return torch.where(inner_rows[:, None] & inner_columns[None, :], resized, self.fill)

    def matrix(
        self, count: int, length: Tensor, size: Tensor, start: Tensor, wanted: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the resizing matrix of one axis, from `length` to `size`, for `wanted` rows from `start`: integer
        weights (wanted, count), the mask of rows that are in the image, and the integer that represents a weight of 1.
        """
        filter = FILTERS[self.preprocessing.interpolation]
        wanted_rows = torch.arange(wanted, dtype=torch.float64) + start
        inside = (wanted_rows >= 0) & (wanted_rows < size)
        rows = torch.cat([torch.zeros(1, dtype=torch.float64), torch.where(inside, wanted_rows, 0.0)])
        scale = length / size
        stretch = scale.clamp_min(1.0)
        center = (scale * (rows + 0.5))[:, None]
        pixels = torch.arange(count, dtype=torch.float64)[None, :]
        support = filter.support * stretch
        among = (pixels >= (center - support + 0.5).floor()) & (pixels < (center + support + 0.5).floor())
        weights = torch.where(among, filter.weight(((pixels - center + 0.5) * (1 / stretch)).abs()), 0.0)
        weights = weights / weights.sum(1, keepdim=True)
        # Row 0 has the largest weight of all rows, or an equal one.
        unit = _unit(weights.max())
        weights = weights[1:]
        return (weights * unit + 0.5 * weights.sign()).trunc(), inside, unit


def _unit(largest: Tensor) -> Tensor:
    """Return 2ⁿ, the factor by which torch scales its weights so that the largest one fills 16 bits."""
    powers = 2.0 ** torch.arange(1, 23, dtype=torch.float64)
    fits = ((0.5 + largest * powers).trunc() < 2.0**15).double()
    return 2.0 ** fits.sum()


def _to_bytes(sums: Tensor, unit: Tensor) -> Tensor:
    """Round sums of pixels times weights in units of `unit`, and clamp them to bytes."""
    return (sums / unit + 0.5).floor().clamp(0, 255)


def placed(own: Preprocessing, rows: Tensor, columns: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return for each axis the resized size of an image of `rows` × `columns` and the start of the network's input in
    it, negative if it is padded. The tensor form of `Preprocessing.geometry`.
    """
    lengths = rows, columns
    sizes = _sizes(own, rows, columns)
    starts = [_start(own, size, float(wanted)) for size, wanted in zip(sizes, own.image_size, strict=True)]
    if own.resize_size is not None:
        return (sizes[0], starts[0]), (sizes[1], starts[1])
    same = (rows == own.image_size[0]) & (columns == own.image_size[1])  # not resized
    sizes = [torch.where(same, length, size) for length, size in zip(lengths, sizes, strict=True)]
    starts = [torch.where(same, 0.0, start) for start in starts]
    return (sizes[0], starts[0]), (sizes[1], starts[1])


def _sizes(own: Preprocessing, rows: Tensor, columns: Tensor) -> list[Tensor]:
    """Return the resized sizes of both axes."""
    lengths = rows, columns
    if own.resize == "stretch":
        return [
            torch.full_like(n, float(size)) for n, size in zip(lengths, own.resize_size or own.image_size, strict=True)
        ]
    if own.resize_size is not None:
        tall, wide = own.resize_size
        if own.resize == "crop" and tall == wide:
            short = torch.full_like(rows, float(tall))
            upright = columns <= rows
            return [
                torch.where(upright, (tall * rows / columns).trunc(), short),
                torch.where(upright, short, (tall * columns / rows).trunc()),
            ]
        both = rows / tall, columns / wide
        ratio = torch.minimum(*both) if own.resize == "crop" else torch.maximum(*both)
        return [(n / ratio).round().clamp_min(1.0) for n in lengths]
    height, width = own.image_size
    both = height / rows, width / columns
    if own.resize == "crop":
        scale = torch.maximum(*both) / own.crop_fraction
        return [(n * scale).round().clamp_min(float(least)) for n, least in zip(lengths, own.image_size, strict=True)]
    scale = torch.minimum(*both)
    return [(n * scale).round().clamp(1.0, float(most)) for n, most in zip(lengths, own.image_size, strict=True)]


def _start(own: Preprocessing, size: Tensor, wanted: float) -> Tensor:
    """Return the start of the network's input along an axis of this size: centered, negative if it is padded."""
    middle = (size - wanted) / 2
    cut = middle.floor() if own.resize_size is not None and own.center == "floor" else middle.round()
    return torch.where(size >= wanted, cut, -((wanted - size) / 2).floor())
