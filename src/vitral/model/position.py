"""Position schemes, behind two hooks.

A scheme *adds* a table to the tokens at the input (learned, sin-cos) or *rotates* queries and keys in every attention
(rotary); `none` does neither. Schemes are stateless: a learned table is the network's parameter `pos_embed`, the name
that most published weights use.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import UsageError
from vitral.model.config_base import ConfigBase

Grid = tuple[int, int]
"""Rows and columns of patches."""


Rotation = tuple[Tensor, Tensor]
"""Cosines and sines: (N, d), (heads, N, d), or one for each image, (B, 1 or heads, N, d)."""


class Position(Protocol):
    """A position scheme. `prefix` is the number of tokens (class token, registers) before the patches."""

    learned: bool
    """True if the network needs a parameter `pos_embed` of shape (1, [1 +] rows × columns, dim)."""

    def table(self, grid: Grid, dim: int) -> Tensor | None:
        """Computed table to add to the patches, (rows × columns, dim); None without."""

    def rotation(self, grid: Grid, head_dim: int, prefix: int) -> tuple[Tensor, Tensor] | None:
        """Cosines and sines, each (prefix + rows × columns, head_dim), for `rotate`."""


class NoPosition:
    """A bag of patches (paper, Table 8, row "No Pos. Emb.")."""

    learned = False

    def table(self, grid: Grid, dim: int) -> Tensor | None:
        return None

    def rotation(self, grid: Grid, head_dim: int, prefix: int) -> tuple[Tensor, Tensor] | None:
        return None


class LearnedPosition(NoPosition):
    """One learned vector for each position (paper, equation 1)."""

    learned = True


class SinCosPosition(NoPosition):
    """Fixed 2-D sines and cosines, half the width for each axis (MoCo v3; arXiv 2205.01580)."""

    def table(self, grid: Grid, dim: int) -> Tensor:
        if dim % 4:
            raise ValueError(f"sin-cos positions need a width divisible by 4, not {dim}")
        frequencies = 10_000.0 ** -(torch.arange(dim // 4, dtype=torch.float64) / (dim // 4 - 1 or 1))
        rows, columns = (torch.arange(n, dtype=torch.float64)[:, None] * frequencies for n in grid)
        across = columns[None].expand(grid[0], -1, -1)
        down = rows[:, None].expand(-1, grid[1], -1)
        return torch.cat([across.sin(), across.cos(), down.sin(), down.cos()], dim=-1).flatten(0, 1).float()


class RotaryPosition(NoPosition):
    """Axial rotary positions as in DINOv3: patch centers in [-1, 1] on each axis, base 100.

    Coordinates are relative to the image, so another grid needs no resizing. Prefix tokens are not rotated.
    """

    base = 100.0

    def rotation(self, grid: Grid, head_dim: int, prefix: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.cos_sin(self.coordinates(grid, prefix), head_dim)
        return cos.float(), sin.float()

    @staticmethod
    def coordinates(grid: Grid, prefix: int) -> Tensor:
        """Coordinates of each token, (prefix + rows × columns, 2): patch centers, and 0 for the prefix."""
        rows, columns = ((torch.arange(n, dtype=torch.float64) + 0.5) / n * 2 - 1 for n in grid)
        centers = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
        return torch.cat([centers.new_zeros(prefix, 2), centers])  # angle 0: no rotation

    def cos_sin(self, coordinates: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (…, N, head_dim) of tokens at `coordinates` (…, N, 2)."""
        if head_dim % 4:
            raise ValueError(f"rotary positions need a head width divisible by 4, not {head_dim}")
        periods = self.base ** (torch.arange(head_dim // 4, dtype=torch.float64) / (head_dim // 4))
        angles = (2 * math.pi * coordinates[..., None] / periods.to(coordinates)).flatten(-2)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


@dataclass(frozen=True)
class Rope(ConfigBase):
    """Rotary positions with integer coordinates, with or without a learned table: EVA-02, RoPE-ViT, PE.

    A patch is at (row + `offset`, column + `offset`), rescaled to the `reference` grid if given. In the axial kind each
    axis has half of the angles, with frequencies `base`^(-i / (d / 4)). In the mixed kind every head of every block has
    learned frequencies for both axes (arXiv 2403.13298).
    """

    kind: Literal["axial", "mixed"] = "axial"
    base: float = 10_000.0  # axial only
    offset: float = 0.0
    reference: tuple[int, int] | None = None  # rows and columns of the pre-training grid
    columns_first: bool = False  # the first half of the angles is for the column
    adjacent: bool = True  # pairs are (2i, 2i + 1); otherwise (i, i + d/2), as in DINOv3

    def __post_init__(self) -> None:
        self.check_kinds()
        if self.base <= 1 or min(self.reference or (1,)) < 1:
            raise UsageError(f"no rotary positions have base {self.base:g} and reference {self.reference}")

    def coordinates(self, grid: Grid) -> Tensor:
        """First and second coordinate of each patch, (rows × columns, 2), in double precision."""
        scaled = self.reference or grid
        axes = [(torch.arange(n).double() + self.offset) / n * to for n, to in zip(grid, scaled, strict=True)]
        coordinates = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, 1)
        return coordinates.flip(-1) if self.columns_first else coordinates

    def rotation(self, grid: Grid, head_dim: int, prefix: int) -> tuple[Tensor, Tensor]:
        """Axial kind: cosines and sines, each (prefix + rows × columns, head_dim). The prefix is not rotated."""
        if head_dim % 4:
            raise UsageError(f"rotary positions need a head width divisible by 4, not {head_dim}")
        frequencies = self.base ** -(torch.arange(head_dim // 4).double() / (head_dim // 4))
        angles = (self.coordinates(grid)[..., None] * frequencies).flatten(-2)
        return self._cos_sin(angles, prefix)

    def learned_rotation(self, frequencies: Tensor, grid: Grid, prefix: int) -> tuple[Tensor, Tensor]:
        """Mixed kind: cosines and sines of one block, each (heads, prefix + rows × columns, head_dim).

        `frequencies` (2, heads, head_dim / 2) are for the first and the second coordinate.
        """
        first, second = self.coordinates(grid).to(frequencies)[None].unbind(-1)
        angles = first[..., None] * frequencies[0][:, None] + second[..., None] * frequencies[1][:, None]
        return self._cos_sin(angles, prefix)

    def _cos_sin(self, angles: Tensor, prefix: int) -> tuple[Tensor, Tensor]:
        angles = F.pad(angles, (0, 0, prefix, 0))
        angles = angles.repeat_interleave(2, -1) if self.adjacent else torch.cat([angles, angles], dim=-1)
        return angles.cos().float(), angles.sin().float()


def mixed_frequencies_(p: Tensor) -> None:
    """Initialize frequencies (2, …, d / 2) of the mixed kind: base 10, a random rotation of the axes in each head."""
    half = p.shape[-1] // 2
    sizes = 10.0 ** -(torch.arange(half) / half)
    turned = 2 * math.pi * torch.rand(*p.shape[1:-1], 1)
    for axis, function in zip(p, (torch.cos, torch.sin), strict=True):
        axis.copy_(torch.cat([sizes * function(turned), sizes * function(turned + math.pi / 2)], dim=-1))


def resize_matrix(old: Grid, new: Grid) -> Tensor:
    """Matrix (new positions, old positions) that resizes a table to another grid: bilinear, antialiased, with cell
    centers aligned.

    The backward of a matrix product is deterministic. That of `F.interpolate` on a GPU is not, so a resumed run would
    differ in its bits.
    """
    return torch.kron(*(_resize_axis(*sizes) for sizes in zip(old, new, strict=True)))


def _resize_axis(old: int, new: int) -> Tensor:
    each = torch.eye(old, dtype=torch.float64)[:, None, None]
    matrix = F.interpolate(each, size=(1, new), mode="bilinear", antialias=True)[:, 0, 0].T
    return matrix.clone(memory_format=torch.contiguous_format)  # `kron` refuses the strides of a side of 1


def rotate(x: Tensor, rotation: Rotation, adjacent: bool = False) -> Tensor:
    """Rotate pairs (i, i + d/2) of x (B, heads, N, d), or (2i, 2i + 1) if `adjacent`, by the angle of the position."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    if adjacent:
        first, second = x[..., ::2], x[..., 1::2]
        return x * cos + torch.stack([-second, first], dim=-1).flatten(-2) * sin
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def rotation_at(rotation: Rotation, places: Tensor) -> Rotation:
    """Rotations (B, 1 or heads, n, d) of the tokens with indices `places` (B, n) in each image."""
    cos, sin = (part[None, places] if part.ndim == 2 else part[:, places] for part in rotation)
    return cos.transpose(0, 1), sin.transpose(0, 1)


POSITIONS: dict[str, Position] = {
    "none": NoPosition(),
    "learned": LearnedPosition(),
    "sincos": SinCosPosition(),
    "rotary": RotaryPosition(),
}


class PositionTables:
    """Computed positions of one network, cached by grid and device."""

    def __init__(self, position: str, rope: Rope | None, dim: int, heads: int, prefix: int):
        self.position, self.rotary = POSITIONS[position], rope or POSITIONS[position]
        self.dim, self.head_dim, self.prefix = dim, dim // heads, prefix
        self.cache: dict[tuple[object, ...], object] = {}

    def added(self, grid: Grid, device: torch.device) -> Tensor | None:
        """Table to add to the patches, (rows × columns, D); None without."""

        def make() -> Tensor | None:
            table = self.position.table(grid, self.dim)
            return table if table is None else table.to(device)

        return self._once(("added", grid, device), make)

    def rotation(self, grid: Grid, device: torch.device) -> Rotation | None:
        """Rotation that all blocks share; None without."""

        def make() -> Rotation | None:
            rotation = self.rotary.rotation(grid, self.head_dim, self.prefix)
            return rotation and (rotation[0].to(device), rotation[1].to(device))

        return self._once(("rotation", grid, device), make)

    def resized(self, table: Tensor, old: Grid, new: Grid) -> Tensor:
        """Resize a learned table (1, rows × columns, D) to another grid."""

        def make() -> Tensor:
            return resize_matrix(old, new).to(table)

        with torch.autocast(table.device.type, enabled=False):  # positions stay fp32, as on the original grid
            return self._once(("resizing", new, table.device, table.dtype), make) @ table

    def _once(self, key: tuple[object, ...], make: Callable[[], object]) -> Any:
        """Cached result of `make`, never an inference-mode tensor, which backward cannot use."""
        if torch.compiler.is_exporting():
            return make()  # a fake tensor of this export
        if key not in self.cache:
            with torch.inference_mode(False):
                self.cache[key] = make()
        return self.cache[key]
