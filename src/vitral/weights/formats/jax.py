"""Format of the authors' files (`.npz`): ViTs and hybrids of vit_jax and big_vision, in all spellings so far.

- Before Flax's linen the parts of a block were counted together (`LayerNorm_0`, `MultiHeadDotProductAttention_1`,
  `LayerNorm_2`, `MlpBlock_3`), since then each type separately (`LayerNorm_1`, `MlpBlock_0`).
- Positions were `Transformer/posembed_input/pos_embedding` (paper), then `Transformer/pos_embedding`, and are
  `pos_embedding` in big_vision, where the class token has none. A file without them has fixed sine-cosine positions.
- big_vision may stack all blocks along a first axis (`Transformer/encoderblock/…`), and puts `params/` or, for the
  image tower of a pair, `params/img/` before all names.

The paper's names are written: vit_jax and big_vision convert them to those of linen when loading (Flax's
`convert_pre_linen`, big_vision's `fix_old_checkpoints`), and other readers know no others.

Sources: vit_jax `models_vit.py`, `models_resnet.py`, `checkpoint.py`; big_vision `models/vit.py`.
"""

from __future__ import annotations

import dataclasses
import math
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitral.atomic import replacing
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError, WeightsError
from vitral.model import ViTConfig
from vitral.weights.formats.format import Format, translated
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import DEFAULTS
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import ConfigFields, Form, Rule

# ---- layouts: conversions between their arrays and our tensors


def _by_head(parameter: Tensor, heads: int) -> Tensor:
    """Reshape (h·d, D), or a bias (h·d), to (D, h, d) or (h, d)."""
    return parameter.t().unflatten(-1, (heads, -1)) if parameter.ndim == 2 else parameter.unflatten(0, (heads, -1))


def _heads_joined(tensor: Tensor) -> Tensor:
    """Invert `_by_head`: (D, h, d) or (h, d) to (h·d, D) or (h·d)."""
    return tensor.flatten(-2).t() if tensor.ndim == 3 else tensor.flatten()


def _joined(count: int) -> Form:
    note = {1: "heads joined", 2: "k, v stacked, heads joined", 3: "q, k, v stacked, heads joined"}[count]
    return Form(
        note,
        lambda tensors: _heads_joined(tensors[0]) if count == 1 else torch.cat([_heads_joined(one) for one in tensors]),
        lambda parameter, heads: [_by_head(one, heads) for one in parameter.chunk(count)],
    )


DENSE = Form("transposed", lambda tensors: tensors[0].t(), lambda parameter, heads: [parameter.t()])
"""(in, out) of Flax as (out, in); a view, no copy."""
CONV = Form(
    "HWIO to OIHW",
    lambda tensors: tensors[0].permute(3, 2, 0, 1).contiguous(),
    lambda parameter, heads: [parameter.permute(2, 3, 1, 0)],
)
VECTOR = Form("", lambda tensors: tensors[0].flatten(), lambda parameter, heads: [parameter])
"""Some norms have shape (1, 1, 1, C)."""
_QKV, _KV, _Q = _joined(3), _joined(2), _joined(1)
_OUT = Form(
    "heads joined, transposed",
    lambda tensors: tensors[0].flatten(0, 1).t(),
    lambda parameter, heads: [parameter.t().unflatten(0, (heads, -1))],
)


def norm(module: str, source: str) -> tuple[Rule, ...]:
    """Rules for scale and bias of a norm."""
    return Rule(f"{module}.weight", (f"{source}/scale",), VECTOR), Rule(f"{module}.bias", (f"{source}/bias",), VECTOR)


def dense(module: str, source: str, kernel: Form = DENSE) -> tuple[Rule, ...]:
    """Rules for kernel and bias of a layer."""
    return Rule(f"{module}.weight", (f"{source}/kernel",), kernel), Rule(f"{module}.bias", (f"{source}/bias",))


def _joint(module: str, source: str, parts: Sequence[str], form: Form) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{module}.{own}", tuple(f"{source}/{part}/{end}" for part in parts), form)
        for own, end in (("weight", "kernel"), ("bias", "bias"))
    )


# ---- names


def _block(attention: int, second_norm: int, mlp: int) -> tuple[Rule, ...]:
    """Rules for a block whose parts have these numbers."""
    block = "Transformer/encoderblock_{i}"
    heads, layers = f"{block}/MultiHeadDotProductAttention_{attention}", f"{block}/MlpBlock_{mlp}"
    return (
        *norm("blocks.{i}.norm1", f"{block}/LayerNorm_0"),
        *_joint("blocks.{i}.attn.qkv", heads, ("query", "key", "value"), _QKV),
        *dense("blocks.{i}.attn.proj", f"{heads}/out", _OUT),
        *norm("blocks.{i}.norm2", f"{block}/LayerNorm_{second_norm}"),
        *dense("blocks.{i}.mlp.fc1", f"{layers}/Dense_0"),
        *dense("blocks.{i}.mlp.fc2", f"{layers}/Dense_1"),
    )


def _pool() -> tuple[Rule, ...]:
    heads = "MAPHead_0/MultiHeadDotProductAttention_0"
    return (
        Rule("attn_pool.latent", ("MAPHead_0/probe",)),
        *_joint("attn_pool.q", heads, ("query",), _Q),
        *_joint("attn_pool.kv", heads, ("key", "value"), _KV),
        *dense("attn_pool.proj", f"{heads}/out", _OUT),
        *norm("attn_pool.norm", "MAPHead_0/LayerNorm_0"),
        *dense("attn_pool.mlp.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
        *dense("attn_pool.mlp.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
    )


def _stem() -> tuple[Rule, ...]:
    """Rules for the ResNet of a hybrid."""
    module, source = "patch_embed.backbone.stages.{s}.blocks.{i}", "block{s+1}/unit{i+1}"
    rules = [
        Rule("patch_embed.backbone.stem.conv.weight", ("conv_root/kernel",), CONV),
        *norm("patch_embed.backbone.stem.norm", "gn_root"),
        Rule(f"{module}.downsample.conv.weight", (f"{source}/conv_proj/kernel",), CONV),
        *norm(f"{module}.downsample.norm", f"{source}/gn_proj"),
    ]
    for n in (1, 2, 3):
        rules.append(Rule(f"{module}.conv{n}.weight", (f"{source}/conv{n}/kernel",), CONV))
        rules += norm(f"{module}.norm{n}", f"{source}/gn{n}")
    return tuple(rules)


_TABLES = ("Transformer/posembed_input/pos_embedding", "Transformer/pos_embedding", "pos_embedding")

RULES: tuple[Rule, ...] = (
    Rule("cls_token", ("cls",)),
    *(Rule("pos_embed", (table,)) for table in _TABLES),
    *dense("patch_embed.proj", "embedding", CONV),
    *_stem(),
    *_block(attention=1, second_norm=2, mlp=3),
    *_block(attention=0, second_norm=1, mlp=0),
    *norm("norm", "Transformer/encoder_norm"),
    *_pool(),
    *dense("pre_logits", "pre_logits"),
    *dense("head", "head"),
)

_OPTIMIZER, _TEXT = "state of the optimizer", "the text tower, and the scale of its products with images"
IGNORED = {
    "opt/*": _OPTIMIZER,
    "extra/*": "state of the training",
    "params/txt/*": _TEXT,
    "txt/*": _TEXT,
    "params/t": _TEXT,
    "params/b": _TEXT,
    "t": _TEXT,
    "b": _TEXT,
}

PREFIXES = ("params/img/", "img/", "params/", "opt/target/")
"""Prefixes of all names of the network."""

_MOST_BLOCKS = 1000


def without_prefix(tensors: dict[str, Tensor], landmark: str) -> dict[str, Tensor]:
    """Remove the prefix found before `landmark`. A name that would then occur twice is kept."""
    prefix = next((one for one in PREFIXES if f"{one}{landmark}" in tensors), "")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(prefix)
        found[name if short in tensors else short] = tensor
    return found


def canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefix, split stacked blocks (as views), and complete the names of the pooling head."""
    plain = without_prefix(tensors, "embedding/kernel")
    found: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        first, _, rest = name.partition("Transformer/encoderblock/")
        if first or not rest or tensor.ndim == 0 or len(tensor) > _MOST_BLOCKS:
            inlined = "probe" in plain and name.partition("/")[0] in _INLINED
            found[f"MAPHead_0/{name}" if inlined else name] = tensor
        else:
            found |= {f"Transformer/encoderblock_{i}/{rest}": one for i, one in enumerate(tensor.unbind())}
    return found


_INLINED = ("probe", "MultiHeadDotProductAttention_0", "LayerNorm_0", "MlpBlock_0")
"""Parts of the pooling head during the development of ViT-G; no name of a block begins with one."""


def facts(source: Source) -> ConfigFields:
    """Fields of the configuration: heads from the kernels' shape; Flax's GELU is the tanh form, its epsilon 1e-6."""
    tensors = canonical(dict(source.tensors))
    found: ConfigFields = {"activation": "gelu-tanh", "norm_eps": 1e-6}
    found |= _heads(tensors)
    table = next((name for name in _TABLES if name in tensors), None)
    if table is None:
        # The file does not state the image size; big_vision trains such networks at 224.
        plain = "embedding/kernel" in tensors and "conv_root/kernel" not in tensors
        sides = tensors["embedding/kernel"].shape[:2] if plain else (0,)
        usual = all(side and 224 % side == 0 for side in sides)
        return found | {"position": "sincos", "image_size": (224, 224) if usual else None}
    if "cls" in tensors:
        length = tensors[table].shape[-2] if tensors[table].ndim > 1 else 0
        found["cls_position"] = table != "pos_embedding" or math.isqrt(max(length - 1, 0)) ** 2 == length - 1
    return found


def _heads(tensors: Mapping[str, Tensor]) -> ConfigFields:
    """Heads of the blocks, and of the pooling head if they differ."""
    kernels = {name: tensor for name, tensor in tensors.items() if name.endswith("/query/kernel") and tensor.ndim == 3}
    pooled = [tensor.shape[1] for name, tensor in kernels.items() if name.startswith("MAPHead_0/")]
    counts = [tensor.shape[1] for name, tensor in kernels.items() if not name.startswith("MAPHead_0/")]
    if not counts:
        return {}
    found: ConfigFields = {"heads": counts[0]}
    if len(set(counts)) > 1:
        raise UsageError(f"blocks of {' and '.join(map(str, sorted(set(counts))))} heads")
    return found | ({"pool_heads": pooled[0]} if pooled and pooled[0] != counts[0] else {})


def assumed(source: Source) -> Sequence[str]:
    """Note on a file without positions."""
    if any(name.endswith("pos_embedding") for name in source.tensors):
        return ()
    return ["there is no table of positions: fixed sine-cosine ones, as in big_vision"]


def preprocessing(source: Source, config: ViTConfig) -> tuple[Preprocessing, str]:
    """Preprocessing of vit_jax's evaluation."""
    return DEFAULTS["jax"](config.image), "the authors' evaluation"


# ---- writing


def save_arrays(path: Path, tensors: Mapping[str, Tensor]) -> Sequence[Path]:
    """Write an uncompressed `.npz` like `numpy.savez`, the same bytes for the same tensors; returns the file."""
    file = path if path.suffix else path / "model.npz"
    with replacing(file) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, tensor in tensors.items():
            plain = tensor.detach().cpu()
            if plain.dtype == torch.bfloat16:  # NumPy has no bfloat16; every bfloat16 value is a float32
                plain = plain.float()
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(plain.numpy()), allow_pickle=False)
    return [file]


def _write(weights: Weights, path: Path) -> Sequence[Path]:
    """Write a file for vit_jax (`checkpoint.load`), which has no attention pooling, and for big_vision."""
    config = weights.config
    assert isinstance(config, ViTConfig)
    if config.activation == "gelu":
        raise WeightsError(
            "this network cannot be written for jax",
            why="its GELU is exact; Flax computes the tanh form, up to 5e-4 off in each activation",
            hint="train with --activation gelu-tanh",
        )
    if config.cls_token != (config.pool == "cls"):
        why = f"pooling is {config.pool} {'beside' if config.cls_token else 'without'} a class token"
        hint = "a network trained with --pool cls --cls-token, or --to timm"
        raise WeightsError("this network cannot be written for jax", why=why, hint=hint)
    patches = config.grid[0] * config.grid[1]
    if not config.cls_token and math.isqrt(patches - 1) ** 2 == patches - 1:
        # big_vision's `fix_old_checkpoints` removes the first entry of every table of a square and one.
        why = f"big_vision would read the first of {patches} positions as that of a class token"
        raise WeightsError("this network cannot be written for jax", why=why)
    if config.stem is not None and config.stem_numerics != "authors":
        why = f"its ResNet has the numerics (epsilon, padding) of {config.stem_numerics}, not those of the authors"
        raise WeightsError("this network cannot be written for jax", why=why)
    return save_arrays(path, translated(JAX, _placed(weights)))


def _placed(weights: Weights) -> Weights:
    """Add positions of zero for tokens without one: vit_jax adds a position to every token."""
    config = weights.config
    assert isinstance(config, ViTConfig)
    if config.position not in ("learned", "none") or (config.position == "learned" and config.cls_position):
        return weights
    rows, columns = config.grid
    table = weights.state.get("pos_embed", torch.zeros(1, rows * columns, config.dim))
    first = torch.zeros(1, int(config.cls_token), config.dim, dtype=table.dtype)
    placed = dataclasses.replace(config, position="learned", cls_position=True)
    return dataclasses.replace(
        weights, config=placed, state={**weights.state, "pos_embed": torch.cat([first, table], dim=1)}
    )


JAX = Format(
    name="jax",
    rules=RULES,
    required=("embedding/kernel", "Transformer/encoder_norm/scale"),
    scheme="bilinear-corners",
    preprocessing=preprocessing,
    facts=facts,
    assumed=assumed,
    ignored=IGNORED,
    canonical=canonical,
    fixed={
        "pool": ("cls", "mean"),
        "position": ("learned",),
        "norm": ("pre",),
        "norm_eps": (1e-6,),
        "final_norm": ("tokens",),
        "activation": ("gelu-tanh",),
        "attention_scale": ("head",),
        "logits_tanh": (False,),
        "layer_scale": (None,),
        "qk_norm": (False,),
        "registers": (0,),
        "dist_token": (False,),
        "qkv_bias": (True,),
        "proj_bias": (True,),
    },
    write=_write,
)
