"""Releases of facebookresearch/dino, dinov2 and dinov3, whose names are nearly timm's.

DINO of 2021 has exactly timm's names: only `--from dino` applies its preprocessing and its resizing of positions. The
rest is checked against timm's conversions of the same files: `_convert_dinov2` in `timm/models/vision_transformer.py`
and `checkpoint_filter_fn` in `timm/models/eva.py`.

DINOv2's networks without registers resize positions by `scale_factor = (n + 0.1) / N` (dinov2/models/
vision_transformer.py, `interpolate_offset`), those with registers and all other libraries by the size. The difference,
a shift of at most a tenth of a cell, is not reproduced here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.model.position import RotaryPosition
from vitral.weights.formats.checkpoint import ENCODER, write_checkpoint
from vitral.weights.formats.format import DINOV2_HEADS, DINOV3_HEADS, Format
from vitral.weights.native import Weights
from vitral.weights.notes import Caution
from vitral.weights.preprocessing_configs import DEFAULTS
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import PAIR, ConfigFields, Form, Rule, both, same

_SAME = (
    "cls_token",
    "patch_embed.proj.*",
    "norm.*",
    "head.*",
    "blocks.{i}.norm1.*",
    "blocks.{i}.attn.qkv.weight",
    "blocks.{i}.attn.proj.*",
    "blocks.{i}.ls1.gamma",
    "blocks.{i}.norm2.*",
    "blocks.{i}.mlp.fc1.*",
    "blocks.{i}.mlp.fc2.*",
    "blocks.{i}.ls2.gamma",
)
_MLP = "blocks.{i}.mlp"
_WHOLE_BIAS = same({"blocks.{i}.attn.qkv.bias": "blocks.{i}.attn.qkv.bias"})


def _mask_of(parameter: Tensor) -> Tensor:
    q, k, v = torch.ones_like(parameter).chunk(3)
    return torch.cat([q, torch.zeros_like(k), v])


def _masked(tensors: Sequence[Tensor]) -> Tensor:
    bias, mask = tensors
    if bias.shape != mask.shape:
        raise ValueError("mask and bias differ in shape")  # they would be broadcast
    return torch.where(mask == 0, torch.zeros_like(bias), bias)


# LinearKMaskedBias multiplies by a mask whose middle third, that of the keys, is zero; it is NaN until filled, and the
# bias under a zero may be anything.
_MASKED = Form(
    "masked: keys have no bias",
    _masked,
    lambda parameter, heads: [parameter, _mask_of(parameter)],
)

DINOV2_RULES = (
    *same({name: name for name in (*_SAME, "pos_embed")}),
    *_WHOLE_BIAS,
    *same({f"{_MLP}.fc1.*": f"{_MLP}.w12.*", f"{_MLP}.fc2.*": f"{_MLP}.w3.*"}),
)
DINOV3_RULES = (
    *same({name: name for name in _SAME}),
    Rule("blocks.{i}.attn.qkv.bias", ("blocks.{i}.attn.qkv.bias", "blocks.{i}.attn.qkv.bias_mask"), _MASKED),
    *_WHOLE_BIAS,
    *both(f"{_MLP}.fc1", (f"{_MLP}.w1", f"{_MLP}.w2"), PAIR),
    *same({f"{_MLP}.fc2.*": f"{_MLP}.w3.*", "reg_token": "storage_tokens"}),
)

_CHUNK = re.compile(r"blocks\.\d+\.(\d+)\.")
_MASK = {"mask_token": "replaces masked patches in pre-training"}


def _without_chunks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename `blocks.CHUNK.BLOCK.` of sharded training to `blocks.BLOCK.`: BLOCK counts through all chunks."""
    return {_CHUNK.sub(r"blocks.\1.", name): tensor for name, tensor in tensors.items()}


def _preprocessing(family: str) -> Callable[[Source, ViTConfig], tuple[Preprocessing, str]]:
    def of(source: Source, config: ViTConfig) -> tuple[Preprocessing, str]:
        return DEFAULTS[family](config.image), Caution(f"not stated by the file: {family}'s default")

    return of


def _dinov2_facts(source: Source) -> ConfigFields:
    return {"norm_eps": 1e-6, "cls_position": True}


def _dinov3_facts(source: Source) -> ConfigFields:
    """Fields of rotary positions; the table of their periods determines the head width and must be the standard one."""
    found: ConfigFields = {"norm_eps": 1e-5, "position": "rotary", "pool": "cls"}
    periods = source.tensors.get("rope_embed.periods")
    if periods is None:
        return found
    count = periods.numel()
    usual = RotaryPosition.base ** (torch.arange(count, dtype=torch.float64) / max(count, 1))
    if periods.ndim != 1 or not torch.allclose(periods.double(), usual, rtol=2**-7):  # released in bfloat16
        why = f"'rope_embed.periods' do not have base {RotaryPosition.base:g}"
        raise WeightsError("unsupported rotary positions", where=source.where, why=why)
    kernel = source.tensors.get("patch_embed.proj.weight")
    if kernel is not None and kernel.ndim and count and kernel.shape[0] % (4 * count) == 0:
        found["heads"] = kernel.shape[0] // (4 * count)
    return found


def _write_dino(weights: Weights, path: Path) -> Sequence[Path]:
    """Write a checkpoint for `--pretrained_weights` of facebookresearch/dino, under its default key."""
    return write_checkpoint(DINO, weights, path, "teacher")


DINO = Format(
    name="dino",
    rules=(*same({name: name for name in (*_SAME, "pos_embed") if ".ls" not in name}), *_WHOLE_BIAS),
    required=(),
    scheme="bicubic",
    preprocessing=_preprocessing("deit"),  # eval_knn.py: 256, the central 224, ImageNet's mean and std
    facts=_dinov2_facts,
    fixed=ENCODER,
    write=_write_dino,
)
DINOV2 = Format(
    name="dinov2",
    heads=DINOV2_HEADS,
    rules=DINOV2_RULES,
    required=("mask_token", "blocks.{i}.ls1.gamma", "pos_embed"),
    scheme="bicubic",
    preprocessing=_preprocessing("dinov2"),
    facts=_dinov2_facts,
    ignored=_MASK,
    canonical=_without_chunks,
)
DINOV2_REGISTERS = replace(
    DINOV2,
    name="dinov2-registers",
    rules=(*DINOV2_RULES, *same({"reg_token": "register_tokens"})),
    required=("register_tokens", "blocks.{i}.ls1.gamma", "pos_embed"),
    scheme="bicubic-antialias",
)
DINOV3 = Format(
    name="dinov3",
    heads=DINOV3_HEADS,
    rules=DINOV3_RULES,
    required=("storage_tokens", "blocks.{i}.ls1.gamma"),
    scheme="bicubic",  # no learned positions
    preprocessing=_preprocessing("dinov3"),
    facts=_dinov3_facts,
    assumed=lambda source: ("the head reads the class token, as in DINOv3; norms with epsilon 1e-05",),
    ignored={
        **_MASK,
        "rope_embed.periods": "positions are computed",
        "local_cls_norm.*": "norm of small crops in pre-training",
        "blocks.{i}.attn.qkv.bias_mask": "there is no bias to mask",
    },
    canonical=_without_chunks,
)
FORMATS = {one.name: one for one in (DINO, DINOV2, DINOV2_REGISTERS, DINOV3)}
