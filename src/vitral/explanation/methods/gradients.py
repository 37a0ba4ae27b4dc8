"""Gradients of a class's logit with respect to the picture: three ways to make a map of them, for any network.

- input × gradient: what the logit would lose, to first order, if a pixel went to zero.
- integrated gradients (Sundararajan et al., ICML 2017, arXiv 1703.01365): the gradient's mean on the straight way from
  a baseline to the picture, times the difference; the values add up to the difference of the logits. The baseline is
  zeros after standardisation: the mean colour.
- SmoothGrad (Smilkov et al., arXiv 1706.03825): the gradient's mean over noisy copies of the picture.

Also here: what the methods that look inside need of the backward pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitral.errors import UsageError
from vitral.explanation.libra import libra as balanced
from vitral.explanation.methods.method import Maps, Method, grid_of, on_grid, target_logits
from vitral.model import ViT

Rule = Literal["gauss-legendre", "trapezoid"]


@torch.enable_grad()
def input_gradient(model: nn.Module, images: Tensor, targets: Tensor, *, libra: bool = False) -> Maps:
    """Maps (B, T, rows, columns): input × gradient, signed, summed over the channels and pixels of each patch; with
    `libra` with LibraGrad's backward pass.
    """
    way = _way_to(model, images)
    with balanced(model) if libra else nullcontext():
        x, logits = way.at(1.0)
    found = [gradient.float() for (gradient,) in gradients_of(logits, targets, [x])]
    return Maps(way.products(torch.stack(found, dim=1)))


@torch.enable_grad()
def integrated_gradients(
    model: nn.Module, images: Tensor, targets: Tensor, *, steps: int = 32, rule: Rule = "gauss-legendre"
) -> Maps:
    """Maps (B, T, rows, columns), signed, summed over the channels and pixels of each patch. `steps` points of the
    quadrature `rule`, one forward pass each. Completeness is |Σ − (f(x) − f(0))| / |f(x) − f(0)|: what the quadrature
    misses.
    """
    way, total = _way_to(model, images), torch.zeros(())
    for place, weight in zip(*quadrature(rule, steps), strict=True):
        x, logits = way.at(place)
        found = [gradient for (gradient,) in gradients_of(logits, targets, [x])]
        total = total.to(x.device) + weight * torch.stack(found, dim=1).float()
    values = way.products(total)
    with torch.no_grad():
        gained = target_logits(way.at(1.0)[1], targets) - target_logits(way.at(0.0)[1], targets)
    gained = gained.cpu()
    missing = (values.double().sum((2, 3)) - gained).abs() / gained.abs().clamp_min(torch.finfo(torch.float).tiny)
    return Maps(values, missing.float())


def _way_to(model: nn.Module, images: Tensor) -> _Pixels | _Patches:
    """The straight way from zeros to the pictures, through the network."""
    network = getattr(model, "_orig_mod", model)
    if isinstance(network, ViT) and network.config.stem is None:
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
        return _patch_sums(self.images.float()[:, None] * gradients, self.model, self.images)


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


def quadrature(rule: Rule, steps: int) -> tuple[list[float], list[float]]:
    """Places in [0, 1] and their weights, which sum to 1."""
    if rule not in ("gauss-legendre", "trapezoid"):
        raise UsageError(f"there is no quadrature rule '{rule}'", hint="gauss-legendre or trapezoid")
    if steps < 1 + (rule == "trapezoid"):
        raise UsageError(f"{steps} steps are too few for the {rule} rule")
    if rule == "trapezoid":
        weights = np.full(steps, 1 / (steps - 1))
        weights[[0, -1]] /= 2
        return np.linspace(0, 1, steps).tolist(), weights.tolist()
    places, weights = np.polynomial.legendre.leggauss(steps)
    return ((places + 1) / 2).tolist(), (weights / 2).tolist()


@torch.enable_grad()
def smoothgrad(
    model: nn.Module,
    images: Tensor,
    targets: Tensor,
    *,
    samples: int = 16,
    noise: float = 0.15,
    times_input: bool = False,
) -> Maps:
    """Maps (B, T, rows, columns): the mean gradient over `samples` copies with normal noise, whose deviation is `noise`
    times the picture's range (largest minus smallest value).

    As in the paper its magnitude is shown: absolute values, summed over the channels and pixels of each patch. With
    `times_input` the mean gradient times the picture, signed. The noise is a function of the picture alone, so that a
    picture has one map, in any batch and on any device.
    """
    if samples < 1:
        raise UsageError(f"{samples} samples are too few", why="SmoothGrad is a mean over at least one")
    generators = [_generator(image) for image in images]
    spread = noise * (images.flatten(1).amax(1) - images.flatten(1).amin(1)).float()[:, None, None, None]
    total: Tensor | float = 0.0
    for _ in range(samples):
        drawn = torch.stack([torch.randn(images.shape[1:], generator=generator) for generator in generators])
        x = (images.detach() + (spread * drawn.to(images.device)).to(images.dtype)).requires_grad_()
        found = [gradient for (gradient,) in gradients_of(model(x), targets, [x])]
        total = total + torch.stack(found, dim=1).float() / samples
    assert isinstance(total, Tensor)
    values = total * images.detach().float()[:, None] if times_input else total.abs()
    return Maps(_patch_sums(values, model, images))


def _generator(image: Tensor) -> torch.Generator:
    """Seeded by the picture's content."""
    content = image.detach().float().cpu().contiguous().numpy().tobytes()
    seed = int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "little")
    return torch.Generator().manual_seed(seed)


def _patch_sums(pixels: Tensor, model: nn.Module, images: Tensor) -> Tensor:
    """(B, T, C, H, W) to (B, T, rows, columns) on the CPU."""
    return on_grid(pixels.detach().sum(2), grid_of(model, images)).float().cpu()


# What methods that look inside need -----------------------------------------------------------------------------------


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


INPUT_GRADIENT = Method(
    "input-gradient", input_gradient, "input × gradient", "Shrikumar et al., arXiv 1605.01713", any_network=True
)
INTEGRATED_GRADIENTS = Method(
    "integrated-gradients", integrated_gradients, "integrated gradients",
    "Sundararajan et al., arXiv 1703.01365, equation 1", any_network=True, passes=lambda patches: 96,
)  # fmt: skip
SMOOTHGRAD = Method(
    "smoothgrad", smoothgrad, "SmoothGrad", "Smilkov et al., arXiv 1706.03825", any_network=True,
    passes=lambda patches: 48,
)  # fmt: skip
