"""Adapt weights to another image size, patch size, channel count or set of classes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitral.device import seeded
from vitral.errors import UsageError
from vitral.model import EncoderDecoderConfig, Foreign, ForeignConfig, ModelConfig, ViTConfig
from vitral.weights.transform.resize import change_channels, resize_patches, resize_positions

Notes = dict[str, str]
"""Parameter → how it was changed, or why it is new."""


def adapt(
    state: Mapping[str, Tensor], config: ModelConfig, changes: Mapping[str, Any], *, scheme: str, new_head: bool
) -> tuple[dict[str, Tensor], ModelConfig, Notes, Notes]:
    """Apply `changes` (image_size, patch_size, channels, classes) to tensors and configuration; also return notes on
    resized and on new parameters. `scheme` resizes the positions (`vitral.weights.transform.resize.SCHEMES`).

    Raises `UsageError` for another number of classes without `new_head`, and for patches of a network without patches.
    """
    if "patch_size" in changes and not isinstance(config, ViTConfig):
        raise UsageError("this network has no patches to change", hint="leave --patch-size out")
    if new_head and getattr(config, "pre_logits", False):
        changes = {**changes, "pre_logits": False}  # the layer before the head goes with it (§3.2)
    if isinstance(config, EncoderDecoderConfig):
        raise UsageError("a network that reads text is used as it was trained", hint="leave image size and classes out")
    target = dataclasses.replace(config, **changes)
    if isinstance(config, ForeignConfig) and isinstance(target, ForeignConfig):
        return _foreign(state, config, target, new_head=new_head)
    adapted, resized, new = dict(state), Notes(), Notes()
    if isinstance(config, ViTConfig) and isinstance(target, ViTConfig):
        _patches(adapted, config, target, resized, scheme)
        _positions(adapted, config, target, resized, scheme)
    _channels(adapted, config, target, resized)
    if new_head:
        _new_head(adapted, target, new)
    else:
        _check_classes(config, target)
    return adapted, target, resized, new


def _check_classes(config: ModelConfig, target: ModelConfig) -> None:
    if target.classes != config.classes:
        what = f"the weights have {config.classes or 'no'} classes, {target.classes} are requested"
        raise UsageError(what, hint="--new-head initializes a new head (in Python new_head=True)")


def _foreign(
    state: Mapping[str, Tensor], config: ForeignConfig, target: ForeignConfig, *, new_head: bool
) -> tuple[dict[str, Tensor], ForeignConfig, Notes, Notes]:
    """Build the network of another library anew, and keep every tensor that fits; the new head is zero."""
    if not new_head:
        _check_classes(config, target)
    with seeded(0):
        network = Foreign(target)
    own, head, new = network.state_dict(), network.head, Notes()
    of_head = {id(part) for part in head.parameters()} if head is not None else set()
    heads = {name for name, part in network.named_parameters() if id(part) in of_head}
    for name, tensor in own.items():
        if new_head and name in heads:
            new[name] = f"a head for {target.classes} classes, initialized to zero (ViT paper, §3.2)"
            own[name] = torch.zeros_like(tensor)
        elif name not in state or state[name].shape != tensor.shape:
            why = f"{name} would be {tuple(tensor.shape)}, and its library does not say how to change it"
            raise UsageError(
                f"cannot adapt the weights of {config.source}", why=why, hint="use the sizes that it was trained with"
            )
        else:
            own[name] = state[name]
    return dict(own), target, Notes(), new


def _patches(state: dict[str, Tensor], config: ViTConfig, target: ViTConfig, notes: Notes, scheme: str) -> None:
    if target.patch == config.patch:
        return
    kernel = state["patch_embed.proj.weight"]
    size = target.patch[0] // config.stem_stride, target.patch[1] // config.stem_stride
    # FlexiViT resizes bilinearly; timm resizes the patches of its state dicts like their positions
    chosen = scheme if scheme.endswith("-antialias") else "bilinear"
    state["patch_embed.proj.weight"] = resize_patches(kernel, size, scheme=chosen)
    notes["patch_embed.proj.weight"] = f"patches of {_by(config.patch)} to {_by(target.patch)} pixels, pseudo-inverse"


def _positions(state: dict[str, Tensor], config: ViTConfig, target: ViTConfig, notes: Notes, scheme: str) -> None:
    if "pos_embed" not in state or target.grid == config.grid:
        return
    table = state["pos_embed"]
    state["pos_embed"] = resize_positions(table, config.grid, target.grid, prefix=config.placed, scheme=scheme)
    notes["pos_embed"] = f"{_by(config.grid)} to {_by(target.grid)} positions, {scheme}"


_FIRST = (
    "stem.conv.weight",
    "patch_embed.backbone.stem.conv.weight",
    "patch_embed.backbone.layers.0.conv.weight",
    "patch_embed.proj.weight",
)
"""Kernel applied to the image: of a BiT, a hybrid, a convolutional stem, a ViT."""


def _channels(state: dict[str, Tensor], config: ModelConfig, target: ModelConfig, notes: Notes) -> None:
    if target.channels == config.channels:
        return
    name = next(name for name in _FIRST if name in state)
    state[name] = change_channels(state[name], target.channels)
    before = f"{notes[name]}; " if name in notes else ""
    notes[name] = f"{before}{config.channels} to {target.channels} channels"


def _new_head(state: dict[str, Tensor], target: ModelConfig, new: Notes) -> None:
    """Replace the head by one of zeros and drop the pre-logits layer, as the paper does to fine-tune (§3.2)."""
    for name in [name for name in state if name.startswith(("head.", "head_dist.", "pre_logits."))]:
        del state[name]
    if not target.classes:
        return
    for head in ("head", "head_dist")[: 1 + getattr(target, "dist_token", False)]:
        state[f"{head}.weight"] = torch.zeros(target.classes, target.features)
        state[f"{head}.bias"] = torch.zeros(target.classes)
        why = f"a head for {target.classes} classes, initialized to zero (ViT paper, §3.2)"
        new |= {f"{head}.weight": why, f"{head}.bias": why}


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"
