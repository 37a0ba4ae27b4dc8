"""Interface of attribution methods: functions from a network, images and classes to maps on the grid of patches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.explanation.methods.any_network import AnyNetwork
from vitral.model import BiT, ViT
from vitral.model.modes import evaluating

ROUTING = "where information was routed, not why this class"


@dataclass(frozen=True, eq=False)
class Maps:
    """Result of a method."""

    values: Tensor
    """(B, T, rows, columns) fp32 on the CPU: one value per patch for each image and target. Signed if the method has
    evidence against a class."""
    completeness: Tensor | None = None
    """(B, T): relative error of the sum that the method guarantees; None for a method without completeness."""


@dataclass(frozen=True)
class Method:
    """Entry of `METHODS`."""

    name: str
    run: Callable[..., Maps]
    """`run(model, images, targets, **options)`: standardized images (B, C, H, W) and class numbers (B, T) on the
    network's device; the network is in evaluation mode, without gradients of parameters (`quiet`)."""
    title: str
    """Title in drawings."""
    source: str
    """Definition: paper, section, equation."""
    routing: bool = False
    """True if maps show where information was routed, and do not depend on the target."""
    signed: bool = False
    """True if values can be evidence against the class."""
    any_network: bool = False
    """True if it needs no attention, and so supports ResNets, too."""
    caution: str = ROUTING
    """The note of a routing method."""
    passes: Callable[[int], int] = lambda patches: 4
    """Approximate cost of an image in forward passes, from its number of patches; a backward pass counts as two."""

    @property
    def note(self) -> str:
        """Note of every map; empty without one."""
        return self.caution if self.routing else ""


@contextmanager
def quiet(model: nn.Module) -> Iterator[None]:
    """Put the network in evaluation mode, without gradients of parameters; restore both on exit."""
    wanted = [p for p in model.parameters() if p.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        with evaluating(model):
            yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


def target_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits (B, T) of the targets (B, T)."""
    return logits.float().gather(1, targets)


def grid_of(model: nn.Module, images: Tensor) -> tuple[int, int]:
    """Rows and columns of the maps for these images: a ViT's patches, or a ResNet's last features."""
    if isinstance(model, AnyNetwork):
        return model.grid(images)
    config: Any = model.config
    height, width = images.shape[2], images.shape[3]
    if isinstance(model, ViT):
        return height // config.patch[0], width // config.patch[1]
    if isinstance(model, BiT):
        stride = 2 ** (len(config.layers) + 1)
        return -(-height // stride), -(-width // stride)
    raise TypeError(f"{type(model).__name__} has no grid")


def on_grid(pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """Sum pixel values (…, H, W) over the cells of a grid: (…, rows, columns)."""
    height, width = pixels.shape[-2:]
    cell = height // grid[0], width // grid[1]
    if (cell[0] * grid[0], cell[1] * grid[1]) == (height, width):
        return pixels.unflatten(-1, (grid[1], cell[1])).unflatten(-3, (grid[0], cell[0])).sum(dim=(-3, -1))
    mean = F.adaptive_avg_pool2d(pixels.flatten(0, -3)[:, None], grid)[:, 0]
    return mean.unflatten(0, pixels.shape[:-2]) * (height * width / (grid[0] * grid[1]))


def patches_of(per_token: Tensor, model: ViT, images: Tensor) -> Tensor:
    """Values of all tokens (…, N) to those of the patches (…, rows, columns), without prefix tokens."""
    return per_token[..., model.config.prefix :].unflatten(-1, grid_of(model, images))


def readout(model: ViT, tokens: int, batch: int, device: torch.device, pool_attention: Tensor | None = None) -> Tensor:
    """Weights (B, N), summing to 1, with which the head reads the tokens of the last block.

    The class token has weight 1, or 1/2 with a distillation token. A mean weights patches (or all tokens) equally. A
    MAP head has its attention `pool_attention` (B, heads, 1, N), averaged over heads.
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
        read = config.num_queries or 1
        weights[:, :read] = 1 / read
    return weights
