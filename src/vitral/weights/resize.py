"""Weights for other sizes: position tables to another grid, patch kernels to another patch size or channel count.

What resizes how, and by how much the schemes differ: `docs/resizing.md`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import UsageError, WeightsError, unknown
from vitral.model.position import Grid

Scheme = Callable[[Tensor, Grid], Tensor]
"""Maps (B, D, rows, columns), fp32 or fp64, to (B, D, *new). Linear, and separable in rows and columns."""


def _scheme(mode: str, *, corners: bool = False, antialias: bool = False) -> Scheme:
    def resize(x: Tensor, new: Grid) -> Tensor:
        if antialias and new[1] == 1 < new[0]:
            # torch 2.15 mixes up the rows of a contiguous result of one column on a CPU; of one row it does not.
            return resize(x.transpose(2, 3), (1, new[0])).transpose(2, 3)
        return F.interpolate(x, size=new, mode=mode, align_corners=corners, antialias=antialias)

    return resize


SCHEMES: dict[str, Scheme] = {
    "bilinear-corners": _scheme("bilinear", corners=True),
    "bilinear": _scheme("bilinear"),
    "bicubic-antialias": _scheme("bicubic", antialias=True),
    "bicubic": _scheme("bicubic"),
    "bicubic-corners": _scheme("bicubic", corners=True),
}
"""The ways in which the field resizes position tables; weights from one origin need the way of that origin.

- `bilinear-corners`: the paper's authors (vit_jax `checkpoint.py`, big_vision `models/vit.py`, both
  `scipy.ndimage.zoom(order=1)`), and jeonsworld/ViT-pytorch. First and last entries of both grids coincide.
- `bilinear`: timm from the authors' npz files (`_load_weights`). Cell centres coincide, as in all without `corners`.
- `bicubic-antialias`: timm from state dicts (`resample_abs_pos_embed`); Hugging Face's DINOv2 with registers.
  Trap: torch's cubic has a = -0.5 with antialiasing and -0.75 without, and the border is weighted anew instead of
  repeated, so this differs from `bicubic` for a larger grid as well.
- `bicubic`: Hugging Face (ViT, DeiT, MAE, DINOv2, SigLIP), DeiT, MAE.
- `bicubic-corners`: torchvision (`interpolate_embeddings`).
"""


@torch.no_grad()
def resize_positions(table: Tensor, old: Grid, new: Grid, *, prefix: int, scheme: str) -> Tensor:
    """A table of learned positions (1, prefix + rows × columns, D) of grid `old`, for grid `new`.

    The first `prefix` entries (class token, distillation token, registers) stay as they are, and with old == new so
    does the whole table, to the bit. Any grid goes to any other. Computed in fp32 (fp64 stays fp64), returned in the
    table's dtype. Raises `UsageError` for a scheme that is not in `SCHEMES` and a table that is not of grid `old`.
    """
    if scheme not in SCHEMES:
        raise unknown("resizing scheme", scheme, SCHEMES)
    old, new = (old[0], old[1]), (new[0], new[1])
    if min(*old, *new) < 1:
        raise UsageError(f"cannot resize a grid of {old[0]}×{old[1]} to {new[0]}×{new[1]}")
    if table.ndim != 3 or table.shape[:2] != (1, prefix + old[0] * old[1]):
        raise UsageError(
            f"a table of shape {tuple(table.shape)} does not hold {prefix} + {old[0]}×{old[1]} positions",
            why=f"that would be (1, {prefix + old[0] * old[1]}, width)",
        )
    if old == new:
        return table
    cells = _exact(table[:, prefix:]).transpose(1, 2).unflatten(2, old)  # (1, D, rows, columns)
    cells = SCHEMES[scheme](cells, new).flatten(2).transpose(1, 2)
    return torch.cat([table[:, :prefix], cells.to(table.dtype)], dim=1)


def grid_of(
    length: int, prefix: int, image: tuple[int, int] | None = None, patch: tuple[int, int] | None = None
) -> Grid:
    """Rows and columns of a position table with `length` entries, `prefix` of them for tokens that are no patches.

    `image` and `patch` (height, width) decide where both are known and fit; else the grid is square. `WeightsError`
    where it is neither.
    """
    cells = length - prefix
    if image and patch:
        rows, columns = image[0] // patch[0], image[1] // patch[1]
        if rows * columns == cells > 0:
            return rows, columns
    side = math.isqrt(max(cells, 0))
    if side == 0 or side * side != cells:
        size = (
            f", nor that of {image[0]}×{image[1]} pixels in patches of {patch[0]}×{patch[1]}" if image and patch else ""
        )
        raise WeightsError(
            f"cannot tell the grid of a table of {length} positions",
            why=f"without {prefix} for other tokens {cells} are left: no square{size}",
        )
    return side, side


@torch.no_grad()
def resize_patches(kernel: Tensor, new: tuple[int, int], *, scheme: str = "bilinear") -> Tensor:
    """A patch kernel (D, C, p, q) for patches of size `new`, by the pseudo-inverse of FlexiViT (arXiv 2212.08013).

    Resizing a patch x is linear, Bx. The new kernel is the one whose products with resized patches are nearest in least
    squares to those of the old one with the patches themselves: pinv(Bᵀ) k. Where no side shrinks B loses nothing and
    ⟨Bx, pinv(Bᵀ) k⟩ = ⟨x, k⟩ holds exactly; where one does, only for patches that B loses nothing of.

    `scheme` says how patches are resized: `bilinear` in the paper, in big_vision (`tf.image.resize`, no antialiasing)
    and in timm from npz; `bicubic-antialias` in timm from state dicts. Computed in fp64, returned in the kernel's
    dtype; the same size is the identity, to the bit. Raises `UsageError` for an unknown scheme and for sizes below 1.
    """
    if scheme not in SCHEMES:
        raise unknown("resizing scheme", scheme, SCHEMES)
    if kernel.ndim != 4 or min(new) < 1:
        raise UsageError(f"cannot resize a patch kernel of shape {tuple(kernel.shape)} to {new[0]}×{new[1]}")
    if kernel.shape[2:] == tuple(new):
        return kernel
    rows, columns = (
        torch.linalg.pinv(_matrix(before, after, scheme)).to(kernel.device)
        for before, after in zip(kernel.shape[2:], new, strict=True)
    )
    # B is the Kronecker product of one matrix an axis, so its pseudo-inverse is that of theirs: p² by p², not p⁴.
    return (rows.T @ kernel.double() @ columns).to(kernel.dtype)


def _matrix(before: int, after: int, scheme: str) -> Tensor:
    """What `scheme` does along one axis, as a matrix (after, before) in fp64."""
    basis = torch.eye(before, dtype=torch.float64)[:, None, :, None]
    return SCHEMES[scheme](basis, (after, 1))[:, 0, :, 0].T


@torch.no_grad()
def change_channels(kernel: Tensor, channels: int) -> Tensor:
    """A kernel over pixels (D, C, p, q), of patches or of a root convolution, for pictures of `channels` channels.

    - C → 1: the sum. Exact: a grey picture gives what it gave to the old kernel when repeated in all channels.
    - C → n·C: repeated, divided by n (3 from 1: a third each). Exact: a picture whose channels are repeated in the same
      order gives what the picture itself gave.
    - else: repeated, cut off, and scaled by C / channels (timm's `adapt_input_conv`). Exact only where the kernel is
      the same in all channels and all channels of the picture are equal; a start for training, no more.

    "Repeated" and "equal" are meant after normalisation: ImageNet's mean and deviation differ by channel and leave no
    picture grey. And a kernel that its layer standardises (BiT, hybrids) forgets its scale: there nothing is exact, in
    the first two cases every output channel is off by a positive factor of its own. The same count is the identity, to
    the bit. Computed in fp32 (fp64 stays fp64), returned in the kernel's dtype. `UsageError` for a count below 1.
    """
    if kernel.ndim != 4 or channels < 1:
        raise UsageError(f"cannot change a kernel of shape {tuple(kernel.shape)} to {channels} channels")
    have = kernel.shape[1]
    if channels == have:
        return kernel
    if channels == 1:
        return _exact(kernel).sum(1, keepdim=True).to(kernel.dtype)
    repeated = _exact(kernel).repeat(1, -(-channels // have), 1, 1)[:, :channels]
    return (repeated * (have / channels)).to(kernel.dtype)


def _exact(x: Tensor) -> Tensor:
    """At least fp32: half precision would round every intermediate sum."""
    return x if x.dtype == torch.float64 else x.float()
