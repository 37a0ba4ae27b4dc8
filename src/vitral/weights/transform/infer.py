"""Infer a network's configuration from its tensors: shapes determine nearly all of it, the format the rest."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from itertools import product
from typing import Any

from torch import Tensor

from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.model.position import Rope
from vitral.model.resnet import stem_stride
from vitral.weights.transform.keymap import ConfigFields, depth_of, layers_of


def infer(
    facts: ConfigFields, state: Mapping[str, Tensor], where: object, image_size: int | tuple[int, int] | None = None
) -> ViTConfig:
    """Infer the configuration of tensors under vitral's names. `facts` are fields that shapes cannot determine
    (activation, epsilon, heads, image size); they override the shapes. `image_size` is the requested size: if there are
    as many positions as its grid has, it is the size of the weights; else the grid is square.

    Raises `WeightsError` if neither determines the number of heads or the grid.
    """
    try:
        kernel = state["patch_embed.proj.weight"]
        found = {**_sizes(state, kernel), **_parts(state)}
    except KeyError as missing:
        raise WeightsError("not the weights of a whole network", where=where, why=f"{missing} is missing") from None
    found |= {name: value for name, value in facts.items() if value is not None}
    if "heads" not in found:
        why = f"no published network of this format is {found['dim']} wide with an MLP of {found['mlp_dim']}"
        hint = f"vitral convert {shlex.quote(str(where))} weights/own --heads N, or heads=N in Python"
        raise WeightsError("cannot determine the number of heads", where=where, why=why, hint=hint)
    if isinstance(found.get("rope"), dict):
        found["rope"] = Rope.from_json(found["rope"])
    if found.get("register_position") and not found["registers"]:
        found["register_position"] = False
    if "pos_embed" in state and "patch_size" in found:
        _settle_grid(state["pos_embed"].shape[1], found, facts, image_size)
    if "image_size" not in found:
        found["image_size"] = _image_size(state, found, where)
    return ViTConfig(**found)


def _settle_grid(length: int, found: dict[str, Any], facts: ConfigFields, wanted: int | tuple[int, int] | None) -> None:
    """Decide by a stated or requested size if the table of `length` positions begins with those of class and
    distillation token: 25 are 4 × 6 and a class token, or 5 × 5. A requested size that fits is that of the weights.
    """
    size = found.get("image_size", wanted)
    if size is None:
        return
    height, width = (size, size) if isinstance(size, int) else size
    patches = (height // found["patch_size"][0]) * (width // found["patch_size"][1])
    options = {"cls_position": (True, False)} | ({"register_position": (False, True)} if found["registers"] else {})
    for choice in product(*options.values()):
        chosen = dict(zip(options, choice, strict=True))
        contradicted = any(facts.get(name) not in (None, value) for name, value in chosen.items())
        if not contradicted and length == patches + _placed({**found, **chosen}):
            found |= {**chosen, "image_size": size}
            return


def _placed(found: Mapping[str, Any]) -> int:
    """Number of positions before those of the patches."""
    tokens = int(found["cls_token"]) + int(found["dist_token"]) if found["cls_position"] else 0
    return tokens + (found["registers"] if found.get("register_position") else 0)


def _sizes(state: Mapping[str, Tensor], kernel: Tensor) -> dict[str, Any]:
    dim = kernel.shape[0]
    wide, narrow = state["blocks.0.mlp.fc1.weight"].shape[0], state["blocks.0.mlp.fc2.weight"].shape[1]
    found: dict[str, object] = {
        "dim": dim,
        "depth": depth_of(state, "blocks."),
        "mlp_dim": narrow,
        "activation": "swiglu" if wide == 2 * narrow else "gelu",
        **_patches(state, kernel),
        "classes": state["head.weight"].shape[0] if "head.weight" in state else 0,
    }
    if "blocks.0.attn.q_norm.weight" in state:
        found["heads"] = dim // state["blocks.0.attn.q_norm.weight"].shape[0]
    return found


def _patches(state: Mapping[str, Tensor], kernel: Tensor) -> dict[str, object]:
    """Image channels and patch size in pixels; with a ResNet before the patches also its stages."""
    root, stages = state.get("patch_embed.backbone.stem.conv.weight"), "patch_embed.backbone.stages."
    if root is None:
        return {"channels": kernel.shape[1], "patch_size": (kernel.shape[2], kernel.shape[3])}
    layers = layers_of(state, stages)
    height, width = (stem_stride(layers) * side for side in kernel.shape[2:])
    return {"channels": root.shape[1], "patch_size": (height, width), "stem": layers}


def _parts(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Fields that follow from the presence of tensors."""
    cls_token = "cls_token" in state
    dim = state["patch_embed.proj.weight"].shape[0]
    head = state.get("head.weight")
    if "attn_pool.latent" in state:
        pool = "map"
    elif head is not None and head.shape[1] == 2 * dim:
        pool = "cls-mean"
    else:
        pool = "cls" if cls_token and "fc_norm.weight" not in state else "mean"
    found: dict[str, object] = {
        "cls_token": cls_token,
        "dist_token": "dist_token" in state,
        "registers": state["reg_token"].shape[1] if "reg_token" in state else 0,
        "position": "learned" if "pos_embed" in state else "none",
        "pool": pool,
        "final_norm": "tokens" if "norm.weight" in state else "pooled" if "fc_norm.weight" in state else "none",
        "qkv_bias": "blocks.0.attn.qkv.bias" in state,
        "proj_bias": "blocks.0.attn.proj.bias" in state,
        "qk_norm": "blocks.0.attn.q_norm.weight" in state,
        "layer_scale": 1.0 if "blocks.0.ls1.gamma" in state else None,
        "pre_logits": "pre_logits.weight" in state,
        "patch_bias": "patch_embed.proj.bias" in state,
        "norm_pre": "norm_pre.weight" in state,
        "attn_norm": "blocks.0.attn.norm.weight" in state,
        "mlp_norm": "blocks.0.mlp.norm.weight" in state,
        "mlp_bias": "blocks.0.mlp.fc1.bias" in state,
    }
    if "pos_embed" in state:
        found["cls_position"] = _has_prefix_positions(state["pos_embed"].shape[1], found)
    return found


def _has_prefix_positions(length: int, found: Mapping[str, Any]) -> bool:
    """True if the table begins with positions for class and distillation token: only one choice leaves a square."""
    prefix = int(found["cls_token"]) + int(found["dist_token"])
    with_prefix, without = math.isqrt(length - prefix) ** 2 == length - prefix, math.isqrt(length) ** 2 == length
    return with_prefix or not without  # if neither is square, prefix positions are the usual case


def _image_size(state: Mapping[str, Tensor], found: Mapping[str, Any], where: object) -> tuple[int, int]:
    patch = found["patch_size"]
    if "pos_embed" not in state:
        return 16 * patch[0], 16 * patch[1]
    patches = state["pos_embed"].shape[1] - _placed(found)
    side = math.isqrt(patches)
    if side * side != patches:
        why = f"{patches} positions are not a square grid"
        hint = "--image-size of the weights"
        raise WeightsError("cannot determine the grid of positions", where=where, why=why, hint=hint)
    return side * patch[0], side * patch[1]
