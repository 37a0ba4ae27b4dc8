"""Random subsets of patches, and patches as vectors of pixels."""

from __future__ import annotations

from torch import Tensor


def divide(noise: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Divide patches into kept and masked ones: indices (B, n) and (B, m), by random `noise` (B, N).

    The patches with the least noise are kept, N · (1 - `share`) of them, rounded down; at least one is on each side.
    """
    count = noise.shape[1]
    kept = min(max(int(count * (1 - share)), 1), count - 1)
    order = noise.argsort(dim=1)
    return order[:, :kept], order[:, kept:]


def patches_of(images: Tensor, patch: tuple[int, int]) -> Tensor:
    """Cut images (B, C, H, W) into patches (B, rows × columns, p · q · C), the color of a pixel last."""
    B, C, H, W = images.shape
    p, q = patch
    cut = images.view(B, C, H // p, p, W // q, q)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(B, (H // p) * (W // q), p * q * C)


def images_of(patches: Tensor, patch: tuple[int, int], grid: tuple[int, int]) -> Tensor:
    """Join patches to images (B, C, H, W); the inverse of `patches_of`."""
    B, _, width = patches.shape
    (p, q), (rows, columns) = patch, grid
    cut = patches.view(B, rows, columns, p, q, width // (p * q))
    return cut.permute(0, 5, 1, 3, 2, 4).reshape(B, -1, rows * p, columns * q)


def rows_at(x: Tensor, places: Tensor) -> Tensor:
    """Select rows (B, n, D) of x (B, N, D) by their indices (B, n)."""
    return x.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
