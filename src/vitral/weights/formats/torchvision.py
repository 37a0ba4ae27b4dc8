"""Format of torchvision's ViTs (`torchvision/models/vision_transformer.py`), including the older names of its MLP."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.weights import class_names
from vitral.weights.files import write_plain
from vitral.weights.formats.format import Format, check_square, translated
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import DEFAULTS
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import Rule, same

_BLOCK = "encoder.layers.encoder_layer_{i}"

RULES: tuple[Rule, ...] = (
    *same({"cls_token": "class_token", "pos_embed": "encoder.pos_embedding", "patch_embed.proj.*": "conv_proj.*"}),
    *same(
        {
            "blocks.{i}.norm1.*": f"{_BLOCK}.ln_1.*",
            "blocks.{i}.attn.proj.*": f"{_BLOCK}.self_attention.out_proj.*",
            "blocks.{i}.norm2.*": f"{_BLOCK}.ln_2.*",
            "blocks.{i}.mlp.fc1.*": f"{_BLOCK}.mlp.0.*",
            "blocks.{i}.mlp.fc2.*": f"{_BLOCK}.mlp.3.*",
        }
    ),
    Rule("blocks.{i}.attn.qkv.weight", (f"{_BLOCK}.self_attention.in_proj_weight",)),
    Rule("blocks.{i}.attn.qkv.bias", (f"{_BLOCK}.self_attention.in_proj_bias",)),
    *same({"norm.*": "encoder.ln.*", "pre_logits.*": "heads.pre_logits.*", "head.*": "heads.head.*"}),
    # before torchvision 0.12
    *same({f"blocks.{{i}}.mlp.fc{n}.*": f"{_BLOCK}.mlp.linear_{n}.*" for n in (1, 2)}),
)


def _canonical(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give the only dense layer below `heads` torchvision's name: users replace the head by `nn.Linear`, alone or in
    a `Sequential`.
    """
    below = [name for name in tensors if name.startswith("heads.") and not name.startswith("heads.pre_logits.")]
    kernels = [name for name in below if name.endswith("weight") and tensors[name].ndim == 2]
    if len(kernels) != 1:
        return tensors
    layer = kernels[0].removesuffix("weight")
    if {*below} - {f"{layer}weight", f"{layer}bias"}:
        return tensors
    return {name.replace(layer, "heads.head.", 1) if name in below else name: t for name, t in tensors.items()}


def _preprocessing(source: Source, config: ViTConfig) -> tuple[Preprocessing, str]:
    # L/16 was trained and is evaluated with a smaller border than the others; larger images mean SWAG weights
    family = "torchvision-swag" if max(config.image) > 224 else "torchvision"
    if (config.dim, config.patch) == (1024, (16, 16)) and family == "torchvision":
        family = "torchvision-l16"
    return DEFAULTS[family](config.image), "torchvision's transforms for this network"


def _write(weights: Weights, path: Path) -> Sequence[Path]:
    """Write a safetensors file for `model.load_state_dict(safetensors.torch.load_file(path))`."""
    if not weights.config.classes:
        why, hint = "its networks always have one", "--classes N --new-head adds one of zeros"
        raise WeightsError("a network without a head cannot be written for torchvision", why=why, hint=hint)
    tensors: dict[str, Tensor] = translated(TORCHVISION, weights)
    check_square(weights.config, "torchvision")
    file = path if path.suffix else path / "model.safetensors"
    write_plain(file, tensors)
    return [file]


TORCHVISION = Format(
    name="torchvision",
    heads={(768, 3072): 12, (1024, 4096): 16, (1280, 5120): 16},
    rules=RULES,
    canonical=_canonical,
    required=("class_token", "encoder.layers.encoder_layer_{i}.self_attention.in_proj_weight"),
    scheme="bicubic-corners",
    preprocessing=_preprocessing,
    classes=lambda source, count: class_names.default(count),
    fixed={
        "pool": ("cls",),
        "position": ("learned",),
        "cls_position": (True,),
        "norm": ("pre",),
        "norm_eps": (1e-6,),
        "final_norm": ("tokens",),
        "activation": ("gelu",),
        "attention_scale": ("head",),
        "logits_tanh": (False,),
        "channels": (3,),
        "layer_scale": (None,),
        "qk_norm": (False,),
        "registers": (0,),
        "dist_token": (False,),
        "qkv_bias": (True,),
        "proj_bias": (True,),
        "stem": (None,),
    },
    write=_write,
)
