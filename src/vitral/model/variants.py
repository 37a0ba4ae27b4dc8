"""Networks by name: sizes of the paper and later work ("S/16" is parsed), presets ("S+/16"), hybrids, ResNets, the
five reproductions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch

from vitral.errors import UsageError, unknown
from vitral.kinds import checked, keywords, kinds_of, unknown_keyword
from vitral.model.config import ViTConfig
from vitral.model.config_base import pair
from vitral.model.conv_stem import conv_layers, deep_layers
from vitral.model.decoder_config import EncoderDecoderConfig
from vitral.model.foreign import ForeignConfig, is_foreign, is_function, of_library, version_of
from vitral.model.registry import ModelConfig, Network, network
from vitral.model.resnet import BiTConfig


class Size(NamedTuple):
    """Width, layers, MLP width and heads (paper Table 1; big_vision `models/vit.py:decode_variant`)."""

    dim: int
    depth: int
    mlp_dim: int
    heads: int


SIZES: dict[str, Size] = {
    "mu": Size(32, 1, 128, 2),
    "Pico": Size(64, 6, 256, 2),  # vitral: small gray images on a laptop, plain patches
    "Nano": Size(128, 6, 512, 4),  # vitral: small color images on a laptop, plain patches
    "Femto": Size(64, 2, 256, 2),  # vitral: gray images, behind a convolutional stem
    "Micro": Size(128, 2, 512, 4),  # vitral: the same for color
    "Mini": Size(384, 4, 1536, 6),  # vitral: the same on a GPU
    "Ti": Size(192, 12, 768, 3),
    "S": Size(384, 12, 1536, 6),
    "M": Size(512, 12, 2048, 8),
    "b": Size(384, 12, 1536, 6),  # "ViT-b" of Figure 4: B with all hidden sizes halved
    "B": Size(768, 12, 3072, 12),
    "L": Size(1024, 24, 4096, 16),
    "So400m": Size(1152, 27, 4304, 16),
    "H": Size(1280, 32, 5120, 16),
    "g": Size(1408, 40, 6144, 16),
    "g-opt": Size(1536, 40, 6144, 16),
    "G": Size(1664, 48, 8192, 16),
    "G-opt": Size(1536, 48, 8192, 16),
    "e": Size(1792, 56, 15360, 16),
}

PRESETS: dict[str, Mapping[str, object]] = {
    "+": {"position": "rotary", "registers": 4},  # as in DINOv3 (arXiv 2508.10104)
}
"""Ending of a size in a name ("Ti+/16") → fields of `ViTConfig` that it stands for."""

STEMS: dict[str, dict[int, tuple[tuple[int, ...], int]]] = {
    "R": {16: ((), 32)},  # named after the R+Ti/16 of AugReg, whose tokens are 32 pixels: 8×8 patches of a ÷4 root
    "R26": {32: ((2, 2, 2, 2), 32)},
    "R50": {16: ((3, 4, 9), 16), 32: ((3, 4, 6, 3), 32)},  # /16: the layers of stage 4 are in stage 3 (paper, 4.1)
}
"""Hybrids: part of the name before "+" → number after "/" → stages of the ResNet, and pixels of a token."""

CONV = "C"
"""Part of a name before "+" for a convolutional stem."""
CONV_PATCHES = (2, 4, 8, 16, 32)
"""Pixels of a token behind a convolutional stem."""
MOSTLY_STEM = ("Femto", "Micro", "Mini")
"""Sizes whose stem has most of the FLOPs. For other sizes it is a few layers (Xiao et al.)."""
DEEP_PATCH = 8
"""Largest token in pixels with a deep stem, which is for small images; for large ones it would take hours."""

RESNETS: dict[int, tuple[int, ...]] = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
"""BiT: depth → bottlenecks of each stage (arXiv 1912.11370)."""

CONV_STEMMED = ("C+Femto/4", "C+Micro/8", "C+Mini/4", "C+S/16")
HYBRIDS = ("R+Ti/16", "R26+S/32", "R26+B/32", "R50+B/16", "R50+L/32")
BITS = ("BiT-R50x1", "BiT-R50x3", "BiT-R101x1", "BiT-R101x3", "BiT-R152x2", "BiT-R152x4", "BiT-R200x3")
"""Listed names: those with published weights, R26+B/32 and R200x3. Other combinations are valid too."""

WITH_PRESET = ("Ti+/16", "S+/16", "B+/16")
"""Listed names with a preset. It may follow every other size, too."""

WRITE_UPS: dict[str, ViTConfig] = {
    # 000: 8 heads, logits / √768, mean over all 197 tokens, norm after it, no encoder norm.
    "einops-b16": ViTConfig(
        heads=8,
        attention_scale="model",
        pool="mean-all",
        final_norm="pooled",
        cls_init="normal",
        pos_init="normal",
        norm_eps=1e-5,
    ),
    # 001: tanh on the logits; class token and positions from N(0, 1).
    "mnist-7562": ViTConfig(
        image_size=28,
        patch_size=7,
        channels=1,
        classes=10,
        dim=16,
        depth=2,
        heads=2,
        mlp_dim=64,
        logits_tanh=True,
        cls_init="normal",
        pos_init="normal",
        norm_eps=1e-5,
    ),
    # 002: the authors' layout; q, k, v and out are tensordots there, the same arithmetic as these dense layers.
    "tensordot-b16": ViTConfig(dropout=0.1, pos_init="uniform", norm_eps=1e-5),
    # 003: BERT-like post-norm; dropout → add → norm; 8 heads; 365 scenes. 1×1 Conv1d is a dense layer.
    "places365-postnorm": ViTConfig(
        classes=365,
        heads=8,
        norm="post",
        dropout=0.1,
        attention_dropout=0.1,
        cls_init="normal",
        pos_init="normal",
        norm_eps=1e-5,
    ),
    # 004: a simplified timm ViT: no bias in attention, MLP as wide as the model, dropout one half.
    "timm-small-128": ViTConfig(
        classes=10,
        dim=128,
        depth=3,
        heads=4,
        mlp_dim=128,
        qkv_bias=False,
        proj_bias=False,
        dropout=0.5,
        attention_dropout=0.5,
        pos_init="zeros",
        norm_eps=1e-5,
    ),
}


def config(name: str, **changes: object) -> ModelConfig:
    """Configuration of a named network: `SIZE/PATCH` ("Ti/16", "S/4", "B/16x8"), the same with a preset ("Ti+/16"), a
    hybrid ("R26+S/32"), a ResNet ("BiT-R50x1"), a reproduction, or a network of another library ("timm:resnet18",
    `vitral.model.foreign`).

    `changes` are fields of its configuration, e.g. `classes=10, image_size=32`. Raises `UsageError` for an
    unknown name or field, with the nearest known ones, and for incompatible sizes.
    """
    kind, own = config_fields(name)
    known = kind.__dataclass_fields__
    if bad := [field for field in changes if field not in known]:
        if any(bad[0] in other.__dataclass_fields__ for other in (ViTConfig, BiTConfig)):
            raise UsageError(f"{name} has no {bad[0]}", why=f"it has {', '.join(known)}", hint="leave it out")
        raise unknown_keyword("model option", bad[0], known)
    return kind(**{**own, **changes})


def config_fields(name: str) -> tuple[type[ModelConfig], dict[str, Any]]:
    """Configuration class of a name, and the fields that the name sets; see `config`."""
    if is_foreign(name):
        return ForeignConfig, {"source": name, "version": version_of(name)}
    if name in WRITE_UPS:
        return ViTConfig, {field: getattr(WRITE_UPS[name], field) for field in ViTConfig.__dataclass_fields__}
    if (match := re.fullmatch(r"BiT-R(\d+)x([1-4])", name)) and int(match[1]) in RESNETS:
        return BiTConfig, {"layers": RESNETS[int(match[1])], "width": int(match[2])}
    parts = Parts.of(name)
    fields = (
        _hybrid(name, parts) if parts.stem else {"patch_size": _patch_of(name, parts), **SIZES[parts.size]._asdict()}
    )
    return ViTConfig, {**fields, **PRESETS.get(parts.preset, {})}


class Parts(NamedTuple):
    """Parts of a name: "R26+S/32" has a stem, a size and a patch, "Ti+/16" a size, a preset and a patch."""

    stem: str
    size: str
    preset: str
    patch: str

    @classmethod
    def of(cls, name: str) -> Parts:
        """Split a name. Each part may be empty; none is looked up but the preset."""
        front, _, patch = name.partition("/")
        preset = next((end for end in PRESETS if front.endswith(end)), "")
        stem, _, size = front.removesuffix(preset).rpartition("+")
        return cls(stem, size, preset, patch)

    def __str__(self) -> str:
        return f"{self.stem}{'+' if self.stem else ''}{self.size}{self.preset}/{self.patch}"


def _hybrid(name: str, parts: Parts) -> dict[str, object]:
    stem, size, number = parts.stem, parts.size, parts.patch
    if size in SIZES and stem == CONV and number in map(str, CONV_PATCHES):
        pixels = int(number)
        deep = size in MOSTLY_STEM and pixels <= DEEP_PATCH
        convolutions = (deep_layers if deep else conv_layers)(SIZES[size].dim, pixels)
        return {"conv_stem": convolutions, "conv_pool": deep, "patch_size": pixels, **SIZES[size]._asdict()}
    known = {str(number): built for number, built in STEMS.get(stem, {}).items()}
    if size in SIZES and number in known:
        layers, pixels = known[number]
        return {"stem": layers, "patch_size": pixels, **SIZES[size]._asdict()}
    stems = {CONV: CONV_PATCHES, **STEMS} if size in SIZES else {}
    names = {*CONV_STEMMED, *HYBRIDS, *(f"{stem}+{size}/{number}" for stem in stems for number in stems[stem])}
    raise unknown("model", name, names, hint="vitral models")


def _patch_of(name: str, parts: Parts) -> tuple[int, int]:
    """The patch (height, width) of a name without a stem; `UsageError` lists the nearest names."""
    size, patch = parts.size, parts.patch
    parsed = re.fullmatch(r"([1-9]\d*)(?:x([1-9]\d*))?", patch)
    if size in SIZES and parsed:
        return int(parsed[1]), int(parsed[2] or parsed[1])
    if size in SIZES:
        why = f"'{patch}' is not a patch size in pixels" if patch else "a size needs a patch size, in pixels"
        raise UsageError(f"unknown model '{name}'", why=why, hint=f"--model {size}{parts.preset}/16")
    library = f"{size}:{patch}"
    if is_foreign(library) and not is_function(library):
        raise UsageError(f"unknown model '{name}'", why=f"nearest: {library}", hint=f"--model {library}")
    if "/" not in name and (other := of_library(name)):
        raise UsageError(f"unknown model '{name}'", why="it is a network of another library", hint=f"--model {other}")
    known = [
        *(f"{s}/{patch}" if parsed else f"{s}/16" for s in SIZES),
        *WITH_PRESET,
        *CONV_STEMMED,
        *HYBRIDS,
        *BITS,
        *WRITE_UPS,
    ]
    raise unknown("model", name, known, hint="vitral models")


@partial(checked, options=keywords({**kinds_of(BiTConfig), **kinds_of(ViTConfig)}))
def create(name: str, **changes: object) -> Network:
    """Build a newly initialized network.

    Args:
        name: Size and patch size such as `S/16`, with a convolutional stem such as `C+Micro/8`, or another name of
            `vitral models`.
        changes: Fields of its configuration (`vitral.ViTConfig` or `vitral.BiTConfig`) to replace.

    Returns:
        The network, a `torch.nn.Module` in fp32 on the CPU: standardized images (B, C, H, W) to logits (B, K).

    Raises:
        UsageError: The name or a field is not known, or the shape is not possible.

    Example:
        model = vitral.create("S/4", classes=10, image_size=32)
        logits = model(torch.zeros(1, 3, 32, 32))
    """
    return network(config(name, **changes))


def catalog() -> list[dict[str, Any]]:
    """Rows of `vitral models`, for 224 pixels and 1000 classes: each size at its usual patch, hybrids, ResNets and the
    reproductions. Fields that a network does not have are None.
    """
    usual = {size: f"{size}/14" for size in ("So400m", "H", "g", "g-opt", "G", "G-opt", "e")}
    names = [usual.get(size, f"{size}/16") for size in SIZES]
    return [
        _entry(name, NOTES.get(name, NOTES.get(name.partition("/")[0], "")))
        for name in [*names, *WITH_PRESET, *CONV_STEMMED, *HYBRIDS, *BITS, *WRITE_UPS]
    ]


def _entry(name: str, note: str) -> dict[str, object]:
    shape = config(name)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in network(shape).parameters())
    keys = ("dim", "depth", "heads", "mlp_dim", "image_size", "patch_size")
    sizes = {key: getattr(shape, key, None) for key in keys}
    if isinstance(shape, BiTConfig):
        sizes["depth"] = 3 * sum(shape.layers) + 2  # each bottleneck has three layers; root and head
    return {"name": name, **sizes, "classes": shape.classes, "parameters": parameters, "note": note}


NOTES = {
    "mu": "big_vision's smallest, for tests",
    "Pico": "small gray images on a laptop, patches alone",
    "Nano": "small color images on a laptop, patches alone",
    "Femto": "shallow: behind a convolutional stem",
    "Micro": "shallow: behind a convolutional stem",
    "Mini": "shallow: behind a convolutional stem",
    "Ti": "DeiT, AugReg",
    "b": "half of B (paper, Figure 4)",
    "B": "paper, Table 1",
    "L": "paper, Table 1",
    "H": "paper, Table 1",
    **dict.fromkeys(WITH_PRESET, "rotary positions and 4 registers, as in DINOv3"),
    "C+Femto/4": "convolutional stem: small gray images on a laptop",
    "C+Micro/8": "convolutional stem: small color images on a laptop",
    "C+Mini/4": "convolutional stem: small color images on a GPU",
    "C+S/16": "convolutional stem (arXiv 2106.14881)",
    "R+Ti/16": "hybrid; its tokens are 32 pixels",
    "R26+S/32": "hybrid: ResNet before the patches (AugReg)",
    "R50+B/16": "hybrid (paper, Table 2)",
    "R50+L/32": "hybrid (AugReg)",
    "BiT-R50x1": "ResNet-V2 with GroupNorm (Big Transfer)",
    "BiT-R152x4": "BiT-L of the paper's Table 2",
    "einops-b16": "write-up 000: 8 heads, mean over all tokens",
    "mnist-7562": "write-up 001: MNIST, tanh on the logits",
    "tensordot-b16": "write-up 002: the authors' layout",
    "places365-postnorm": "write-up 003: post-norm, 365 scenes",
    "timm-small-128": "write-up 004: no bias in attention",
}
"""Size or name → note in the catalog."""


_OF_TRAINING = ("dropout", "attention_dropout", "drop_path", "patch_dropout", "cls_init", "pos_init", "head_bias_init")
UNNAMED = frozenset(("image_size", "classes", *_OF_TRAINING))
"""Fields that a name leaves out: sizes that are listed beside it, and fields that affect only training."""


def name_of(config: ModelConfig) -> str:
    """The name that `config` reads as this configuration, with what differs from it: "Ti/16", "Ti/16 with registers=4".

    Image size, classes, and what acts on training alone are left out. Sizes without a name are described. Several names
    may stand for one network; the first of the table is taken.
    """
    if isinstance(config, ForeignConfig):
        return config.source
    if isinstance(config, EncoderDecoderConfig):
        return f"{name_of(config.encoder)} + decoder of {config.decoder.depth} blocks, width {config.decoder.dim}"
    for name in _names_like(config):
        own = dict(config_fields(name)[1])
        if isinstance(config, ViTConfig):
            own["patch_size"] = pair(own["patch_size"])  # as a configuration holds it
        if name in WRITE_UPS:
            if not _changes(config, own):
                return name
        elif all(getattr(config, field) == value for field, value in own.items()):
            return _with(name, _changes(config, own))
    if isinstance(config, BiTConfig):
        return f"ResNet of {sum(config.layers)} bottlenecks, width {config.width}"
    sizes = {"dim", "depth", "patch_size", "heads", "mlp_dim", "stem", "conv_stem", "conv_pool"}
    other = f"ViT of {config.depth} blocks, width {config.dim}, patch {_patch(config)}"
    return _with(other, [change for change in _changes(config, {}) if change.partition("=")[0] not in sizes])


def _patch(config: ViTConfig) -> str:
    height, width = config.patch
    return str(height) if height == width else f"{height}x{width}"


def _names_like(config: ViTConfig | BiTConfig) -> list[str]:
    if isinstance(config, BiTConfig):
        return [f"BiT-R{depth}x{config.width}" for depth in RESNETS]
    if config.conv_stem is not None:
        patches = [(CONV, str(pixels)) for pixels in CONV_PATCHES]
    elif config.stem is not None:
        patches = [(stem, str(pixels)) for stem, built in STEMS.items() for pixels in built]
    else:
        patches = [("", _patch(config))]
    presets = (*PRESETS, "")  # those with more fields first
    named = [str(Parts(stem, size, end, patch)) for end in presets for size in SIZES for stem, patch in patches]
    return [*named, *WRITE_UPS]


def _changes(config: ViTConfig | BiTConfig, own: Mapping[str, object]) -> list[str]:
    """Fields of `config` that differ from `own` and from the defaults, as arguments."""
    defaults = {field.name: field.default for field in fields(config)}
    return [
        f"{field}={getattr(config, field)!r}"
        for field, default in defaults.items()
        if field not in UNNAMED and getattr(config, field) != own.get(field, default)
    ]


def _with(name: str, changes: Sequence[str]) -> str:
    return f"{name} with {', '.join(changes)}" if changes else name
