"""Weights for another image size, patch, channel count or set of classes: what is resized, and by which rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitral.errors import UsageError
from vitral.model import ModelConfig, ViTConfig
from vitral.weights.resize import change_channels, resize_patches, resize_positions

Told = dict[str, str]
"""Parameter → what was done to it, or why it is new."""


def adapt(
    state: Mapping[str, Tensor], config: ModelConfig, changes: Mapping[str, Any], *, scheme: str, new_head: bool
) -> tuple[dict[str, Tensor], ModelConfig, Told, Told]:
    """Tensors and configuration with `changes` (image_size, patch_size, channels, classes); also what was resized and
    which parameters are new. `scheme` is how positions are resized (`vitral.weights.resize.SCHEMES`).

    Raises `UsageError` for another number of classes without `new_head`: a head for other classes must be asked for;
    and for patches of a network that has none.
    """
    if "patch_size" in changes and not isinstance(config, ViTConfig):
        raise UsageError("this network has no patches", why="it is a BiT ResNet", hint="leave --patch-size out")
    if new_head and getattr(config, "pre_logits", False):
        changes = {**changes, "pre_logits": False}  # the layer before the head goes with it (§3.2)
    target = dataclasses.replace(config, **changes)
    found, resized, fresh = dict(state), Told(), Told()
    if isinstance(config, ViTConfig) and isinstance(target, ViTConfig):
        _patches(found, config, target, resized, scheme)
        _positions(found, config, target, resized, scheme)
    _channels(found, config, target, resized)
    if new_head:
        _new_head(found, target, fresh)
    elif target.classes != config.classes:
        what = f"the weights have {config.classes or 'no'} classes, {target.classes} are asked for"
        raise UsageError(what, hint="--new-head makes a fresh head (in Python new_head=True)")
    return found, target, resized, fresh


def _patches(found: dict[str, Tensor], config: ViTConfig, target: ViTConfig, told: Told, scheme: str) -> None:
    if target.patch == config.patch:
        return
    kernel = found["patch_embed.proj.weight"]
    size = target.patch[0] // config.stem_stride, target.patch[1] // config.stem_stride
    # FlexiViT resizes bilinearly; timm's own way for its state dicts is that of their positions
    how = scheme if scheme == "bicubic-antialias" else "bilinear"
    found["patch_embed.proj.weight"] = resize_patches(kernel, size, scheme=how)
    told["patch_embed.proj.weight"] = f"patches of {_by(config.patch)} to {_by(target.patch)} pixels, pseudo-inverse"


def _positions(found: dict[str, Tensor], config: ViTConfig, target: ViTConfig, told: Told, scheme: str) -> None:
    if "pos_embed" not in found or target.grid == config.grid:
        return
    table = found["pos_embed"]
    found["pos_embed"] = resize_positions(table, config.grid, target.grid, prefix=config.placed, scheme=scheme)
    told["pos_embed"] = f"{_by(config.grid)} to {_by(target.grid)} positions, {scheme}"


_FIRST = (
    "stem.conv.weight", "patch_embed.backbone.stem.conv.weight", "patch_embed.backbone.layers.0.conv.weight",
    "patch_embed.proj.weight",
)  # fmt: skip
"""The kernel that sees the picture: of a BiT, a hybrid, a convolutional stem, a ViT."""


def _channels(found: dict[str, Tensor], config: ModelConfig, target: ModelConfig, told: Told) -> None:
    if target.channels == config.channels:
        return
    name = next(name for name in _FIRST if name in found)
    found[name] = change_channels(found[name], target.channels)
    before = f"{told[name]}; " if name in told else ""
    told[name] = f"{before}{config.channels} to {target.channels} channels"


def _new_head(found: dict[str, Tensor], target: ModelConfig, fresh: Told) -> None:
    """A head of zeros, as the paper fine-tunes (§3.2); the pre-logits layer goes, as there."""
    for name in [name for name in found if name.startswith(("head.", "head_dist.", "pre_logits."))]:
        del found[name]
    if not target.classes:
        return
    for head in ("head", "head_dist")[: 1 + getattr(target, "dist_token", False)]:
        found[f"{head}.weight"] = torch.zeros(target.classes, target.features)
        found[f"{head}.bias"] = torch.zeros(target.classes)
        why = f"a head for {target.classes} classes, zero as at fine-tuning (§3.2)"
        fresh |= {f"{head}.weight": why, f"{head}.bias": why}


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
