"""Fields of transformers' `config.json`: honored, without effect on a forward pass, or refused.

`FIELDS` lists every field of a model type's configuration class, so that none changes the arithmetic unnoticed; a test
compares it with the installed transformers. A field unknown to the class has no effect in transformers either. Stated
sizes override the tensors' shapes: tensors that contradict them do not make a whole network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from vitral.errors import WeightsError
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import ConfigFields


class Only(NamedTuple):
    """A field that must have one of these values: vitral's networks support no other."""

    values: tuple[Any, ...]


Use = Literal["honored", "no effect"] | Only


def _honored(*names: str) -> dict[str, Use]:
    return dict.fromkeys(names, "honored")


def _without_effect(*names: str) -> dict[str, Use]:
    return dict.fromkeys(names, "no effect")


EVERY: dict[str, Use] = {
    **_honored("model_type", "architectures", "id2label", "label2id", "num_labels"),
    **_without_effect(
        "dtype",
        "torch_dtype",
        "transformers_version",
        "problem_type",
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "chunk_size_feed_forward",
        "initializer_range",
        "initializer_factor",
    ),
    "is_encoder_decoder": Only((False,)),
    "is_decoder": Only((False,)),
    "add_cross_attention": Only((False,)),
    "pruned_heads": Only((None, {})),
    "quantization_config": Only((None,)),
}
"""Fields of all model types."""

_SIZES = _honored(
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "hidden_act",
    "layer_norm_eps",
    "image_size",
    "patch_size",
    "num_channels",
)
_DROPOUT = _without_effect("hidden_dropout_prob", "attention_probs_dropout_prob")
_VIT = {**_SIZES, **_DROPOUT, **_honored("intermediate_size", "qkv_bias", "head_dim")}
_POOLER = {**_honored("pooler_act", "pooler_output_size"), **_without_effect("encoder_stride")}
_BACKBONE = _without_effect(
    "_out_features",
    "_out_indices",
    "out_features",
    "out_indices",
    "stage_names",
    "apply_layernorm",
    "reshape_hidden_states",
    "drop_path_rate",
    "layerscale_value",
    "use_mask_token",
)
_DINOV2 = {**_SIZES, **_DROPOUT, **_BACKBONE, **_honored("mlp_ratio", "qkv_bias", "use_swiglu_ffn", "head_dim")}
_TOWER = {**_SIZES, **_honored("intermediate_size"), **_without_effect("attention_dropout")}
_DECODER = _without_effect(
    "decoder_hidden_size",
    "decoder_intermediate_size",
    "decoder_num_attention_heads",
    "decoder_num_hidden_layers",
    "mask_ratio",
    "norm_pix_loss",
)

FIELDS: dict[str, dict[str, Use]] = {
    "vit": {**_VIT, **_POOLER},
    "vit_mae": {**_VIT, **_DECODER},
    "vit_msn": _VIT,
    "deit": {**_VIT, **_POOLER},
    "ijepa": {**_VIT, **_POOLER},
    "dinov2": _DINOV2,
    "dinov2_with_registers": {**_DINOV2, **_honored("num_register_tokens")},
    "dinov3_vit": {
        **_SIZES,
        **_BACKBONE,
        **_without_effect("attention_dropout"),
        **_honored("intermediate_size", "query_bias", "value_bias", "proj_bias", "mlp_bias", "use_gated_mlp"),
        **_honored("num_register_tokens", "key_bias"),
        **_without_effect("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"),
        "rope_theta": Only((100.0,)),
        "rope_parameters": Only((None,)),
        "rope_scaling": Only((None,)),
    },
    "siglip_vision_model": {**_TOWER, **_honored("vision_use_head")},
    "siglip2_vision_model": {**_TOWER, **_honored("vision_use_head", "num_patches")},
    "clip_vision_model": {**_TOWER, **_without_effect("projection_dim")},
}
"""Model type → field → its use, in addition to `EVERY`."""

TOWERS = {"siglip": "siglip_vision_model", "siglip2": "siglip2_vision_model", "clip": "clip_vision_model"}
"""Type of a model with two towers → type of its image tower, described by `vision_config`."""

ARCHITECTURES = {
    "vit": ("ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"),
    "vit_mae": ("ViTMAEModel", "ViTMAEForPreTraining"),
    "vit_msn": ("ViTMSNModel", "ViTMSNForImageClassification"),
    "deit": (
        "DeiTModel",
        "DeiTForImageClassification",
        "DeiTForImageClassificationWithTeacher",
        "DeiTForMaskedImageModeling",
    ),
    "ijepa": ("IJepaModel", "IJepaForImageClassification"),
    "dinov2": ("Dinov2Model", "Dinov2ForImageClassification"),
    "dinov2_with_registers": ("Dinov2WithRegistersModel", "Dinov2WithRegistersForImageClassification"),
    "dinov3_vit": ("DINOv3ViTModel",),
    "siglip_vision_model": ("SiglipModel", "SiglipVisionModel", "SiglipForImageClassification"),
    "siglip2_vision_model": ("Siglip2Model", "Siglip2VisionModel", "Siglip2ForImageClassification"),
    "clip_vision_model": (
        "CLIPModel",
        "CLIPVisionModel",
        "CLIPVisionModelWithProjection",
        "CLIPForImageClassification",
    ),
}
"""Model type → classes whose arithmetic vitral reproduces."""


def check(kind: str, config: Mapping[str, object], gated: bool, source: Source) -> None:
    """Raise `WeightsError` for a configuration that vitral's networks do not compute.

    `gated` is True if the tensors include a gated MLP.
    """
    _check_architecture(kind, config, source)
    wanted = {name: use.values for name, use in {**EVERY, **FIELDS[kind]}.items() if isinstance(use, Only)}
    wanted |= {name: (gated,) for name in ("use_swiglu_ffn", "use_gated_mlp") if name in FIELDS[kind]}
    if "pooler_act" in FIELDS[kind] and any(name.startswith("pooler.") for name in source.tensors):
        wanted["pooler_act"] = ("tanh",)
    if kind == "dinov3_vit" and gated:
        wanted["hidden_act"] = ("silu", "swish")
    if "vision_use_head" in FIELDS[kind] and not _has(source, "classifier.weight"):
        wanted["vision_use_head"] = (True,)
    if "head_dim" in FIELDS[kind] and "head_dim" in config:
        dim, heads = config.get("hidden_size"), config.get("num_attention_heads")
        wanted["head_dim"] = (dim / heads,) if type(dim) is int and type(heads) is int and heads else ()
    if kind == "dinov3_vit":
        ends = {".".join(name.split(".")[-2:]) for name in source.tensors}
        wanted |= {f"{name}_bias": (f"{name[0]}_proj.bias" in ends,) for name in ("query", "key", "value")}
    stated = {**{name: value for name, value in (source.config or {}).items() if name in EVERY}, **config}
    check_fields(wanted, stated, source)
    if kind == "dinov3_vit" and gated and "hidden_act" not in config:
        raise wrong("hidden_act", "'silu'", "gelu, the default", source)


def check_fields(wanted: Mapping[str, Sequence[object]], stated: Mapping[str, object], source: Source) -> None:
    """Raise `WeightsError` for a stated field with none of its wanted values."""
    for name, values in wanted.items():
        if name in stated and stated[name] not in values:
            raise wrong(name, " or ".join(map(repr, values)) or "its width divided by its heads", stated[name], source)


def _check_architecture(kind: str, config: Mapping[str, object], source: Source) -> None:
    names = (source.config or {}).get("architectures") or ()
    for name in names if isinstance(names, list | tuple) else (names,):
        if name not in ARCHITECTURES[kind]:
            raise wrong("architectures", f"{', '.join(ARCHITECTURES[kind])}", name, source)
        for part, tensor in _HEADS.items():
            headless = config.get("num_labels") == 0 or (source.config or {}).get("id2label") == {}
            if name.endswith(part) and not headless and not _has(source, tensor):
                what = f"config.json names '{name}', but its classifier is missing"
                raise WeightsError(what, where=source.where, why=f"no tensor '{tensor}'")


_HEADS = {
    "ForImageClassification": "classifier.weight",
    "ForImageClassificationWithTeacher": "distillation_classifier.weight",
}


def _has(source: Source, name: str) -> bool:
    return name in source.tensors


def sizes(kind: str, config: Mapping[str, object], gated: bool, source: Source) -> ConfigFields:
    """Read the sizes and parts stated by a configuration; the rest follows from the shapes."""
    found: ConfigFields = {}
    for name, field in _COUNTS.items():
        if name in FIELDS[kind] and name in config:
            least = 0 if name == "num_register_tokens" else 1
            found[field] = whole(config, name, 1, source, least=least)
    if "patch_size" in config:
        found["patch_size"] = size(config, "patch_size", 16, source)
    biases = [config[name] for name in ("qkv_bias", "query_bias", "key_bias", "value_bias") if name in config]
    if biases and any(name in FIELDS[kind] for name in ("qkv_bias", "query_bias")):
        found["qkv_bias"] = any(map(bool, biases))
    found |= {name: bool(config[name]) for name in ("proj_bias", "mlp_bias") if name in FIELDS[kind] and name in config}
    if "mlp_ratio" in FIELDS[kind] and {"mlp_ratio", "hidden_size"} <= set(config):
        wide = int(found["dim"] * _number(config, "mlp_ratio", source))
        found["mlp_dim"] = (int(wide * 2 / 3) + 7) // 8 * 8 if gated else wide
    return found


_COUNTS = {
    "hidden_size": "dim",
    "num_hidden_layers": "depth",
    "intermediate_size": "mlp_dim",
    "num_channels": "channels",
    "num_register_tokens": "registers",
}
"""Their counts → the fields of `ViTConfig`."""


def wrong(field: str, wanted: str, value: object, source: Source) -> WeightsError:
    """Make the error for a field that cannot be honored."""
    why = f"'{field}' in config.json is {str(value)[:40]!r}; vitral's networks have {wanted}"
    return WeightsError("cannot honor the configuration of the weights", where=source.where, why=why)


def whole(config: Mapping[str, object], field: str, usual: int, source: Source, least: int = 1) -> int:
    """Read a whole number of at least `least`."""
    value = config.get(field, usual)
    if type(value) is not int or value < least:
        raise wrong(field, "a positive whole number", value, source)
    return value


def positive(config: Mapping[str, Any], field: str, usual: float, source: Source) -> float:
    """Read a number from 0 to below 1."""
    value = config.get(field, usual)
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise wrong(field, "a small number", value, source)
    return float(value)


def size(config: Mapping[str, object], field: str, usual: int, source: Source) -> tuple[int, int]:
    """Read height and width in pixels."""
    value = config.get(field, usual)
    sides: Sequence[Any] = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise wrong(field, "a number of pixels, or two", value, source)
    return sides[0], sides[1]


def _number(config: Mapping[str, Any], field: str, source: Source) -> float:
    value = config[field]
    if type(value) not in (int, float) or not 0 < value < 1000:
        raise wrong(field, "a positive number", value, source)
    return float(value)
