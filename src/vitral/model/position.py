"""Where a patch is: the position schemes, behind two hooks.

A scheme may *add* something to the tokens at the input (learned, sin-cos) or *rotate* queries and keys in every
attention (rotary); `none` does neither. Schemes are stateless: a learned table is the network's own parameter
`pos_embed`, under the name that most published weights use.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

Grid = tuple[int, int]
"""Rows and columns of patches."""


class Position(Protocol):
    """One scheme. `prefix` counts the tokens (class token, registers) that stand before the patches."""

    learned: bool
    """Whether the network must own a table `pos_embed` of shape (1, [1 +] rows × columns, dim)."""

    def table(self, grid: Grid, dim: int) -> Tensor | None:
        """What is added to the patches, (rows × columns, dim), when it is computed and not learned."""

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
    """One learned vector a position (paper, equation 1)."""

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
    """Axial rotary positions as DINOv3 has them: coordinates of patch centres in [-1, 1] per axis, base 100.

    Because coordinates are relative to the picture, another grid needs no resizing. Prefix tokens are not rotated.
    """

    base = 100.0

    def rotation(self, grid: Grid, head_dim: int, prefix: int) -> tuple[Tensor, Tensor]:
        cos, sin = self.turned(self.places(grid, prefix), head_dim)
        return cos.float(), sin.float()

    @staticmethod
    def places(grid: Grid, prefix: int) -> Tensor:
        """Row and column of each token, (prefix + rows × columns, 2): centres of patches, and 0 for the prefix."""
        rows, columns = ((torch.arange(n, dtype=torch.float64) + 0.5) / n * 2 - 1 for n in grid)
        centres = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1).flatten(0, 1)
        return torch.cat([centres.new_zeros(prefix, 2), centres])  # angle 0 leaves a token as it is

    def turned(self, places: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (…, N, head_dim) for tokens that stand at `places` (…, N, 2)."""
        if head_dim % 4:
            raise ValueError(f"rotary positions need a head width divisible by 4, not {head_dim}")
        periods = self.base ** (torch.arange(head_dim // 4, dtype=torch.float64) / (head_dim // 4))
        angles = (2 * math.pi * places[..., None] / periods.to(places)).flatten(-2)
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (i, i + d/2) of x (B, heads, N, d) by its position's angle."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


POSITIONS: dict[str, Position] = {
    "none": NoPosition(),
    "learned": LearnedPosition(),
    "sincos": SinCosPosition(),
    "rotary": RotaryPosition(),
}
