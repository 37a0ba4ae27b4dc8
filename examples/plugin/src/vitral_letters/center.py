"""An attribution method: the nearer to the center, the more. A baseline that knows nothing of the network."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from vitral.explanation.methods import Maps, Method
from vitral.explanation.methods.method import grid_of


def center(model: nn.Module, images: Tensor, targets: Tensor) -> Maps:
    """Maps (B, T, rows, columns) that fall with the distance from the center."""
    rows, columns = (torch.linspace(-1, 1, n) for n in grid_of(model, images))
    one = 2 - rows[:, None].square() - columns.square()
    return Maps(one.expand(*targets.shape, -1, -1).clone())


CENTER = Method(
    "center",
    center,
    "Distance from the center",
    "a baseline",
    routing=True,
    any_network=True,
    caution="the same for every image and class",
)
