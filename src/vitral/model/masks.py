"""Checks of a network's input, and masks over patches (B, rows × columns), bool, True where a patch counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.errors import UsageError
from vitral.model.config import ViTConfig
from vitral.model.position import Grid


def check_images(images: Tensor, config: ViTConfig, one_size: bool) -> None:
    """Refuse images of another shape than (B, C, H, W) in whole patches; with `one_size`, of another size."""
    if images.ndim != 4 or images.shape[1] != config.channels:
        expected = f"(B, {config.channels}, {config.image[0]}, {config.image[1]})"
        raise UsageError("images of the wrong shape", why=f"got {tuple(images.shape)}, want {expected}")
    size = images.shape[2], images.shape[3]
    if one_size and size != config.image:
        raise UsageError(
            f"images are {size[0]}×{size[1]}, the learned positions are for {config.image[0]}×{config.image[1]}",
            hint="resize the images, or build the model with position='sincos' or 'rotary'",
        )
    if min(size) < 1 or size[0] % config.patch[0] or size[1] % config.patch[1]:
        raise UsageError(f"image size {size[0]}×{size[1]} is not divisible by patch size {config.patch}")


def check_mask(mask: Tensor | None, batch: int, grid: Grid) -> None:
    """Refuse a mask of another dtype or shape; a float mask would be added to the scores."""
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (batch, grid[0] * grid[1])):
        why = f"got {mask.dtype} {tuple(mask.shape)}, want torch.bool {(batch, grid[0] * grid[1])}"
        raise UsageError("a mask of the wrong kind or shape", why=why)


def key_mask(mask: Tensor | None, prefix: int) -> Tensor | None:
    """Attention mask (B, 1, 1, tokens); prefix tokens always count."""
    return None if mask is None else F.pad(mask, (prefix, 0), value=True)[:, None, None]


def pool_mask(x: Tensor, mask: Tensor | None, prefix: int, with_prefix: bool) -> Tensor | None:
    """Mask of attention pooling over tokens x (B, N, D); the prefix counts if `with_prefix`."""
    if with_prefix or not prefix:
        return key_mask(mask, prefix)
    patches = x.new_ones(x.shape[0], x.shape[1] - prefix, dtype=torch.bool) if mask is None else mask
    return F.pad(patches, (prefix, 0), value=False)[:, None, None]


def masked_mean(x: Tensor, mask: Tensor | None, prefix: int) -> Tensor:
    """Mean over tokens (B, N, D). With a mask over patches, over the prefix and the patches that count."""
    if mask is None:
        return x.mean(1)
    weights = F.pad(mask, (prefix, 0), value=True).to(x.dtype)[..., None]
    return (x * weights).sum(1) / weights.sum(1)
