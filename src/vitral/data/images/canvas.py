"""Images of their own sizes in one tensor: each in the corner of a canvas, with its size in a row below.

Stored, cached and batched like images of one size: uint8 (C, H + 1, W) for images of at most H by W pixels. The last
row of the first channel begins with height and width, two bytes each.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_WIDTH = 4
"""Pixels of the narrowest canvas: the size takes four bytes."""


def on_canvas(image: Tensor, size: tuple[int, int]) -> Tensor:
    """Put an image (C, h, w) uint8 on a canvas (C, height + 1, width) of zeros."""
    channels, height, width = image.shape
    canvas = image.new_zeros(channels, size[0] + 1, size[1])
    canvas[:, :height, :width] = image
    canvas[0, -1, :LEAST_WIDTH] = torch.tensor([*divmod(height, 256), *divmod(width, 256)], dtype=torch.uint8)
    return canvas


def sizes_on(canvases: Tensor) -> list[tuple[int, int]]:
    """Height and width of the image on each canvas (B, C, H + 1, W)."""
    rows = canvases[:, 0, -1, :LEAST_WIDTH].tolist()
    return [(256 * high + low, 256 * wide + narrow) for high, low, wide, narrow in rows]


def from_canvases(canvases: Tensor) -> list[Tensor]:
    """The images (C, h, w) on canvases (B, C, H + 1, W), as views."""
    sizes = sizes_on(canvases)
    return [canvas[:, :height, :width] for canvas, (height, width) in zip(canvases, sizes, strict=True)]
