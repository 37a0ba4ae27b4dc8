"""What a method of attribution is: a function from a network, pictures and classes to maps on the grid of patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.model import BiT, ViT


@dataclass(frozen=True, eq=False)
class Maps:
    """What a method gives."""

    values: Tensor
    """(B, T, rows, columns) fp32 on the CPU: for each picture and each of its targets, a number for each patch. Signed
    where the method can speak against a class."""
    completeness: Tensor | None = None
    """(B, T): how far the values are from adding up to what the method promises, relative to that; None for a method
    without such a promise."""


@dataclass(frozen=True)
class Method:
    """An entry of the table."""

    name: str
    run: Callable[..., Maps]
    """`run(model, images, targets, **options)`: standardised pictures (B, C, H, W) and class numbers (B, T) on the
    network's device, the network in evaluation mode and without gradients of its own (`quiet`)."""
    title: str
    """As a picture of it is headed."""
    source: str
    """Where it is defined: paper, section, equation."""
    routing: bool = False
    """It shows where information was routed, not why this class: the target changes nothing."""
    signed: bool = False
    """A value can speak against the class."""
    any_network: bool = False
    """It needs no attention, so it also works for a ResNet."""
    passes: Callable[[int], int] = lambda patches: 4
    """About how many forward passes a picture costs, from its number of patches; one back counts as two."""


ROUTING = "where information was routed, not why this class"
"""What is written beside every map of a routing method."""


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """The network in evaluation mode, its parameters without gradients; afterwards as it was."""
    training, wanted = model.training, [p for p in model.parameters() if p.requires_grad]
    model.eval()
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)
        model.train(training)


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """The logits (B, T) of the targets (B, T)."""
    return logits.float().gather(1, targets)


def grid_of(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Rows and columns of the maps for these pictures: a ViT's patches; a ResNet's last features."""
    config: Any = model.config
    height, width = images.shape[2], images.shape[3]
    if isinstance(model, ViT):
        return height // config.patch[0], width // config.patch[1]
    if isinstance(model, BiT):
        stride = 2 ** (len(config.layers) + 1)
        return -(-height // stride), -(-width // stride)
    raise TypeError(f"{type(model).__name__} has no grid")


def on_grid(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sums of pixel values (…, H, W) over the cells of a grid: (…, rows, columns)."""
    height, width = pixels.shape[-2:]
    cell = height // grid[0], width // grid[1]
    if (cell[0] * grid[0], cell[1] * grid[1]) == (height, width):
        return pixels.unflatten(-1, (grid[1], cell[1])).unflatten(-3, (grid[0], cell[0])).sum(dim=(-3, -1))
    mean = F.adaptive_avg_pool2d(pixels.flatten(0, -3)[:, None], grid)[:, 0]
    return mean.unflatten(0, pixels.shape[:-2]) * (height * width / (grid[0] * grid[1]))


def patches_of(per_token: Tensor, model: ViT, images: Tensor) -> Tensor:
    """Values of all tokens (…, N) to those of the patches (…, rows, columns): prefix tokens are left out."""
    return per_token[..., model.config.prefix :].unflatten(-1, grid_of(model, images))


def readout(model: ViT, tokens: int, batch: int, device: torch.device, pool_attention: Tensor | None = None) -> Tensor:
    """How the head reads the tokens of the last block: weights (B, N) that sum to 1.

    A class token is read alone, with a distillation token each by half; a mean reads patches (or all) alike; a MAP head
    reads by its own attention, here averaged over heads: `pool_attention` (B, heads, 1, N).
    """
    config, weights = model.config, torch.zeros(batch, tokens, device=device)
    if config.pool == "map" and pool_attention is not None:
        return pool_attention.float().mean(1)[:, 0]
    patches = slice(0 if config.pool == "mean-all" else config.prefix, tokens)
    if config.pool in ("mean", "mean-all"):
        weights[:, patches] = 1 / (tokens - patches.start)
    elif config.pool == "cls-mean":
        weights[:, 0], weights[:, patches] = 0.5, 0.5 / (tokens - patches.start)
    else:
        read = config.read or 1
        weights[:, :read] = 1 / read
    return weights
