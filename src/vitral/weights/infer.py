"""The configuration of a network from its tensors: shapes tell nearly all of it, the format the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitral.errors import WeightsError
from vitral.model import SIZES, ViTConfig
from vitral.model.resnet import stem_stride
from vitral.weights.formats.format import depth_of, layers_of
from vitral.weights.keymap import Facts


def infer(
    state: Mapping[str, Tensor], facts: Facts, where: object, image_size: int | tuple[int, int] | None = None
) -> ViTConfig:
    """The configuration that tensors under our names are of. `facts` are fields that shapes cannot tell (activation,
    epsilon, heads, image size) and win over what shapes suggest. `image_size` is what the network is wanted for: where
    the grid of positions is no square, it is believed to be that one.

    `WeightsError` where neither tells the number of heads or the grid.
    """
    try:
        kernel = state["patch_embed.proj.weight"]
        found = {**_sizes(state, kernel), **_parts(state)}
    except KeyError as missing:
        raise WeightsError("not the weights of a whole network", where=where, why=f"{missing} is missing") from None
    found |= {name: value for name, value in facts.items() if value is not None}
    if "heads" not in found:
        found["heads"] = _heads(found, where)
    if "image_size" not in found:
        found["image_size"] = _image_size(state, found, image_size, where)
    return ViTConfig(**found)


def _sizes(state: Mapping[str, Tensor], kernel: Tensor) -> dict[str, Any]:
    dim = kernel.shape[0]
    wide, narrow = state["blocks.0.mlp.fc1.weight"].shape[0], state["blocks.0.mlp.fc2.weight"].shape[1]
    found: dict[str, Any] = {
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


def _patches(state: Mapping[str, Tensor], kernel: Tensor) -> dict[str, Any]:
    """Channels of the picture and pixels of a patch; with a ResNet before the patches its stages too."""
    root, stages = state.get("patch_embed.backbone.stem.conv.weight"), "patch_embed.backbone.stages."
    if root is None:
        return {"channels": kernel.shape[1], "patch_size": (kernel.shape[2], kernel.shape[3])}
    layers = layers_of(state, stages)
    height, width = (stem_stride(layers) * side for side in kernel.shape[2:])
    return {"channels": root.shape[1], "patch_size": (height, width), "stem": layers}


def _parts(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a network has is what there are tensors for."""
    cls_token = "cls_token" in state
    dim = state["patch_embed.proj.weight"].shape[0]
    head = state.get("head.weight")
    if "attn_pool.latent" in state:
        pool = "map"
    elif head is not None and head.shape[1] == 2 * dim:
        pool = "cls-mean"
    else:
        pool = "cls" if cls_token and "fc_norm.weight" not in state else "mean"
    found: dict[str, Any] = {
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
    }
    if "pos_embed" in state:
        found["cls_position"] = _has_prefix_positions(state["pos_embed"].shape[1], found)
    return found


def _has_prefix_positions(length: int, found: Mapping[str, Any]) -> bool:
    """Whether the table begins with places for class and distillation token: only one way leaves a square."""
    prefix = int(found["cls_token"]) + int(found["dist_token"])
    with_prefix, without = math.isqrt(length - prefix) ** 2 == length - prefix, math.isqrt(length) ** 2 == length
    return with_prefix or not without  # a grid that is no square is told by the image size; places are the usual case


_SCALED_HEADS = {(1536, 40): 24, (1280, 32): 20, (4096, 40): 32}
"""Width and depth → heads, of networks with LayerScale: DINOv2's giant, DINOv3's H+ and 7B."""


def _heads(found: Mapping[str, Any], where: object) -> int:
    """No tensor's shape tells the heads: the published sizes of this width do, else the usual width of 64."""
    dim, depth = found["dim"], found["depth"]
    if found["layer_scale"] is not None and (dim, depth) in _SCALED_HEADS:
        return _SCALED_HEADS[dim, depth]
    known = {size.heads for size in SIZES.values() if size.dim == dim}
    exact = {size.heads for size in SIZES.values() if (size.dim, size.depth) == (dim, depth)}
    for heads in (exact, known):
        if len(heads) == 1:
            return heads.pop()
    if dim % 64 == 0:
        return dim // 64
    why = f"no known size is {dim} wide, and no tensor tells"
    raise WeightsError("cannot tell the number of heads", where=where, why=why, hint="--heads 12")


def _image_size(
    state: Mapping[str, Tensor], found: Mapping[str, Any], wanted: int | tuple[int, int] | None, where: object
) -> tuple[int, int]:
    patch = found["patch_size"]
    if "pos_embed" not in state:
        return 16 * patch[0], 16 * patch[1]
    placed = int(found["cls_token"]) + int(found["dist_token"]) if found["cls_position"] else 0
    patches = state["pos_embed"].shape[1] - placed
    side = math.isqrt(patches)
    height, width = (wanted, wanted) if isinstance(wanted, int) else wanted or (0, 0)
    if side * side != patches and (height // patch[0]) * (width // patch[1]) == patches:
        return height, width
    if side * side != patches:
        why = f"{patches} positions are no square"
        raise WeightsError(
            "cannot tell the grid of positions", where=where, why=why, hint="--image-size of the weights"
        )
    return side * patch[0], side * patch[1]
