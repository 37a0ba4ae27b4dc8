"""Resize position tables to another grid, and patch kernels to another patch size or channel count.

`docs/weights.md` lists the scheme of each library, and by how much they differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

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
            # torch 2.15 on a CPU mixes up the rows of a contiguous result of one column, but not of one row.
            return resize(x.transpose(2, 3), (1, new[0])).transpose(2, 3)
        return F.interpolate(x, size=new, mode=mode, align_corners=corners, antialias=antialias)

    return resize


SCHEMES: dict[str, Scheme] = {
    "bilinear-corners": _scheme("bilinear", corners=True),
    "bilinear": _scheme("bilinear"),
    "bilinear-antialias": _scheme("bilinear", antialias=True),
    "bicubic-antialias": _scheme("bicubic", antialias=True),
    "bicubic": _scheme("bicubic"),
    "bicubic-corners": _scheme("bicubic", corners=True),
}
"""Schemes to resize position tables; weights need the scheme of their origin.

- `bilinear-corners`: the paper's authors (vit_jax `checkpoint.py`, big_vision `models/vit.py`, both
  `scipy.ndimage.zoom(order=1)`), and jeonsworld/ViT-pytorch. First and last entries of both grids coincide.
- `bilinear`: timm from the authors' npz files (`_load_weights`). Cell centers coincide, as in all without `corners`.
- `bilinear-antialias`: SigLIP 2 at any aspect (NaFlex), in Hugging Face (`resize_positional_embeddings`) and timm.
- `bicubic-antialias`: timm from state dicts (`resample_abs_pos_embed`); Hugging Face's DINOv2 with registers.
  Pitfall: torch's cubic has a = -0.5 with antialiasing and -0.75 without, and the border is reweighted instead of
  repeated, so this differs from `bicubic` for a larger grid as well.
- `bicubic`: Hugging Face (ViT, DeiT, MAE, DINOv2, SigLIP), DeiT, MAE.
- `bicubic-corners`: torchvision (`interpolate_embeddings`).
"""


def resize_positions(table: Tensor, old: Grid, new: Grid, *, prefix: int, scheme: str, graph: bool = False) -> Tensor:
    """Resize a table of learned positions (1, prefix + rows × columns, D) from grid `old` to grid `new`.

    The first `prefix` entries (class token, distillation token, registers) are unchanged, and with old == new the whole
    table, to the bit. Computed in fp32 (fp64 stays fp64), returned in the table's dtype. With `graph`, gradients
    flow back to the table. Raises `UsageError` for a scheme that is not in `SCHEMES` and a table that does not fit grid
    `old`.
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
    with torch.set_grad_enabled(graph):
        cells = _exact(table[:, prefix:]).transpose(1, 2).unflatten(2, old)  # (1, D, rows, columns)
        cells = SCHEMES[scheme](cells, new).flatten(2).transpose(1, 2)
        return torch.cat([table[:, :prefix], cells.to(table.dtype)], dim=1)


def grid_of(
    length: int, prefix: int, image: tuple[int, int] | None = None, patch: tuple[int, int] | None = None
) -> Grid:
    """Rows and columns of a position table with `length` entries, `prefix` of them for tokens other than patches.

    `image` and `patch` (height, width) decide if both are known and fit; else the grid is square. Raises `WeightsError`
    if neither holds.
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
            f"cannot determine the grid of a table of {length} positions",
            why=f"without {prefix} for other tokens {cells} remain: not a square{size}",
        )
    return side, side


def resize_patches(kernel: Tensor, new: tuple[int, int], *, scheme: str = "bilinear", graph: bool = False) -> Tensor:
    """Resize a patch kernel (D, C, p, q) to patches of size `new`, by FlexiViT's pseudo-inverse (arXiv 2212.08013).

    Resizing a patch x is linear, Bx. The products of the new kernel with resized patches are nearest, in least squares,
    to those of the old kernel with the original patches: pinv(Bᵀ) k. If no side shrinks, B loses no information and
    ⟨Bx, pinv(Bᵀ) k⟩ = ⟨x, k⟩ holds exactly; if one does, it holds only for patches of which B loses nothing.

    `scheme` resizes the patches: `bilinear` in the paper, in big_vision (`tf.image.resize`, no antialiasing) and in
    timm from npz; `bicubic-antialias` in timm from state dicts. Computed in fp64, returned in the kernel's dtype; the
    same size is the identity, to the bit. With `graph`, gradients flow back to the kernel. Raises `UsageError` for an
    unknown scheme and for sizes below 1.
    """
    if scheme not in SCHEMES:
        raise unknown("resizing scheme", scheme, SCHEMES)
    if kernel.ndim != 4 or min(new) < 1:
        raise UsageError(f"cannot resize a patch kernel of shape {tuple(kernel.shape)} to {new[0]}×{new[1]}")
    if kernel.shape[2:] == tuple(new):
        return kernel
    rows, columns = (
        _pseudo_inverse(before, after, scheme).to(kernel.device)
        for before, after in zip(kernel.shape[2:], new, strict=True)
    )
    # B is the Kronecker product of one matrix per axis, and so is its pseudo-inverse: p² by p², not p⁴.
    with torch.set_grad_enabled(graph):
        return (rows.T @ kernel.double() @ columns).to(kernel.dtype)


@lru_cache(64)
def _pseudo_inverse(before: int, after: int, scheme: str) -> Tensor:
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):  # kept: training goes backward through it
        return torch.linalg.pinv(_matrix(before, after, scheme))


def _matrix(before: int, after: int, scheme: str) -> Tensor:
    """Matrix (after, before), in fp64, of `scheme` along one axis."""
    basis = torch.eye(before, dtype=torch.float64)[:, None, :, None]
    return SCHEMES[scheme](basis, (after, 1))[:, 0, :, 0].T


@torch.no_grad()
def change_channels(kernel: Tensor, channels: int) -> Tensor:
    """Adapt a kernel over pixels (D, C, p, q), of patches or of a root convolution, to images of `channels` channels.

    - C → 1: the sum. Exact: a gray image gives the result of the old kernel on that image repeated in all channels.
    - C → n·C: repeated, divided by n (3 from 1: a third each). Exact: an image whose channels are repeated in the same
      order gives the result of the image itself.
    - else: repeated, cut off, and scaled by C / channels (timm's `adapt_input_conv`). Exact only if the kernel is the
      same in all channels and all channels of the image are equal; otherwise a start for training.

    "Repeated" and "equal" refer to images after normalization: ImageNet's mean and deviation differ by channel and
    leave no image gray. A kernel that its layer standardizes (BiT, hybrids) loses its scale: nothing is exact there, in
    the first two cases every output channel is off by its own positive factor. The same count is the identity, to the
    bit. Computed in fp32 (fp64 stays fp64), returned in the kernel's dtype. Raises `UsageError` for a count below 1.
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
