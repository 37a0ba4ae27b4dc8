"""Gradients for attribution methods: of class logits, from the input of a block, and along a path of images."""

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
    """Yield for each of the targets (B, T) the gradients of its logit with respect to the tensors `of`.

    Images of a batch are independent, so one backward pass of the sum covers the batch. Targets share the forward pass.
    """
    for number in range(targets.shape[1]):
        total = target_logits(logits, targets[:, number : number + 1]).sum()
        yield torch.autograd.grad(total, of, retain_graph=number + 1 < targets.shape[1])


@contextmanager
def block_inputs(network: ViT, begin: int = 0, *, apart: bool = False) -> Iterator[list[Tensor]]:
    """Record the input tokens (B, N, D) of each block from number `begin` on, in execution order.

    The graph starts there, so backward passes skip earlier layers. With `apart`, a new graph starts at each block, so
    later layers have no gradient with respect to earlier tokens.
    """
    inputs: list[Tensor] = []

    def keep(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[object, ...]:
        x = arguments[0]
        inputs.append(x.detach().requires_grad_() if apart or not inputs else x)
        return (inputs[-1], *arguments[1:])

    with ExitStack() as undo:
        for block in list(network.blocks)[begin:]:
            undo.callback(block.register_forward_pre_hook(keep).remove)
        yield inputs


def path_to(model: nn.Module, images: Tensor) -> _PixelPath | _TokenPath:
    """Straight path from zeros to the images."""
    network = getattr(model, "_orig_mod", model)
    if isinstance(network, ViT) and not network.config.hybrid:
        return _TokenPath(network, images.detach())
    return _PixelPath(model, images.detach())


class _PixelPath:
    """Path in pixels, for any network."""

    def __init__(self, model: nn.Module, images: Tensor):
        self.model, self.images = model, images

    def at(self, position: float) -> tuple[Tensor, Tensor]:
        """Input to differentiate, and the logits (B, K)."""
        x = (self.images * position).requires_grad_()
        return x, self.model(x)

    def products(self, gradients: Tensor) -> Tensor:
        """Σ x ⊙ gradients (B, T, C, H, W) of each patch: (B, T, rows, columns)."""
        return patch_sums(self.images.float()[:, None] * gradients, self.model, self.images)


class _TokenPath:
    """The same path in tokens.

    The token of a patch is E x plus terms that do not depend on x (equation 1). So x · ∂y/∂x of a patch is
    E x · ∂y/∂token, and images and gradients need not pass E at every point.
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
        """Tokens of an image of zeros."""
        return self.network.embed(torch.zeros_like(self.images))[0]

    def at(self, position: float) -> tuple[Tensor, Tensor]:
        """Tokens to differentiate, and the logits (B, K)."""
        x = self.full.clone() if position == 1 else self.empty.clone()
        if position not in (0, 1):
            x[:, self.network.config.prefix :] += position * self.contents
        return x.requires_grad_(), self.network.answer(x, self.grid)

    def products(self, gradients: Tensor) -> Tensor:
        """Σ x ⊙ ∂y/∂x of each patch, (B, T, rows, columns), from gradients (B, T, tokens, D)."""
        patches = gradients[:, :, self.network.config.prefix :]
        return (self.contents.float()[:, None] * patches).sum(-1).unflatten(-1, self.grid).cpu()


def patch_sums(pixels: Tensor, model: nn.Module, images: Tensor) -> Tensor:
    """Sum pixel values (B, T, C, H, W) over channels and patches: (B, T, rows, columns) on the CPU."""
    return on_grid(pixels.detach().sum(2), grid_of(model, images)).float().cpu()
