"""What methods need of the backward pass: gradients of classes, where the graph begins, and the way from nothing to the
picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.explanation.methods.method import grid_of, on_grid, target_logits
from vitral.model import ViT


def gradients_of(logits: Tensor, targets: Tensor, of: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """For each of the targets (B, T) in turn, its logit's gradients with respect to each of `of`.

    Pictures do not know of each other, so one backward pass of the sum over the batch serves all of it; targets share
    the forward pass.
    """
    for number in range(targets.shape[1]):
        wanted = target_logits(logits, targets[:, number : number + 1]).sum()
        yield torch.autograd.grad(wanted, of, retain_graph=number + 1 < targets.shape[1])


@contextmanager
def block_inputs(network: ViT, begin: int = 0, *, apart: bool = False) -> Iterator[list[Tensor]]:
    """The tokens (B, N, D) that enter each block from number `begin` on, in the order in which they run.

    The graph begins there, so that no backward pass goes through what lies before, nor needs the picture's gradient.
    With `apart` it begins anew at each block: what is later then has no gradient here.
    """
    found: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        x = arguments[0]
        found.append(x.detach().requires_grad_() if apart or not found else x)
        return (found[-1], *arguments[1:])

    with ExitStack() as undo:
        for block in list(network.blocks)[begin:]:
            undo.callback(block.register_forward_pre_hook(keep).remove)
        yield found


def way_to(model: nn.Module, images: Tensor) -> _Pixels | _Patches:
    """The straight way from zeros to the pictures, through the network."""
    network = getattr(model, "_orig_mod", model)
    if isinstance(network, ViT) and not network.config.hybrid:
        return _Patches(network, images.detach())
    return _Pixels(model, images.detach())


class _Pixels:
    """The way in pixels, for any network."""

    def __init__(self, model: nn.Module, images: Tensor):
        self.model, self.images = model, images

    def at(self, place: float) -> tuple[Tensor, Tensor]:
        """What gradients are asked of, and the logits (B, K)."""
        x = (self.images * place).requires_grad_()
        return x, self.model(x)

    def products(self, gradients: Tensor) -> Tensor:
        """Σ x ⊙ gradients (B, T, C, H, W) of each patch: (B, T, rows, columns)."""
        return patch_sums(self.images.float()[:, None] * gradients, self.model, self.images)


class _Patches:
    """The same way in tokens. A patch's token is E x + what does not depend on x (equation 1), so that x · ∂y/∂x of a
    patch is E x · ∂y/∂token, and neither the pictures nor their gradients go through E at every point.
    """

    def __init__(self, network: ViT, images: Tensor):
        self.network, self.images = network, images
        with torch.no_grad():
            self.full, self.grid = network.embed(images)

    @cached_property
    @torch.no_grad()
    def contents(self) -> Tensor:
        """E x of each patch, (B, rows × columns, D)."""
        projection = self.network.patch_embed.proj
        return F.conv2d(self.images, projection.weight, stride=projection.stride).flatten(2).transpose(1, 2)

    @cached_property
    @torch.no_grad()
    def empty(self) -> Tensor:
        """The tokens of a picture of zeros."""
        return self.network.embed(torch.zeros_like(self.images))[0]

    def at(self, place: float) -> tuple[Tensor, Tensor]:
        """What gradients are asked of, and the logits (B, K)."""
        x = self.full.clone() if place == 1 else self.empty.clone()
        if place not in (0, 1):
            x[:, self.network.config.prefix :] += place * self.contents
        return x.requires_grad_(), self.network.answer(x, self.grid)

    def products(self, gradients: Tensor) -> Tensor:
        """Σ x ⊙ ∂y/∂x of each patch, (B, T, rows, columns), from gradients (B, T, tokens, D)."""
        patches = gradients[:, :, self.network.config.prefix :]
        return (self.contents.float()[:, None] * patches).sum(-1).unflatten(-1, self.grid).cpu()


def patch_sums(pixels: Tensor, model: nn.Module, images: Tensor) -> Tensor:
    """(B, T, C, H, W) to (B, T, rows, columns) on the CPU."""
    return on_grid(pixels.detach().sum(2), grid_of(model, images)).float().cpu()
