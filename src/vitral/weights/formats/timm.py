"""timm's files and those with the same names: AugReg, DeiT, DeiT-III, MAE, SigLIP, DINOv2 and DINOv3 as timm has them.

Our own parameter names are timm's, so the map is almost the identity. `timm/models/vision_transformer.py`, `deit.py`
and `eva.py` are the reference for names, `pretrained_cfg` and `config.json`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.data.transforms import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.model.resnet import stem_stride
from vitral.weights import labels
from vitral.weights.files import write_plain, write_text
from vitral.weights.formats.format import Format, translated
from vitral.weights.keymap import PAIR, QUERY_VALUE_BIAS, Facts, Rule, both, same
from vitral.weights.native import Weights
from vitral.weights.preprocessing import DEFAULTS, from_timm, to_timm
from vitral.weights.source import Source

_BLOCK = same(
    {
        f"blocks.{{i}}.{name}": f"blocks.{{i}}.{name}"
        for name in (
            "norm1.*", "attn.qkv.*", "attn.q_norm.*", "attn.k_norm.*", "attn.proj.*", "norm2.*", "mlp.fc1.*",
            "mlp.fc2.*",
        )
    }
)  # fmt: skip
_SCALES = same({f"blocks.{{i}}.ls{n}.gamma": f"blocks.{{i}}.ls{n}.gamma" for n in (1, 2)})
_EDGES = same(
    {
        name: name
        for name in (
            "cls_token", "dist_token", "reg_token", "pos_embed", "patch_embed.proj.*", "norm.*", "fc_norm.*", "head.*",
            "head_dist.*",
        )
    }
)  # fmt: skip
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
            f"{_ROOT}stem.conv.weight", f"{_ROOT}stem.norm.*", f"{_UNIT}.downsample.conv.weight",
            f"{_UNIT}.downsample.norm.*", *(f"{_UNIT}.{part}" for part in _PARTS),
        )
    }
)  # fmt: skip

PLAIN = (*_EDGES, *_BLOCK, *_POOL, *_PRE_LOGITS)
"""Rules of every file with timm's names, but for LayerScale."""

_TANH = (
    "*siglip2*",
    "vit_giantopt_*",
    "vit_base_patch32_siglip_*",
    "vit_large_patch16_siglip_*512*",
    "vit_so400m_patch16_siglip_*",
)
"""Architectures with GELU in its tanh form; the others of this file have the exact one."""
_FOREIGN = ("*clip*", "*_mci_*", "*parallel*", "*beit*", "*rope*", "*_rpn*", "*relpos*", "*aimv2*", "*_pe_*")
"""Architectures whose arithmetic is another, though their names of tensors may look alike."""


def facts(source: Source) -> Facts:
    """What timm's config.json tells: architecture, pooling, image size and what the model was built with."""
    config = source.config or {}
    architecture = str(config.get("architecture", ""))
    if architecture and any(fnmatchcase(architecture, one) for one in _FOREIGN) and "siglip" not in architecture:
        raise WeightsError(f"'{architecture}' is no plain ViT", where=source.where, why="its arithmetic is another")
    given: Mapping[str, Any] = config.get("model_args") or {}
    cfg: Mapping[str, Any] = config.get("pretrained_cfg") or {}
    found: Facts = {
        "heads": given.get("num_heads", _HEADS.get(architecture)),
        "norm_eps": given.get("norm_eps"),
        "activation": "gelu-tanh" if any(fnmatchcase(architecture, one) for one in _TANH) else None,
        "image_size": _size(given.get("img_size") or (cfg.get("input_size") or (None,))[1:]),
    }
    if any(name.startswith(_ROOT) for name in source.tensors):
        found["stem_numerics"] = "timm"
    if given.get("act_layer") == "gelu_tanh":
        found["activation"] = "gelu-tanh"
    pooling = given.get("global_pool") or config.get("global_pool")
    if pooling in _POOLING:
        found["pool"] = _POOLING[pooling]
    return found


_HEADS = {"vit_base_patch16_gap_224": 16}
"""Architectures whose heads are not those of other networks of their size."""
_POOLING = {"token": "cls", "avg": "mean", "map": "map"}


def _size(value: Any) -> tuple[int, int] | None:
    if isinstance(value, int):
        return value, value
    if isinstance(value, Sequence) and len(value) == 2 and all(type(side) is int for side in value):
        return value[0], value[1]
    return None


def preprocessing(default: str) -> Any:
    """How pictures are prepared: by the file's `pretrained_cfg`, else by the family's usual way."""

    def of(source: Source, config: ViTConfig) -> tuple[Preprocessing, str]:
        cfg = (source.config or {}).get("pretrained_cfg")
        if isinstance(cfg, Mapping):
            return from_timm(cfg), "pretrained_cfg in config.json"
        return DEFAULTS[default](config.image), _usual(default)

    return of


def _usual(default: str) -> str:
    others = "; `vitral convert --from deit` or dino if it is one of those" if default == "timm-augreg" else ""
    return f"the file does not say: {default}'s usual way{others}"


def classes(source: Source, count: int) -> tuple[str, ...] | None:
    """Class names of config.json."""
    return labels.from_config(source.config or {})


_FC1 = "blocks.{i}.mlp.fc1"
_DINOV3 = {"position": "rotary", "norm_eps": 1e-5}


def dinov3_facts(source: Source) -> Facts:
    """DINOv3 in timm's own spelling (`Eva`): rotary positions, mean pooling unless the file says otherwise."""
    return {"pool": "mean", **_DINOV3, **{k: v for k, v in facts(source).items() if v is not None}}


def _write(weights: Weights, path: Path) -> Sequence[Path]:
    """A folder for `timm.create_model("local-dir:PATH")` and transformers' pipelines (through its timm wrapper)."""
    if not isinstance(weights.config, ViTConfig):
        raise WeightsError("this network cannot be written for timm", why="a BiT ResNet is written by --to jax only")
    kind = TIMM_DINOV3 if weights.config.position == "rotary" else TIMM
    if weights.config.stem is not None and weights.config.stem_numerics != "timm":
        why = "its ResNet has the small numbers of the authors' code, not those of timm"
        raise WeightsError("this network cannot be written for timm", why=why)
    tensors = translated(kind, weights)
    if weights.config.stem == ():
        tensors = {name.replace(f"{_ROOT}stem.", _ROOT): tensor for name, tensor in tensors.items()}
    write_plain(path / "model.safetensors", tensors)
    write_text(path / "config.json", json.dumps(_config(weights, weights.config), indent=2) + "\n")
    return [path / "config.json", path / "model.safetensors"]


def _canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A hybrid whose ResNet is the root alone, under the names of one with stages."""
    start = re.compile(re.escape(_ROOT) + r"(?=(conv|norm)\.)")
    return {start.sub(f"{_ROOT}stem.", name): tensor for name, tensor in tensors.items()}


def _config(weights: Weights, config: ViTConfig) -> dict[str, Any]:
    """timm's config.json: an architecture of the right kind, and arguments that make it this network."""
    names = list(weights.classes)
    return {
        "architecture": _architecture(config),
        "num_classes": config.classes,
        "num_features": config.features,
        "global_pool": _GLOBAL_POOL[config.pool],
        "model_args": _model_args(config),
        "label_names": names,
        "pretrained_cfg": {**to_timm(weights.preprocessing), "num_classes": config.classes, "label_names": names},
    }


_GLOBAL_POOL = {"cls": "token", "mean": "avg", "mean-all": "avg", "map": "map"}
_STEMS = {
    (): "vit_tiny_r_s16_p8_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}


def _architecture(config: ViTConfig) -> str:
    """The entry of timm's table whose parts are those of this network; sizes are told beside it."""
    if config.position == "rotary":
        return "vit_huge_plus_patch16_dinov3" if config.activation == "swiglu" else "vit_small_patch16_dinov3"
    if config.stem is not None:
        return _STEMS[config.stem]
    if config.dist_token:
        return "deit_base_distilled_patch16_224"
    return "vit_giant_patch14_dinov2" if config.activation == "swiglu" else "vit_base_patch16_224"


def _model_args(config: ViTConfig) -> dict[str, Any]:
    wide = 2 if config.activation == "swiglu" and config.position != "rotary" else 1
    args: dict[str, Any] = {
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
            "no_embed_class": not config.cls_position,
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
    "norm": ("pre",), "attention_scale": ("head",), "logits_tanh": (False,), "pool": tuple(_GLOBAL_POOL),
    "stem": (None, *_STEMS),
}  # fmt: skip
"""What timm's networks cannot be told to do otherwise."""

TIMM = Format(
    name="timm",
    rules=(*PLAIN, *_SCALES, *_HYBRID),
    required=("blocks.{i}.attn.qkv.weight", "patch_embed.proj.weight"),
    canonical=_canonical,
    scheme="bicubic-antialias",
    preprocessing=preprocessing("timm-augreg"),
    facts=facts,
    classes=classes,
    fixed={**_FIXED, "norm_eps": (1e-6,), "position": ("learned", "none"), "proj_bias": (True,)},
    write=_write,
)
DEIT = Format(
    name="deit",
    rules=TIMM.rules,
    required=(),  # the names are timm's: it must be asked for
    scheme="bicubic",
    preprocessing=preprocessing("deit"),
)
DEIT3 = Format(
    name="deit3",
    rules=(*PLAIN, *_GAMMAS),
    required=("blocks.{i}.gamma_1", "pos_embed", "head.weight"),
    scheme="bicubic",
    preprocessing=preprocessing("deit3"),
)
MAE = Format(
    name="mae",
    rules=PLAIN,
    required=("mask_token", "blocks.{i}.norm1.weight"),
    scheme="bicubic",
    preprocessing=preprocessing("mae"),
    ignored={"mask_token": "stands for hidden patches in pre-training", "decoder_*": "the decoder of pre-training"},
)
TIMM_DINOV3 = Format(
    name="timm-dinov3",
    rules=(
        Rule("blocks.{i}.attn.qkv.bias", ("blocks.{i}.attn.q_bias", "blocks.{i}.attn.v_bias"), QUERY_VALUE_BIAS),
        *both("blocks.{i}.mlp.fc1", (f"{_FC1}_g", f"{_FC1}_x"), PAIR, when=("activation", "swiglu")),
        *_EDGES,
        *_BLOCK,
        *_GAMMAS,
    ),
    required=("blocks.{i}.gamma_1", "reg_token"),
    scheme="bicubic-antialias",
    preprocessing=preprocessing("dinov3"),
    facts=dinov3_facts,
    classes=classes,
    fixed={**_FIXED, "norm_eps": (1e-5,), "position": ("rotary",), "qk_norm": (False,), "proj_bias": (True,)},
)
FORMATS = {one.name: one for one in (TIMM, DEIT, DEIT3, MAE, TIMM_DINOV3)}
