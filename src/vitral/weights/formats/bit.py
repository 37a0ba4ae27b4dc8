"""BiT's ResNets: the authors' `.npz` (big_transfer, big_vision) and timm's files.

Sources: big_transfer's released files; big_vision `models/bit_paper.py` (`maybe_convert_big_transfer_format`); timm
`models/resnetv2.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral.atomic import write_text
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import BiTConfig
from vitral.model.resnet import ROOT
from vitral.weights.files import write_plain
from vitral.weights.formats import jax, timm
from vitral.weights.formats.format import Format, translated
from vitral.weights.formats.jax import CONV, DENSE, save_arrays
from vitral.weights.native import Weights
from vitral.weights.notes import Caution
from vitral.weights.preprocessing_configs import DEFAULTS, from_timm, to_timm
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import ConfigFields, Form, Rule, layers_of, same

_UNIT = "stages.{s}.blocks.{i}"
_HEAD = Form(
    "1×1 convolution to dense layer",
    lambda tensors: tensors[0].squeeze(0).squeeze(0).t(),
    lambda parameter, heads: [parameter.t()[None, None]],
)
_HEAD_TORCH = Form(
    "1×1 convolution to dense layer",
    lambda tensors: tensors[0].squeeze(-1).squeeze(-1),
    lambda parameter, heads: [parameter[:, :, None, None]],
)


def config(state: Mapping[str, Tensor], facts: ConfigFields, where: object) -> BiTConfig:
    """Infer the configuration from tensors under our names; `WeightsError` if they are not a BiT."""
    try:
        root = state["stem.conv.weight"]
    except KeyError as missing:
        raise WeightsError("not the weights of a whole network", where=where, why=f"{missing} is missing") from None
    width, rest = divmod(root.shape[0], ROOT)
    layers = layers_of(state, "stages.")
    if rest or not width or not layers:
        why = f"{root.shape[0]} channels after the root, {layers} bottlenecks"
        raise WeightsError("not the tensors of a BiT", where=where, why=why)
    found: dict[str, object] = {
        "layers": layers,
        "width": width,
        "channels": root.shape[1],
        "classes": len(state["head.weight"]) if "head.weight" in state else 0,
    }
    known = {name: value for name, value in facts.items() if value is not None and name != "heads"}
    return BiTConfig(**{**found, **known})


# ---- the authors' files


def _big_transfer() -> tuple[Rule, ...]:
    unit = "resnet/block{s+1}/unit{i+1:02}"
    conv = "standardized_conv2d/kernel"
    rules = [
        Rule("stem.conv.weight", (f"resnet/root_block/{conv}",), CONV),
        Rule(f"{_UNIT}.downsample.conv.weight", (f"{unit}/a/proj/{conv}",), CONV),
        *_gamma_beta("norm", "resnet/group_norm"),
        Rule("head.weight", ("resnet/head/conv2d/kernel",), _HEAD),
        Rule("head.bias", ("resnet/head/conv2d/bias",)),
    ]
    for n, letter in enumerate("abc", 1):
        rules.append(Rule(f"{_UNIT}.conv{n}.weight", (f"{unit}/{letter}/{conv}",), CONV))
        rules += _gamma_beta(f"{_UNIT}.norm{n}", f"{unit}/{letter}/group_norm")
    return tuple(rules)


def _gamma_beta(module: str, source: str) -> tuple[Rule, ...]:
    return Rule(f"{module}.weight", (f"{source}/gamma",)), Rule(f"{module}.bias", (f"{source}/beta",))


def _big_vision() -> tuple[Rule, ...]:
    unit = "block{s+1}/unit{i+1:02}"
    rules = [
        Rule("stem.conv.weight", ("root_block/conv_root/kernel",), CONV),
        Rule(f"{_UNIT}.downsample.conv.weight", (f"{unit}/conv_proj/kernel",), CONV),
        *jax.norm("norm", "norm-pre-head"),
        *jax.dense("head", "head", DENSE),
    ]
    for n in (1, 2, 3):
        rules.append(Rule(f"{_UNIT}.conv{n}.weight", (f"{unit}/conv{n}/kernel",), CONV))
        rules += jax.norm(f"{_UNIT}.norm{n}", f"{unit}/gn{n}")
    return tuple(rules)


def _canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the numbers that some files have after `standardized_conv2d`."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = re.sub(r"/standardized_conv2d_[0-9]+/", "/standardized_conv2d/", name)
        found[name if plain in found or (plain != name and plain in tensors) else plain] = tensor
    return found


def _preprocessing(source: Source, network: BiTConfig) -> tuple[Preprocessing, str]:
    return DEFAULTS["bit"](network.image), "the authors' evaluation"


def _write_jax(weights: Weights, path: Path) -> Sequence[Path]:
    """Write a file for big_transfer and, with another border at the root's max pooling, big_vision's `bit_paper`."""
    return save_arrays(path, translated(JAX_BIT, weights))


JAX_BIT = Format(
    name="jax-bit",
    rules=_big_transfer(),
    required=("resnet/root_block/standardized_conv2d/kernel",),
    scheme="bilinear-corners",
    preprocessing=_preprocessing,
    config=config,
    canonical=_canonical,
    fixed={"numerics": ("authors",)},
    write=_write_jax,
)
BIG_VISION_BIT = Format(
    name="big-vision-bit",
    rules=_big_vision(),
    required=("root_block/conv_root/kernel",),
    scheme="bilinear-corners",
    preprocessing=_preprocessing,
    facts=lambda source: {"numerics": "big_vision"},
    config=config,
    ignored={name: why for name, why in jax.IGNORED.items() if name.startswith(("opt/", "extra/"))},
    canonical=lambda tensors: jax.without_prefix(tensors, "root_block/conv_root/kernel"),
)

# ---- timm's

_CONVS = ("conv1.weight", "conv2.weight", "conv3.weight", "downsample.conv.weight", "norm1.*", "norm2.*", "norm3.*")


def _timm_preprocessing(source: Source, network: BiTConfig) -> tuple[Preprocessing, str]:
    cfg = (source.config or {}).get("pretrained_cfg")
    if isinstance(cfg, Mapping):
        return from_timm(cfg), "pretrained_cfg in config.json"
    return DEFAULTS["bit"](network.image), Caution("not stated by the file: the authors' default")


_ARCHITECTURES: dict[tuple[tuple[int, ...], int], str] = {
    ((3, 4, 6, 3), 1): "50x1",
    ((3, 4, 6, 3), 3): "50x3",
    ((3, 4, 23, 3), 1): "101x1",
    ((3, 4, 23, 3), 3): "101x3",
    ((3, 8, 36, 3), 2): "152x2",
    ((3, 8, 36, 3), 4): "152x4",
}
"""Layers and width → timm's name of the network. timm has no others, and none can be configured to be one."""


def _write_timm(weights: Weights, path: Path) -> Sequence[Path]:
    """Write a folder for `timm.create_model("local-dir:PATH")`."""
    network = weights.config
    assert isinstance(network, BiTConfig)
    size = _ARCHITECTURES.get((network.layers, network.width))
    if size is None:
        why = f"timm has no BiT with {network.layers} bottlenecks and width {network.width}"
        raise WeightsError("this network cannot be written for timm", why=why)
    write_plain(path / "model.safetensors", translated(TIMM_BIT, weights))
    write_text(path / "config.json", json.dumps(described(weights, size), indent=2) + "\n")
    return [path / "config.json", path / "model.safetensors"]


def described(weights: Weights, size: str) -> dict[str, Any]:
    """Build timm's config.json of a BiT of this size, such as "50x1"."""
    names, network = list(weights.classes), weights.config
    return {
        "architecture": f"resnetv2_{size}_bit",
        "num_classes": network.classes,
        "num_features": network.features,
        "model_args": {"in_chans": network.channels},
        "label_names": names,
        "pretrained_cfg": {
            **to_timm(weights.preprocessing),
            "num_classes": network.classes,
            "label_names": names,
            "first_conv": "stem.conv",
            "classifier": "head.fc",
        },
    }


TIMM_BIT = Format(
    name="timm-bit",
    rules=(
        Rule("stem.conv.weight", ("stem.conv.weight",)),
        *same({f"{_UNIT}.{name}": f"{_UNIT}.{name}" for name in _CONVS}),
        *same({"norm.*": "norm.*", "head.bias": "head.fc.bias"}),
        Rule("head.weight", ("head.fc.weight",), _HEAD_TORCH),
    ),
    required=("stem.conv.weight", "stages.{i}.blocks.{i}.norm1.weight", "norm.weight"),
    scheme="bicubic-antialias",
    preprocessing=_timm_preprocessing,
    facts=lambda source: {"numerics": "timm", "image_size": timm.image_size(source)},
    config=config,
    classes=timm.classes,
    fixed={"numerics": ("timm",)},
    write=_write_timm,
)
FORMATS = {one.name: one for one in (JAX_BIT, BIG_VISION_BIT, TIMM_BIT)}
