"""The authors' own files, `.npz`: ViTs and hybrids of vit_jax and big_vision, in all the spellings of their history.

- Before Flax's linen the parts of a block were counted together (`LayerNorm_0`, `MultiHeadDotProductAttention_1`,
  `LayerNorm_2`, `MlpBlock_3`), since then each kind by itself (`LayerNorm_1`, `MlpBlock_0`).
- Positions were `Transformer/posembed_input/pos_embedding` (paper), `Transformer/pos_embedding`, and are
  `pos_embedding` in big_vision, where the class token has none. A file without has fixed sine-cosine positions.
- big_vision may stack all blocks along a first axis (`Transformer/encoderblock/…`), and puts `params/` or, for the
  image tower of a pair, `params/img/` before all names.

Written are the paper's names: vit_jax and big_vision turn them into those of linen when they load (Flax's
`convert_pre_linen`, big_vision's `fix_old_checkpoints`), and other readers know only them.

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

from vitral.data.transforms import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.weights.files import replacing
from vitral.weights.formats.format import Format, translated
from vitral.weights.keymap import Facts, Form, Rule
from vitral.weights.native import Weights
from vitral.weights.preprocessing import DEFAULTS
from vitral.weights.source import Source

# ---- layouts: how an array of theirs becomes a tensor of ours


def _by_head(ours: Tensor, heads: int) -> Tensor:
    """(h·d, D), or a bias (h·d), as (D, h, d) or (h, d)."""
    return ours.t().unflatten(-1, (heads, -1)) if ours.ndim == 2 else ours.unflatten(0, (heads, -1))


def _heads_joined(theirs: Tensor) -> Tensor:
    """The way back: (D, h, d) or (h, d) as (h·d, D) or (h·d)."""
    return theirs.flatten(-2).t() if theirs.ndim == 3 else theirs.flatten()


def _joined(count: int) -> Form:
    told = {1: "heads joined", 2: "k, v stacked, heads joined", 3: "q, k, v stacked, heads joined"}[count]
    return Form(
        told,
        lambda theirs: _heads_joined(theirs[0]) if count == 1 else torch.cat([_heads_joined(one) for one in theirs]),
        lambda ours, heads: [_by_head(one, heads) for one in ours.chunk(count)],
    )


DENSE = Form("transposed", lambda theirs: theirs[0].t(), lambda ours, heads: [ours.t()])
"""(in, out) of Flax as (out, in); a view, no copy."""
CONV = Form(
    "HWIO to OIHW",
    lambda theirs: theirs[0].permute(3, 2, 0, 1).contiguous(),
    lambda ours, heads: [ours.permute(2, 3, 1, 0)],
)
VECTOR = Form("", lambda theirs: theirs[0].flatten(), lambda ours, heads: [ours])
"""Some norms have shape (1, 1, 1, C)."""
_QKV, _KV, _Q = _joined(3), _joined(2), _joined(1)
_OUT = Form(
    "heads joined, transposed",
    lambda theirs: theirs[0].flatten(0, 1).t(),
    lambda ours, heads: [ours.t().unflatten(0, (heads, -1))],
)


def norm(ours: str, theirs: str) -> tuple[Rule, ...]:
    """Scale and bias of a norm."""
    return Rule(f"{ours}.weight", (f"{theirs}/scale",), VECTOR), Rule(f"{ours}.bias", (f"{theirs}/bias",), VECTOR)


def dense(ours: str, theirs: str, kernel: Form = DENSE) -> tuple[Rule, ...]:
    """Kernel and bias of a layer."""
    return Rule(f"{ours}.weight", (f"{theirs}/kernel",), kernel), Rule(f"{ours}.bias", (f"{theirs}/bias",))


def _joint(ours: str, theirs: str, parts: Sequence[str], form: Form) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{ours}.{own}", tuple(f"{theirs}/{part}/{end}" for part in parts), form)
        for own, end in (("weight", "kernel"), ("bias", "bias"))
    )


# ---- names


def _block(attention: int, second_norm: int, mlp: int) -> tuple[Rule, ...]:
    """Rules of a block whose parts have these numbers."""
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
    """The ResNet of a hybrid."""
    ours, theirs = "patch_embed.backbone.stages.{s}.blocks.{i}", "block{s+1}/unit{i+1}"
    rules = [
        Rule("patch_embed.backbone.stem.conv.weight", ("conv_root/kernel",), CONV),
        *norm("patch_embed.backbone.stem.norm", "gn_root"),
        Rule(f"{ours}.downsample.conv.weight", (f"{theirs}/conv_proj/kernel",), CONV),
        *norm(f"{ours}.downsample.norm", f"{theirs}/gn_proj"),
    ]
    for n in (1, 2, 3):
        rules.append(Rule(f"{ours}.conv{n}.weight", (f"{theirs}/conv{n}/kernel",), CONV))
        rules += norm(f"{ours}.norm{n}", f"{theirs}/gn{n}")
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

_OPTIMIZER, _TEXT = "state of the optimizer", "the text tower, and the scale of its products with pictures"
IGNORED = {
    "opt/*": _OPTIMIZER, "extra/*": "state of the training",
    "params/txt/*": _TEXT, "txt/*": _TEXT, "params/t": _TEXT, "params/b": _TEXT, "t": _TEXT, "b": _TEXT,
}  # fmt: skip

PREFIXES = ("params/img/", "img/", "params/", "opt/target/")
"""What stands before all names of the network."""

_MOST_BLOCKS = 1000


def without_prefix(tensors: dict[str, Tensor], landmark: str) -> dict[str, Tensor]:
    """Without the prefix that stands before `landmark`. A name that would then be there twice is left as it was."""
    prefix = next((one for one in PREFIXES if f"{one}{landmark}" in tensors), "")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        short = name.removeprefix(prefix)
        found[name if short in tensors else short] = tensor
    return found


def canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without prefix, stacked blocks one by one (views), and the pooling head under its name."""
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
"""The pooling head's parts while ViT-G was developed; names of blocks never begin so."""


def facts(source: Source) -> Facts:
    """Heads by the kernels' own shape; Flax's GELU is the tanh form, its epsilon 1e-6."""
    tensors = canonical(dict(source.tensors))
    found: Facts = {"activation": "gelu-tanh", "norm_eps": 1e-6}
    query = next((tensor for name, tensor in tensors.items() if name.endswith("/query/kernel")), None)
    if query is not None and query.ndim == 3:
        found["heads"] = query.shape[1]
    table = next((name for name in _TABLES if name in tensors), None)
    if table is None:
        # Nothing in the file tells the image size; big_vision trains such networks at 224.
        plain = "embedding/kernel" in tensors and "conv_root/kernel" not in tensors
        sides = tensors["embedding/kernel"].shape[:2] if plain else (0,)
        usual = all(side and 224 % side == 0 for side in sides)
        return found | {"position": "sincos", "image_size": (224, 224) if usual else None}
    if "cls" in tensors:
        length = tensors[table].shape[-2] if tensors[table].ndim > 1 else 0
        found["cls_position"] = table != "pos_embedding" or math.isqrt(max(length - 1, 0)) ** 2 == length - 1
    return found


def assumed(source: Source) -> Sequence[str]:
    """What a file without positions leaves open."""
    if any(name.endswith("pos_embedding") for name in source.tensors):
        return ()
    return ["there is no table of positions: fixed sine-cosine ones, as big_vision has them"]


def preprocessing(source: Source, config: ViTConfig) -> tuple[Preprocessing, str]:
    """As vit_jax evaluates."""
    return DEFAULTS["jax"](config.image), "the authors' own evaluation"


# ---- writing


def save_arrays(path: Path, tensors: Mapping[str, Tensor]) -> Sequence[Path]:
    """An uncompressed `.npz`, as `numpy.savez` writes it, the same bytes for the same tensors; gives the file."""
    file = path if path.suffix else path / "model.npz"
    with replacing(file) as temporary, zipfile.ZipFile(temporary, "w") as archive:
        for name, tensor in tensors.items():
            plain = tensor.detach().cpu()
            if plain.dtype == torch.bfloat16:  # NumPy has no such type; every bfloat16 is a float32
                plain = plain.float()
            with archive.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(plain.numpy()), allow_pickle=False)
    return [file]


def _write(weights: Weights, path: Path) -> Sequence[Path]:
    """A file for vit_jax (`checkpoint.load`) and, with attention pooling, for big_vision."""
    config = weights.config
    assert isinstance(config, ViTConfig)
    if config.activation == "gelu":
        raise WeightsError(
            "this network cannot be written for jax",
            why="its GELU is the exact one; Flax computes the tanh form, up to 5e-4 off in each activation",
            hint="train with --activation gelu-tanh",
        )
    if config.cls_token != (config.pool == "cls"):
        why = f"pooling is {config.pool} {'beside' if config.cls_token else 'without'} a class token"
        raise WeightsError("this network cannot be written for jax", why=why)
    if config.stem is not None and config.stem_numerics != "authors":
        why = f"its ResNet has the small numbers of {config.stem_numerics}, not those of the authors"
        raise WeightsError("this network cannot be written for jax", why=why)
    return save_arrays(path, translated(JAX, _placed(weights)))


def _placed(weights: Weights) -> Weights:
    """The same network with a position for every token, of zeros where it had none: vit_jax adds one to each."""
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
        "pool": ("cls", "mean", "map"), "position": ("learned",), "norm": ("pre",), "norm_eps": (1e-6,),
        "final_norm": ("tokens",), "activation": ("gelu-tanh",), "attention_scale": ("head",), "logits_tanh": (False,),
        "layer_scale": (None,), "qk_norm": (False,), "registers": (0,), "dist_token": (False,), "qkv_bias": (True,),
        "proj_bias": (True,),
    },
    write=_write,
)  # fmt: skip
