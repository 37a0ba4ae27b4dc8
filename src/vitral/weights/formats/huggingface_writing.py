"""Write a folder for Hugging Face's transformers, with the same logits and, through its pipeline, the same labels.

The parts of a network determine the class of transformers that computes it:

| network | class |
|---|---|
| class token | `ViTForImageClassification` |
| class token and one register | `DeiTForImageClassification`, whose distillation token no head reads |
| class token and distillation token | `DeiTForImageClassificationWithTeacher` |
| mean of patches beside a class token, or both | `Dinov2ForImageClassification` |
| the same with registers; class token with several | `Dinov2WithRegistersForImageClassification` |
| LayerScale or a gated MLP | the last two |
| mean of patches, no class token | `SiglipForImageClassification` |
| attention pooling, no classes | `SiglipVisionModel` |
| rotary positions, no classes | `DINOv3ViTModel` |

DINOv2's classifier reads [class token, mean of patches]; for one of the two alone the weights of the other are zero.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitral.atomic import write_text
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.weights.files import write_plain
from vitral.weights.formats.format import translated
from vitral.weights.formats.huggingface import FORMATS
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import to_huggingface

State = dict[str, Tensor]
LUMA = (0.299, 0.587, 0.114)
"""Gray of red, green and blue (ITU-R 601), as Pillow converts to "L"."""


class _Target(NamedTuple):
    """A class of transformers, with and without a classifier, and the prefix of its base model's names."""

    model_type: str
    classifier: str
    base: str
    prefix: str


_TARGETS = {
    "hf-vit": _Target("vit", "ViTForImageClassification", "ViTModel", "vit."),
    "hf-deit": _Target("deit", "DeiTForImageClassification", "DeiTModel", "deit."),
    "hf-deit-distilled": _Target("deit", "DeiTForImageClassificationWithTeacher", "", "deit."),
    "hf-dinov2": _Target("dinov2", "Dinov2ForImageClassification", "Dinov2Model", "dinov2."),
    "hf-dinov2-registers": _Target(
        "dinov2_with_registers",
        "Dinov2WithRegistersForImageClassification",
        "Dinov2WithRegistersModel",
        "dinov2_with_registers.",
    ),
    "hf-dinov3": _Target("dinov3_vit", "", "DINOv3ViTModel", ""),
    "hf-siglip": _Target("siglip_vision_model", "", "SiglipVisionModel", ""),
    "hf-siglip-classifier": _Target("siglip", "SiglipForImageClassification", "", ""),
}


class _Network(NamedTuple):
    """The network to write; each step rewrites it in a form closer to that of transformers."""

    config: ViTConfig
    state: Mapping[str, Tensor]
    preprocessing: Preprocessing

    def changed(self, state: Mapping[str, Tensor], **fields: Any) -> _Network:
        return self._replace(config=dataclasses.replace(self.config, **fields), state=state)


def write(weights: Weights, path: Path) -> Sequence[Path]:
    """Write `config.json`, `model.safetensors` (names as published) and `preprocessor_config.json` into a folder.

    A gray network becomes one of three equal channels, because pipelines supply color images. Logits are the same for
    gray images, and up to the rounding of gray levels for others. Raises `WeightsError`, naming the part, for a network
    that no class of transformers computes.
    """
    if not isinstance(weights.config, ViTConfig):
        raise _refused("it is not a Vision Transformer")
    if weights.config.hybrid:
        raise _refused("its patches come from the features of a stem, not from the image")
    network = _Network(weights.config, weights.state, weights.preprocessing)
    for step in (_colored, _simplified, _placed):
        network = step(network)
    name = _choice(network.config)
    if why := _objection(name, network.config):
        raise _refused(why)
    config, state, preprocessing = _prepared(name, network)
    found = translated(FORMATS[name], dataclasses.replace(weights, config=config, state=state))
    tensors = _finished(name, found, config)
    config_json = _config(name, config, weights.classes, tensors)
    files = {"config.json": config_json, "preprocessor_config.json": to_huggingface(preprocessing)}
    for file, data in files.items():
        write_text(path / file, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    write_plain(path / "model.safetensors", tensors)
    return [path / "config.json", path / "model.safetensors", path / "preprocessor_config.json"]


def _refused(why: str) -> WeightsError:
    return WeightsError("transformers has no such network", why=why)


def _choice(config: ViTConfig) -> str:
    """Choose the format whose class has the parts of this network."""
    if config.position == "rotary":
        return "hf-dinov3"
    if config.dist_token:
        return "hf-deit-distilled"
    if config.pool == "map":
        return "hf-siglip"
    if not config.cls_token:
        return "hf-siglip-classifier"
    plain = config.layer_scale is None and config.activation != "swiglu"
    if config.pool == "cls" and plain and config.registers <= 1:
        return "hf-deit" if config.registers else "hf-vit"
    return "hf-dinov2-registers" if config.registers else "hf-dinov2"


def _objection(name: str, config: ViTConfig) -> str | None:
    """Reason why the chosen class cannot compute the network, beyond its format's `fixed` fields; None if it can."""
    target = _TARGETS[name]
    if config.classes and not target.classifier:
        return f"{target.base} has no variant with a classifier"
    if not config.classes and not target.base:
        return f"{target.classifier} needs classes"
    if config.pre_logits and (config.classes or "dinov" in name):
        return "there is no layer between the pooled features and the classifier"
    if name.startswith("hf-dinov2"):
        if not config.classes and config.pool != "cls":
            return f"{target.base} returns the class token, not the mean of patches"
        if _ratio(config) is None:
            return f"DINOv2's MLP is a whole multiple of the width {config.dim}, {config.mlp_dim} is not"
    if name.startswith(("hf-dinov2", "hf-siglip")) and (_oblong(config.image) or _oblong(config.patch)):
        return f"{target.model_type} needs square images and square patches"
    return None


def _oblong(size: tuple[int, int]) -> bool:
    return size[0] != size[1]


def _ratio(config: ViTConfig) -> int | None:
    """DINOv2's `mlp_ratio`; its gated MLP is two thirds of that, rounded up to a multiple of 8."""
    if config.activation != "swiglu":
        return config.mlp_dim // config.dim if config.mlp_dim % config.dim == 0 else None
    about = round(config.mlp_dim * 1.5 / config.dim)
    near = (ratio for ratio in (about - 1, about, about + 1) if ratio > 0)
    return next((n for n in near if (int(config.dim * n * 2 / 3) + 7) // 8 * 8 == config.mlp_dim), None)


# ---------------------------------------------------------------- equivalent networks


def _colored(network: _Network) -> _Network:
    """Turn one channel into three: (Σ w·color - mean) / std = Σ w·(color - mean) / std for weights that sum to one."""
    if network.config.channels != 1:
        return network
    kernel = network.state["patch_embed.proj.weight"]
    luma = torch.tensor(LUMA, dtype=torch.float64)[:, None, None]
    state = {**network.state, "patch_embed.proj.weight": (kernel.double() * luma).to(kernel.dtype)}
    old = network.preprocessing
    prepared = dataclasses.replace(old, channels=3, mean=old.mean * 3, std=old.std * 3)
    return network.changed(state, channels=3)._replace(preprocessing=prepared)


def _simplified(network: _Network) -> _Network:
    """Rewrite equivalent fields: `mean-all` is `mean` without a prefix, a norm of one pooled token is one of tokens."""
    config, state = network.config, dict(network.state)
    fields: dict[str, object] = {}
    if config.pool == "mean-all" and not config.prefix:
        fields["pool"] = "mean"
    if config.pool == "cls" and config.final_norm == "pooled":
        fields["final_norm"] = "tokens"
        state = {name.replace("fc_norm.", "norm."): tensor for name, tensor in state.items()}
    return network.changed(state, **fields)


def _placed(network: _Network) -> _Network:
    """Add positions of zero for tokens without one."""
    config, state = network.config, dict(network.state)
    if config.position not in ("none", "learned") or (
        config.position == "learned" and config.placed == _tokens(config)
    ):
        return network
    kernel = state["patch_embed.proj.weight"]
    table = state.get("pos_embed", kernel.new_zeros(1, config.grid[0] * config.grid[1], config.dim))
    state["pos_embed"] = torch.cat([table.new_zeros(1, _tokens(config), config.dim), table], dim=1)
    return network.changed(state, position="learned", cls_position=True)


def _tokens(config: ViTConfig) -> int:
    return int(config.cls_token) + int(config.dist_token)


def _prepared(name: str, network: _Network) -> _Network:
    """Add the parts that the class has and the network does not, at values without effect."""
    config = network.config
    if name in ("hf-dinov3", "hf-dinov2", "hf-dinov2-registers"):
        network = _scaled(network)
    if name.startswith("hf-dinov2") and config.classes and config.pool in ("cls", "mean"):
        head = network.state["head.weight"]
        halves = [head, torch.zeros_like(head)]
        wide = torch.cat(halves if config.pool == "cls" else halves[::-1], dim=1)
        network = network.changed({**network.state, "head.weight": wide}, pool="cls-mean")
    return network


def _scaled(network: _Network) -> _Network:
    if network.config.layer_scale is not None:
        return network
    one = network.state["patch_embed.proj.weight"].new_ones(network.config.dim)
    names = [f"blocks.{i}.ls{n}.gamma" for i in range(network.config.depth) for n in (1, 2)]
    return network.changed({**network.state, **dict.fromkeys(names, one)}, layer_scale=1.0)


def _finished(name: str, tensors: State, config: ViTConfig) -> State:
    """Add or remove the prefix of names, and add tensors that only transformers has."""
    prefix, width = _TARGETS[name].prefix, tensors[next(n for n in tensors if n.endswith("norm.bias"))].new_zeros
    if not config.classes and prefix:
        tensors = {each.removeprefix(prefix): tensor for each, tensor in tensors.items()}
        prefix = ""
    if name == "hf-dinov2-registers":
        tensors[f"{prefix}embeddings.mask_token"] = width(1, config.dim)
    if name == "hf-dinov3":
        tensors["embeddings.mask_token"] = width(1, 1, config.dim)
        tensors.setdefault("embeddings.register_tokens", width(1, 0, config.dim))
        keys = [f"layer.{i}.attention.k_proj.bias" for i in range(config.depth)]
        if any(key in tensors for key in keys):  # in transformers all blocks have one, or none
            tensors = {**{key: width(config.dim) for key in keys}, **tensors}
    if name == "hf-siglip":
        before = "vision_model.head.attention.in_proj_"
        for kind in ("weight", "bias"):
            tensors[before + kind] = torch.cat([tensors.pop(f"{before}{kind}[{part}]") for part in ("q", "kv")])
    return tensors


# ---------------------------------------------------------------- config.json


def _config(name: str, config: ViTConfig, classes: Sequence[str], tensors: State) -> dict[str, object]:
    target = _TARGETS[name]
    found: dict[str, object] = {
        "architectures": [target.classifier if config.classes else target.base],
        "model_type": target.model_type,
        "id2label": {str(number): label for number, label in enumerate(classes)},
        "label2id": {label: number for number, label in enumerate(classes)},
        "torch_dtype": str(next(iter(tensors.values())).dtype).removeprefix("torch."),
    }
    if name == "hf-siglip-classifier":
        inner = {"model_type": "siglip_vision_model", "vision_use_head": False, **_sizes(config), **_siglip(config)}
        return {**found, "vision_config": inner}
    if name == "hf-dinov3":
        found["key_bias"] = any(each.endswith("k_proj.bias") for each in tensors)
    return {**found, **_sizes(config), **_OWN[target.model_type](config)}


def _sizes(config: ViTConfig) -> dict[str, Any]:
    sides = {
        name: list(size) if _oblong(size) else size[0]
        for name, size in (("image_size", config.image), ("patch_size", config.patch))
    }
    act = {"gelu-tanh": "gelu_pytorch_tanh", "swiglu": "silu", "quick-gelu": "quick_gelu"}.get(
        config.activation, config.activation
    )
    return {
        **sides,
        "num_channels": config.channels,
        "hidden_size": config.dim,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": act,
        "layer_norm_eps": config.norm_eps,
    }


def _vit(config: ViTConfig) -> dict[str, object]:
    return {
        "intermediate_size": config.mlp_dim,
        "qkv_bias": config.qkv_bias,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _dinov2(config: ViTConfig) -> dict[str, object]:
    gated = config.activation == "swiglu"
    found: dict[str, object] = {
        "mlp_ratio": _ratio(config),
        "use_swiglu_ffn": gated,
        "qkv_bias": config.qkv_bias,
        "use_mask_token": False,
        "apply_layernorm": True,
    }
    return found | ({"hidden_act": "gelu"} if gated else {})  # without effect on a gated MLP


def _dinov2_registers(config: ViTConfig) -> dict[str, object]:
    found = {**_dinov2(config), "num_register_tokens": config.registers}
    del found["use_mask_token"]
    return found


def _dinov3(config: ViTConfig) -> dict[str, object]:
    return {
        "intermediate_size": config.mlp_dim,
        "num_register_tokens": config.registers,
        "use_gated_mlp": config.activation == "swiglu",
        "query_bias": config.qkv_bias,
        "value_bias": config.qkv_bias,
        "proj_bias": config.proj_bias,
        "mlp_bias": True,
        "rope_theta": 100.0,
    }


def _siglip(config: ViTConfig) -> dict[str, object]:
    return {"intermediate_size": config.mlp_dim, "attention_dropout": 0.0}


_OWN: dict[str, Callable[[ViTConfig], dict[str, Any]]] = {
    "vit": _vit,
    "deit": _vit,
    "dinov2": _dinov2,
    "dinov2_with_registers": _dinov2_registers,
    "dinov3_vit": _dinov3,
    "siglip_vision_model": _siglip,
}
"""Model type → fields of its `config.json` in addition to the sizes."""
