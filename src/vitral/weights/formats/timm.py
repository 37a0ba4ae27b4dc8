"""Formats of timm and files with the same names: AugReg, DeiT, DeiT-III, MAE, SigLIP, DINOv2 and DINOv3 as in timm.

vitral's parameter names are timm's, so the map is almost the identity. `timm/models/vision_transformer.py`, `deit.py`
and `eva.py` are the reference for names, `pretrained_cfg` and `config.json`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitral.atomic import write_text
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.model.resnet import stem_stride
from vitral.weights import class_names
from vitral.weights.architectures import named
from vitral.weights.files import write_plain
from vitral.weights.formats.checkpoint import ENCODER, write_checkpoint
from vitral.weights.formats.format import HEADS, Format, translated
from vitral.weights.native import Weights
from vitral.weights.notes import Caution
from vitral.weights.preprocessing_configs import DEFAULTS, from_timm, to_timm
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import (
    PAIR,
    PATCHES,
    QUERY_VALUE_BIAS,
    STACKED,
    ConfigFields,
    Form,
    Rule,
    both,
    same,
)

_BLOCK = same(
    {
        f"blocks.{{i}}.{name}": f"blocks.{{i}}.{name}"
        for name in (
            "norm1.*",
            "attn.qkv.*",
            "attn.q_norm.*",
            "attn.k_norm.*",
            "attn.norm.*",
            "attn.proj.*",
            "norm2.*",
            "mlp.fc1.*",
            "mlp.norm.*",
            "mlp.fc2.*",
        )
    }
)
_SCALES = same({f"blocks.{{i}}.ls{n}.gamma": f"blocks.{{i}}.ls{n}.gamma" for n in (1, 2)})
_EDGES = same(
    {
        name: name
        for name in (
            "cls_token",
            "dist_token",
            "reg_token",
            "pos_embed",
            "patch_embed.proj.*",
            "norm_pre.*",
            "norm.*",
            "fc_norm.*",
            "head.*",
            "head_dist.*",
        )
    }
)
_POOL = same(
    {
        f"attn_pool.{name}": f"attn_pool.{name}"
        for name in ("latent", "q.*", "kv.*", "proj.*", "norm.*", "mlp.fc1.*", "mlp.fc2.*")
    }
)
_PRE_LOGITS = same({"pre_logits.*": "pre_logits.fc.*"})
_GAMMAS = tuple(Rule(f"blocks.{{i}}.ls{n}.gamma", (f"blocks.{{i}}.gamma_{n}",)) for n in (1, 2))

_ROOT = "patch_embed.backbone."
_UNIT = f"{_ROOT}stages.{{s}}.blocks.{{i}}"
_PARTS = tuple(f"{part}{n}{end}" for n in (1, 2, 3) for part, end in (("conv", ".weight"), ("norm", ".*")))
_HYBRID = same(
    {
        name: name
        for name in (
            f"{_ROOT}stem.conv.weight",
            f"{_ROOT}stem.norm.*",
            f"{_UNIT}.downsample.conv.weight",
            f"{_UNIT}.downsample.norm.*",
            *(f"{_UNIT}.{part}" for part in _PARTS),
        )
    }
)

PLAIN = (*_EDGES, *_BLOCK, *_POOL, *_PRE_LOGITS)
"""Rules of every file with timm's names, except for LayerScale."""


def facts(source: Source) -> ConfigFields:
    """Read the fields stated by timm's config.json: the architecture by name, and the arguments it was built with.

    Raises `WeightsError` for an architecture that is unknown or cannot be computed, and for an argument that vitral
    does not honor: it may change the arithmetic.
    """
    config = source.config or {}
    if "architecture" not in config:
        return {"stem_numerics": "timm"} if any(name.startswith(_ROOT) for name in source.tensors) else {}
    architecture = named(str(config["architecture"]), source.where)
    found = dict(architecture.fields)
    given = config.get("model_args") or {}
    cfg = config.get("pretrained_cfg") or {}
    if not isinstance(given, Mapping) or not isinstance(cfg, Mapping):
        raise _not_honored("model_args", given, source)
    for name, value in given.items():
        if name in _ARGUMENTS:
            found |= _argument(name, value, source)
        elif name not in _IMPLIED:
            raise _not_honored(name, value, source)
    own_pool = architecture.network != "VisionTransformer" and found.get("pool") == "map"
    if own_pool and "num_heads" in given and not given.get("attn_pool_num_heads"):  # 8, or as many as the blocks have
        raise _not_honored("attn_pool_num_heads", "missing beside num_heads", source)
    found |= _pool(given.get("global_pool", config.get("global_pool")), given, found, source)
    if "no_embed_class" in given:
        apart = bool(given["no_embed_class"])
        found |= {"cls_position": not apart, "register_position": not apart}
    flexible = architecture.network == "NaFlexVit"  # its table of positions is of another size than its images
    return found | {"image_size": None if flexible else image_size(source)}


def image_size(source: Source) -> tuple[int, int] | None:
    """Read height and width from config.json; None if not stated."""
    config = source.config or {}
    given, cfg = config.get("model_args") or {}, config.get("pretrained_cfg") or {}
    return _size(given.get("img_size") or (cfg.get("input_size") or (None,))[1:])


_IMPLIED = {
    "img_size",
    "patch_size",
    "in_chans",
    "num_classes",
    "embed_dim",
    "depth",
    "mlp_ratio",
    "qkv_bias",
    "qk_norm",
    "init_values",
    "class_token",
    "reg_tokens",
    "num_reg_tokens",
    "pos_embed",
    "fc_norm",
    "use_fc_norm",
    "final_norm",
    "pre_norm",
    "proj_bias",
    "scale_attn_norm",
    "scale_mlp_norm",
    "swiglu_mlp",
    "scale_mlp",
    "scale_attn_inner",
    "use_abs_pos_emb",
    "use_pre_transformer_norm",
    "use_post_transformer_norm",
    "qkv_fused",
    "drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "drop_path_rate",
    "weight_init",
    "fix_init",
    "head_init_scale",
    "dynamic_img_size",
    "dynamic_img_pad",
    "strict_img_size",
    "no_embed_class",
    "global_pool",
    "pool_include_prefix",
    "pos_embed_grid_size",
}
"""Arguments whose effect shows in the tensors' shapes, is read separately, or ends with training."""
_ARGUMENTS: Mapping[str, str] = {"num_heads": "heads", "attn_pool_num_heads": "pool_heads", "act_layer": "activation"}
"""Argument → the field of the configuration that it sets."""
_ACTS = {"gelu": "gelu", "gelu_tanh": "gelu-tanh", "quick_gelu": "quick-gelu", "relu": "relu", "silu": "silu"}


def _argument(name: str, value: object, source: Source) -> ConfigFields:
    value = _ACTS.get(value) if name == "act_layer" and isinstance(value, str) else value
    if type(value) is not (str if name == "act_layer" else int):
        raise _not_honored(name, value, source)
    return {_ARGUMENTS[name]: value}


_POOLING = {"token": "cls", "avg": "mean", "map": "map"}


def _pool(pooling: object, given: Mapping[str, object], found: ConfigFields, source: Source) -> ConfigFields:
    prefix = bool(given.get("pool_include_prefix", found.get("pool") == "mean-all" or found.get("pool_prefix", False)))
    if pooling is None:
        return {}
    if not isinstance(pooling, str) or pooling not in _POOLING:
        raise _not_honored("global_pool", pooling, source)
    pool = _POOLING[pooling]
    return {"pool": "mean-all" if pool == "mean" and prefix else pool, "pool_prefix": prefix if pool == "map" else True}


def _not_honored(name: str, value: object, source: Source) -> WeightsError:
    why = f"'{name}' in config.json is {str(value)[:40]!r}"
    return WeightsError("cannot honor the configuration of the weights", where=source.where, why=why)


def _size(value: object) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, Sequence) and len(value) == 2 and all(type(side) is int for side in value):
        return value[0], value[1]
    return None


def preprocessing(default: str) -> Any:
    """Make a function that reads preprocessing from the file's `pretrained_cfg`, else takes the family's default."""

    def of(source: Source, config: ViTConfig) -> tuple[Preprocessing, str]:
        cfg = (source.config or {}).get("pretrained_cfg")
        if isinstance(cfg, Mapping):
            return from_timm(cfg), "pretrained_cfg in config.json"
        others = "; `vitral convert --from deit` or dino for weights of those" if default == "timm-augreg" else ""
        return DEFAULTS[default](config.image), Caution(f"not stated by the file: {default}'s default{others}")

    return of


def classes(source: Source, count: int) -> tuple[str, ...] | None:
    """Read the class names of config.json."""
    return class_names.from_config(source.config or {})


def _stated(source: Source) -> bool:
    return "architecture" in (source.config or {})


_FC1 = "blocks.{i}.mlp.fc1"
_QKV = [f"blocks.{{i}}.attn.{name}_proj" for name in "qkv"]
_QUERY_VALUE_BIASES = (
    Rule("blocks.{i}.attn.qkv.bias", ("blocks.{i}.attn.q_bias", "blocks.{i}.attn.v_bias"), QUERY_VALUE_BIAS),
)
_APART = (
    Rule("blocks.{i}.attn.qkv.weight", tuple(f"{name}.weight" for name in _QKV), STACKED),
    Rule("blocks.{i}.attn.qkv.bias", tuple(f"{name}.bias" for name in _QKV), STACKED),
    Rule("blocks.{i}.attn.qkv.bias", (f"{_QKV[0]}.bias", f"{_QKV[2]}.bias"), QUERY_VALUE_BIAS),
)
_FREQUENCIES = same({"rope_freqs": "rope.freqs"})


_GRID = Form(
    "a grid as a list",
    lambda tensors: tensors[0].flatten(1, 2),
    lambda parameter, heads: [parameter.unflatten(1, (math.isqrt(parameter.shape[1]), -1))],
)
_FLEXIBLE = (
    Rule("patch_embed.proj.weight", ("embeds.proj.weight",), PATCHES),
    Rule("pos_embed", ("embeds.pos_embed",), _GRID),
    *same(
        {"patch_embed.proj.bias": "embeds.proj.bias", "cls_token": "embeds.cls_token", "reg_token": "embeds.reg_token"}
    ),
)


def _write(weights: Weights, path: Path) -> Sequence[Path]:
    """Write a folder for `timm.create_model("local-dir:PATH")` and transformers' pipelines (by its timm wrapper)."""
    assert isinstance(weights.config, ViTConfig)  # `convert.write` has another writer for BiT
    kind = TIMM_EVA if weights.config.position == "rotary" else TIMM
    if weights.config.stem is not None and weights.config.stem_numerics != "timm":
        why = "its ResNet has the numerics (epsilon, padding) of the authors' code, not those of timm"
        raise WeightsError("this network cannot be written for timm", why=why)
    tensors = translated(kind, weights)
    if weights.config.stem == ():
        tensors = {name.replace(f"{_ROOT}stem.", _ROOT): tensor for name, tensor in tensors.items()}
    if _lacks_register_positions(weights.config):  # zeros for registers, after that of the class token
        table = tensors["pos_embed"]
        zeros = table.new_zeros(1, weights.config.registers, table.shape[2])
        tensors["pos_embed"] = torch.cat([table[:, :1], zeros, table[:, 1:]], dim=1)
    write_plain(path / "model.safetensors", tensors)
    write_text(path / "config.json", json.dumps(_config(weights, weights.config), indent=2) + "\n")
    return [path / "config.json", path / "model.safetensors"]


def _lacks_register_positions(config: ViTConfig) -> bool:
    """True for a table with a position for the class token and none for registers: timm's has both or neither."""
    has_table = config.position == "learned" and config.cls_token and not config.dist_token
    return bool(config.registers) and config.cls_position and not config.register_position and has_table


def _canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename a hybrid whose ResNet is the root alone to the names of one with stages."""
    start = re.compile(re.escape(_ROOT) + r"(?=(conv|norm)\.)")
    return {start.sub(f"{_ROOT}stem.", name): tensor for name, tensor in tensors.items()}


def _config(weights: Weights, config: ViTConfig) -> dict[str, object]:
    """Build timm's config.json: an architecture with the right parts, and arguments that make it this network."""
    names = list(weights.classes)
    return {
        "architecture": _architecture(config),
        "num_classes": config.classes,
        "num_features": config.features,
        "global_pool": _GLOBAL_POOL[config.pool],
        "model_args": _model_args(config),
        "label_names": names,
        "pretrained_cfg": {
            **to_timm(weights.preprocessing),
            "num_classes": config.classes,
            "label_names": names,
            "first_conv": _FIRST_CONV.get(config.stem, "patch_embed.backbone.stem.conv"),
            "classifier": ["head", "head_dist"] if config.dist_token else "head",
        },
    }


_FIRST_CONV: Mapping[tuple[int, ...] | None, str] = {None: "patch_embed.proj", (): "patch_embed.backbone.conv"}
"""Layer that timm adapts to other channels, of a network without a stem and with one that is the root alone."""
_GLOBAL_POOL = {"cls": "token", "mean": "avg", "mean-all": "avg", "map": "map"}
_STEMS = {
    (): "vit_tiny_r_s16_p8_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def _architecture(config: ViTConfig) -> str:
    """Choose the entry of timm's table with the parts of this network; `_model_args` sets its sizes."""
    if config.position == "rotary":
        return "vit_huge_plus_patch16_dinov3" if config.activation == "swiglu" else "vit_small_patch16_dinov3"
    if config.stem is not None:
        return _STEMS[config.stem]
    if config.dist_token:
        return "deit_base_distilled_patch16_224"
    return "vit_giant_patch14_dinov2" if config.activation == "swiglu" else "vit_base_patch16_224"


def _model_args(config: ViTConfig) -> dict[str, object]:
    wide = 2 if config.activation == "swiglu" and config.position != "rotary" else 1
    args: dict[str, object] = {
        "img_size": list(config.image),
        "in_chans": config.channels,
        "embed_dim": config.dim,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": wide * config.mlp_dim / config.dim,
        "qkv_bias": config.qkv_bias,
        "init_values": config.layer_scale,
        "class_token": config.cls_token,
        "global_pool": _GLOBAL_POOL[config.pool],
    }
    stride = 1 if config.stem is None else stem_stride(config.stem)
    rows, columns = (side // stride for side in config.patch)
    args["patch_size"] = [rows, columns] if rows != columns else rows
    if config.position == "rotary":
        return args | {"num_reg_tokens": config.registers, "use_fc_norm": config.final_norm == "pooled"}
    if not config.dist_token:
        args |= {
            "reg_tokens": config.registers,
            "no_embed_class": not ((config.cls_position and config.cls_token) or config.register_position),
            "pool_include_prefix": config.pool == "mean-all",
        }
    if config.activation != "swiglu":
        args["act_layer"] = "gelu_tanh" if config.activation == "gelu-tanh" else "gelu"
    return args | {
        "qk_norm": config.qk_norm,
        "fc_norm": config.final_norm == "pooled",
        "final_norm": config.final_norm != "none",
        "pos_embed": "learn" if config.position == "learned" else "none",
    }


_FIXED: dict[str, Sequence[Any]] = {
    "norm": ("pre",),
    "attention_scale": ("head",),
    "logits_tanh": (False,),
    "pool": tuple(_GLOBAL_POOL),
    "stem": (None, *_STEMS),
    "pre_logits": (False,),
}
"""Fields that no argument of timm's networks changes. timm leaves out tensors of pre-logits without a word."""

TIMM = Format(
    name="timm",
    rules=(*PLAIN, *_SCALES, *_HYBRID),
    required=("blocks.{i}.attn.qkv.weight", "patch_embed.proj.weight"),
    canonical=_canonical,
    scheme="bicubic-antialias",
    preprocessing=preprocessing("timm-augreg"),
    facts=facts,
    stated=_stated,
    architectures=True,
    heads={},
    classes=classes,
    fixed={**_FIXED, "norm_eps": (1e-6,), "position": ("learned", "none"), "proj_bias": (True,)},
    write=_write,
)
DEIT = Format(
    name="deit",
    rules=TIMM.rules,
    required=(),  # the names are timm's: it must be given by --from
    scheme="bicubic",
    preprocessing=preprocessing("deit"),
)
DEIT3 = Format(
    name="deit3",
    heads={**HEADS, (512, 2048): 8},
    rules=(*PLAIN, *_GAMMAS),
    required=("blocks.{i}.gamma_1", "pos_embed", "head.weight"),
    scheme="bicubic",
    preprocessing=preprocessing("deit3"),
)


def _write_mae(weights: Weights, path: Path) -> Sequence[Path]:
    """Write a checkpoint for `main_finetune.py --finetune` and `main_linprobe.py` of facebookresearch/mae."""
    return write_checkpoint(MAE, weights, path, "model")


MAE = Format(
    name="mae",
    rules=PLAIN,
    required=("mask_token", "blocks.{i}.norm1.weight"),
    scheme="bicubic",
    preprocessing=preprocessing("mae"),
    ignored={"mask_token": "replaces masked patches in pre-training", "decoder_*": "the decoder of pre-training"},
    fixed=ENCODER,
    write=_write_mae,
)
TIMM_EVA = Format(
    name="timm-eva",
    rules=(
        *_QUERY_VALUE_BIASES,
        *both("blocks.{i}.mlp.fc1", (f"{_FC1}_g", f"{_FC1}_x"), PAIR, when=("activation", "swiglu")),
        *_EDGES,
        *_BLOCK,
        *_GAMMAS,
        *_APART,
        *_POOL,
        *_FREQUENCIES,
    ),
    required=("blocks.{i}.norm1.weight", "patch_embed.proj.weight"),
    any_of=(
        "blocks.{i}.gamma_1",
        "blocks.{i}.attn.q_bias",
        "blocks.{i}.attn.q_proj.weight",
        "blocks.{i}.mlp.fc1_g.weight",
        "rope.freqs",
    ),
    scheme="bicubic-antialias",
    preprocessing=preprocessing("dinov3"),
    facts=facts,
    stated=_stated,
    architectures=True,
    heads={},
    classes=classes,
    fixed={**_FIXED, "norm_eps": (1e-5,), "position": ("rotary",), "qk_norm": (False,), "proj_bias": (True,)},
)
TIMM_NAFLEX = Format(
    name="timm-naflex",
    rules=(*_FLEXIBLE, *TIMM.rules),
    required=("embeds.proj.weight", "blocks.{i}.attn.qkv.weight"),
    scheme="bicubic-antialias",
    preprocessing=preprocessing("timm-augreg"),
    facts=facts,
    stated=_stated,
    architectures=True,
    heads={},
    classes=classes,
)
FORMATS = {one.name: one for one in (TIMM, DEIT, DEIT3, MAE, TIMM_EVA, TIMM_NAFLEX)}
