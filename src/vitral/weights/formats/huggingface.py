"""Formats of Hugging Face's transformers: ViT, MAE, MSN, DeiT, I-JEPA, DINOv2, DINOv3, SigLIP and CLIP, with the tensor
names of files on the hub and those of transformers 5 in memory.

`transformers/models/*/modeling_*.py` are the reference for arithmetic and names, `configuration_*.py` for the defaults
of `config.json`; its fields are in `huggingface_config.py`. It is read as data: fields that name code (`auto_map`,
`_class_name`) are ignored. Writing is in `huggingface_writing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.weights import class_names
from vitral.weights.formats.format import DINOV2_HEADS, DINOV3_HEADS, HEADS, SIGLIP_HEADS, Format
from vitral.weights.formats.huggingface_config import TOWERS, check, positive, size, sizes, whole, wrong
from vitral.weights.notes import Caution
from vitral.weights.preprocessing_configs import DEFAULTS, from_huggingface
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import (
    PATCHES,
    QUERY_VALUE_BIAS,
    SAME,
    STACKED,
    ConfigFields,
    Form,
    Rule,
    both,
    rename,
    same,
)

# ---------------------------------------------------------------- names


def _spellings(prefix: str, *rules: Rule) -> tuple[Rule, ...]:
    """Make each rule twice: with the prefix of a model with a head, and without, as in the bare model."""
    return (*rename(rules, lambda name: prefix + name), *rules)


def _attention(layer: str) -> tuple[Rule, ...]:
    """Rules for the published names, then for those of transformers 5 in memory."""
    old, new = f"{layer}.attention.attention", f"{layer}.attention"
    return (
        *both("blocks.{i}.attn.qkv", [f"{old}.{name}" for name in ("query", "key", "value")], STACKED),
        *same({"blocks.{i}.attn.proj.*": f"{layer}.attention.output.dense.*"}),
        *both("blocks.{i}.attn.qkv", [f"{new}.{name}_proj" for name in "qkv"], STACKED),
        *same({"blocks.{i}.attn.proj.*": f"{new}.o_proj.*"}),
    )


def _vit_block(layer: str, first: str, second: str) -> tuple[Rule, ...]:
    return (
        *_attention(layer),
        *same(
            {
                "blocks.{i}.norm1.*": f"{layer}.layernorm_before.*",
                "blocks.{i}.norm2.*": f"{layer}.layernorm_after.*",
                "blocks.{i}.mlp.fc1.*": f"{layer}.{first}.*",
                "blocks.{i}.mlp.fc2.*": f"{layer}.{second}.*",
            }
        ),
    )


POSITIONS = same({"pos_embed": "embeddings.position_embeddings"})
EMBEDDINGS = same(
    {
        "cls_token": "embeddings.cls_token",
        "patch_embed.proj.*": "embeddings.patch_embeddings.projection.*",
        "norm.*": "layernorm.*",
    }
)
VIT_BLOCKS = (
    *_vit_block("encoder.layer.{i}", "intermediate.dense", "output.dense"),
    *_vit_block("layers.{i}", "mlp.fc1", "mlp.fc2"),
)
_CLASSIFIER = same({"head.*": "classifier.*"})
# ViTModel's output is tanh(dense(class token)), the pre-logits of §3.2; with a classifier it is not computed.
_POOLER = same({"pre_logits.*": "pooler.dense.*"})

_SECOND_OUT = Form(
    "without the distillation token's",
    lambda tensors: torch.cat([tensors[0][:, :1], tensors[0][:, 2:]], dim=1),
    lambda parameter, heads: [
        torch.cat([parameter[:, :1], torch.zeros_like(parameter[:, :1]), parameter[:, 1:]], dim=1)
    ],
)


def _placed(tensors: Sequence[Tensor]) -> Tensor:
    token, place = tensors[0], tensors[1][:, 1:2]
    if token.shape != place.shape:
        raise ValueError("token and position differ in shape")  # they would be broadcast
    return token + place


# A position added to a token before the first block becomes part of that token. None: `_SECOND_OUT` writes the table.
_TOKEN_AND_PLACE = Form(
    "with its position, as a token that no head reads",
    _placed,
    lambda parameter, heads: [parameter, None],
)
AS_REGISTER = (
    Rule("reg_token", ("embeddings.distillation_token", "embeddings.position_embeddings"), _TOKEN_AND_PLACE),
    Rule("pos_embed", ("embeddings.position_embeddings",), _SECOND_OUT),
)

VIT_RULES = (*_spellings("vit.", *EMBEDDINGS, *POSITIONS, *VIT_BLOCKS), *_POOLER, *_CLASSIFIER)
DEIT_RULES = (*_spellings("deit.", *EMBEDDINGS, *AS_REGISTER, *VIT_BLOCKS), *_POOLER, *_CLASSIFIER)
DEIT_DISTILLED_RULES = (
    *_spellings("deit.", *EMBEDDINGS, *POSITIONS, *VIT_BLOCKS, *same({"dist_token": "embeddings.distillation_token"})),
    *same({"head.*": "cls_classifier.*", "head_dist.*": "distillation_classifier.*"}),
)

_DINO_LAYER = "encoder.layer.{i}"


def _dino_block(layer: str) -> tuple[Rule, ...]:
    return same(
        {
            "blocks.{i}.norm1.*": f"{layer}.norm1.*",
            "blocks.{i}.norm2.*": f"{layer}.norm2.*",
            "blocks.{i}.ls1.gamma": f"{layer}.layer_scale1.lambda1",
            "blocks.{i}.ls2.gamma": f"{layer}.layer_scale2.lambda1",
        }
    )


_SWIGLU = ("activation", "swiglu")
# The value is listed first: of the rules that begin with it, the one with a gate precedes the one without.
_VALUE_AND_GATE = Form(
    "gate and value stacked",
    lambda tensors: torch.cat([tensors[1], tensors[0]]),
    lambda parameter, heads: parameter.chunk(2)[::-1],
)


def _gated(layer: str) -> tuple[Rule, ...]:
    return (
        *both("blocks.{i}.mlp.fc1", (f"{layer}.mlp.up_proj", f"{layer}.mlp.gate_proj"), _VALUE_AND_GATE, _SWIGLU),
        *both("blocks.{i}.mlp.fc2", (f"{layer}.mlp.down_proj",), SAME),
    )


def _dinov2(prefix: str, *more: Rule) -> tuple[Rule, ...]:
    mlp = f"{_DINO_LAYER}.mlp"
    gated = [
        rule
        for n, way in ((1, "in"), (2, "out"))
        for rule in both(f"blocks.{{i}}.mlp.fc{n}", (f"{mlp}.weights_{way}",), SAME, _SWIGLU)
    ]
    plain = same({f"blocks.{{i}}.mlp.fc{n}.*": f"{mlp}.fc{n}.*" for n in (1, 2)})
    blocks = (*_attention(_DINO_LAYER), *_dino_block(_DINO_LAYER), *gated, *plain, *_gated(_DINO_LAYER))
    return (*_spellings(prefix, *EMBEDDINGS, *POSITIONS, *blocks, *more), *_CLASSIFIER)


def _some_biases(parameter: Tensor, heads: int) -> Sequence[Tensor | None]:
    q, k, v = parameter.chunk(3)
    return q, k if k.any() else None, v


_BIASES = Form("q, k, v stacked", STACKED.read, _some_biases)


def _dinov3_block(layer: str) -> tuple[Rule, ...]:
    q, k, v, o = (f"{layer}.attention.{name}_proj" for name in "qkvo")
    return (
        Rule("blocks.{i}.attn.qkv.weight", (f"{q}.weight", f"{k}.weight", f"{v}.weight"), STACKED),
        Rule("blocks.{i}.attn.qkv.bias", (f"{q}.bias", f"{k}.bias", f"{v}.bias"), _BIASES),
        Rule("blocks.{i}.attn.qkv.bias", (f"{q}.bias", f"{v}.bias"), QUERY_VALUE_BIAS),
        *same({"blocks.{i}.attn.proj.*": f"{o}.*"}),
        *_dino_block(layer),
        *_gated(layer),
        *same({"blocks.{i}.mlp.fc1.*": f"{layer}.mlp.up_proj.*"}),
    )


_REGISTERS = same({"reg_token": "embeddings.register_tokens"})
DINOV3_RULES = (
    *same({"cls_token": "embeddings.cls_token", "patch_embed.proj.*": "embeddings.patch_embeddings.*"}),
    *_REGISTERS,
    *same({"norm.*": "norm.*"}),
    *_dinov3_block("layer.{i}"),
    *_dinov3_block("model.layer.{i}"),
)

_TABLE = Form("", lambda tensors: tensors[0][None], lambda parameter, heads: [parameter[0]])
_TOWER = (
    Rule("pos_embed", ("embeddings.position_embedding.weight",), _TABLE),
    *both("blocks.{i}.attn.qkv", [f"encoder.layers.{{i}}.self_attn.{name}_proj" for name in "qkv"], STACKED),
    *same(
        {
            f"blocks.{{i}}.{module}.*": f"encoder.layers.{{i}}.{source}.*"
            for module, source in {
                "attn.proj": "self_attn.out_proj",
                "norm1": "layer_norm1",
                "norm2": "layer_norm2",
                "mlp.fc1": "mlp.fc1",
                "mlp.fc2": "mlp.fc2",
            }.items()
        }
    ),
)
_DENSE = "embeddings.patch_embedding.weight[dense]"
"""Name of a dense layer of patches; a convolution, of older networks, keeps the name that both have."""
_SIGLIP = (
    *same({"patch_embed.proj.*": "embeddings.patch_embedding.*", "norm.*": "post_layernorm.*"}),
    *_TOWER,
)
_SIGLIP2 = (
    Rule("patch_embed.proj.weight", (_DENSE,), PATCHES),
    *same({"patch_embed.proj.bias": "embeddings.patch_embedding.bias", "norm.*": "post_layernorm.*"}),
    *_TOWER,
)
_SIGLIP_HEAD = (
    *same({"attn_pool.latent": "head.probe", "attn_pool.proj.*": "head.attention.out_proj.*"}),
    *same({"attn_pool.norm.*": "head.layernorm.*"}),
    *same({f"attn_pool.mlp.fc{n}.*": f"head.mlp.fc{n}.*" for n in (1, 2)}),
    *(
        Rule(f"attn_pool.{module}.{kind}", (f"head.attention.in_proj_{kind}[{module}]",))
        for module in ("q", "kv")
        for kind in ("weight", "bias")
    ),
)
SIGLIP_RULES = _spellings("vision_model.", *_SIGLIP, *_SIGLIP_HEAD)
SIGLIP_CLASSIFIER_RULES = (*_spellings("vision_model.", *_SIGLIP), *_CLASSIFIER)
SIGLIP2_RULES = _spellings("vision_model.", *_SIGLIP2, *_SIGLIP_HEAD)
SIGLIP2_CLASSIFIER_RULES = (*_spellings("vision_model.", *_SIGLIP2), *_CLASSIFIER)

_VECTOR = Form("", lambda tensors: tensors[0].reshape(1, 1, -1), lambda parameter, heads: [parameter.flatten()])
_CLIP = (
    Rule("cls_token", ("embeddings.class_embedding",), _VECTOR),
    Rule("patch_embed.proj.weight", ("embeddings.patch_embedding.weight",)),
    *same({"norm_pre.*": "pre_layrnorm.*"}),  # spelled so
    *_TOWER,
)
CLIP_RULES = _spellings("vision_model.", *_CLIP, *same({"norm.*": "post_layernorm.*"}))
CLIP_CLASSIFIER_RULES = (*_spellings("vision_model.", *_CLIP), *_CLASSIFIER)
IJEPA_RULES = (
    *_spellings(
        "ijepa.",
        *same({"patch_embed.proj.*": "embeddings.patch_embeddings.projection.*", "norm.*": "layernorm.*"}),
        *POSITIONS,
        *VIT_BLOCKS,
    ),
    *_CLASSIFIER,
)


def _dense_named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Give a dense layer of patches a name of its own."""
    end = "embeddings.patch_embedding.weight"
    return {f"{name}[dense]" if name.endswith(end) and t.ndim == 2 else name: t for name, t in tensors.items()}


def _split_in_proj(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Split `in_proj_weight` (3D, D) into q and kv: the pooling head's query and its keys and values are two layers."""
    found: dict[str, Tensor] = {}
    for name, tensor in _dense_named(tensors).items():
        if "head.attention.in_proj_" in name and not name.endswith("]") and tensor.ndim:
            third = len(tensor) // 3
            found |= {f"{name}[q]": tensor[:third], f"{name}[kv]": tensor[third:]}
        else:
            found[name] = tensor
    return found


# ---------------------------------------------------------------- config.json


@dataclass(frozen=True)
class _Defaults:
    """Defaults of a configuration class, for fields missing in `config.json`."""

    norm_eps: float
    heads: int = 12
    activation: str = "gelu"
    image_size: int | None = 224
    """None: `config.json` does not state it, and positions do."""
    preprocessing: str = "huggingface-vit"


_DEFAULTS = {
    "vit": _Defaults(1e-12),
    "vit_mae": _Defaults(1e-12, preprocessing="mae"),
    "vit_msn": _Defaults(1e-6, preprocessing="deit"),
    "deit": _Defaults(1e-12, preprocessing="deit"),
    "dinov2": _Defaults(1e-6, preprocessing="dinov2"),
    "dinov2_with_registers": _Defaults(1e-6, preprocessing="dinov2"),
    "dinov3_vit": _Defaults(1e-5, heads=6, preprocessing="dinov3"),
    "siglip_vision_model": _Defaults(1e-6, activation="gelu_pytorch_tanh", preprocessing="siglip"),
    "siglip2_vision_model": _Defaults(1e-6, activation="gelu_pytorch_tanh", image_size=None),
    "clip_vision_model": _Defaults(1e-5, activation="quick_gelu", preprocessing="clip"),
    "ijepa": _Defaults(1e-12, preprocessing="deit"),
}
ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu-tanh",
    "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh",
    "gelu_accurate": "gelu-tanh",
    "gelu_python_tanh": "gelu-tanh",
    "quick_gelu": "quick-gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def _model(source: Source, types: Sequence[str]) -> tuple[str, Mapping[str, Any] | None]:
    """Read the model's type and its part of `config.json`; without a file, the first of `types` and None.

    Raises `WeightsError` for a type that is not in `types`: another model may have the same names and other arithmetic.
    """
    config = source.config
    if config is None:
        return types[0], None
    if tower := TOWERS.get(str(config.get("model_type"))):
        inner = config.get("vision_config")
        config = {"model_type": tower, **(inner if isinstance(inner, Mapping) else {})}
    kind = config.get("model_type", types[0])
    if kind not in types:
        why = f"config.json states '{str(kind)[:40]}'; these names belong to {' and '.join(types)}"
        raise WeightsError("unknown type of model", where=source.where, why=why)
    return kind, config


def facts_of(*types: str, **always: object) -> Callable[[Source], ConfigFields]:
    """Read the fields that shapes cannot determine from `config.json`, else from the defaults of the model's class."""

    def facts(source: Source) -> ConfigFields:
        kind, config = _model(source, types)
        defaults = _DEFAULTS[kind]
        gated = any("mlp.weights_in." in name or "mlp.gate_proj." in name for name in source.tensors)
        found: ConfigFields = {"norm_eps": defaults.norm_eps, **always}
        act = defaults.activation
        if config is not None:
            check(kind, config, gated, source)
            found |= sizes(kind, config, gated, source)
            found["heads"] = whole(config, "num_attention_heads", defaults.heads, source)
            if defaults.image_size is not None:
                found["image_size"] = size(config, "image_size", defaults.image_size, source)
            found["norm_eps"] = positive(config, "layer_norm_eps", defaults.norm_eps, source)
            act = config.get("hidden_act", act)
        if not gated:  # shapes show a gated MLP, whose activation is silu
            if not isinstance(act, str) or act not in ACTIVATIONS:
                raise wrong("hidden_act", f"one of {', '.join(ACTIVATIONS)}", act, source)
            found["activation"] = ACTIVATIONS[act]
        return found

    return facts


def _preprocessing(*types: str) -> Callable[[Source, ViTConfig], tuple[Preprocessing, str]]:
    def of(source: Source, config: ViTConfig) -> tuple[Preprocessing, str]:
        if source.preprocessor is not None:
            return from_huggingface(source.preprocessor, config.image), "preprocessor_config.json"
        kind, _ = _model(source, types)
        note = Caution(f"no preprocessor_config.json: {kind}'s default")
        return DEFAULTS[_DEFAULTS[kind].preprocessing](config.image), note

    return of


def _assumed(*types: str) -> Callable[[Source], Sequence[str]]:
    def assumed(source: Source) -> Sequence[str]:
        if source.config is not None:
            return ()
        defaults = _DEFAULTS[types[0]]
        return (f"no config.json: taken as {types[0]}, norms with epsilon {defaults.norm_eps:g}, heads by the width",)

    return assumed


def _at_one_size(source: Source) -> Sequence[str]:
    note = "all images are stretched to one size; transformers keeps the aspect of each"
    return (*_assumed("siglip2_vision_model")(source), note)


# ---------------------------------------------------------------- the formats

_ACTS = ("gelu", "gelu-tanh", "quick-gelu", "relu", "silu")
_ALWAYS: dict[str, Sequence[Any]] = {
    "norm": ("pre",),
    "attention_scale": ("head",),
    "logits_tanh": (False,),
    "stem": (None,),
    "qk_norm": (False,),
    "final_norm": ("tokens",),
    "proj_bias": (True,),
    "activation": (*_ACTS, "swiglu"),
}
_LEARNED = {**_ALWAYS, "position": ("learned",), "cls_token": (True,), "cls_position": (True,)}
_PLAIN = {**_LEARNED, "pool": ("cls",), "layer_scale": (None,), "activation": _ACTS}
_MASK = {"*embeddings.mask_token": "replaces masked patches in pre-training"}
_UNREAD = "the classifier reads the class token itself"
_TEXT = {
    "text_model.*": "the text tower",
    "logit_scale": "compares images and texts",
    "logit_bias": "compares images and texts",
}


def _format(name: str, rules: tuple[Rule, ...], types: tuple[str, ...], always: ConfigFields, **more: Any) -> Format:
    return Format(
        name=name,
        rules=rules,
        preprocessing=_preprocessing(*types),
        facts=facts_of(*types, **always),
        stated=lambda source: source.config is not None,
        classes=lambda source, count: class_names.from_config(source.config or {}),
        **{"scheme": "bicubic", "assumed": _assumed(*types), **more},
    )


_CLS: ConfigFields = {"cls_position": True, "pool": "cls"}

VIT = _format(
    "hf-vit",
    VIT_RULES,
    ("vit", "vit_mae", "vit_msn"),
    _CLS,
    required=("*embeddings.cls_token", "*embeddings.position_embeddings", "*.layernorm_before.weight"),
    ignored={**_MASK, "decoder.*": "the decoder of pre-training", "vit.pooler.*": _UNREAD},
    fixed={**_PLAIN, "registers": (0,), "dist_token": (False,)},
)
DEIT = _format(
    "hf-deit",
    DEIT_RULES,
    ("deit",),
    _CLS,
    required=("*embeddings.distillation_token", "*.layernorm_before.weight"),
    ignored={**_MASK, "decoder.*": "the decoder of pre-training", "deit.pooler.*": _UNREAD},
    fixed={**_PLAIN, "registers": (1,), "dist_token": (False,)},
)
DEIT_DISTILLED = _format(
    "hf-deit-distilled",
    DEIT_DISTILLED_RULES,
    ("deit",),
    _CLS,
    required=("*embeddings.distillation_token", "distillation_classifier.weight"),
    ignored={**_MASK, "deit.pooler.*": _UNREAD},
    fixed={**_PLAIN, "registers": (0,), "dist_token": (True,)},
)
DINOV2 = _format(
    "hf-dinov2",
    _dinov2("dinov2."),
    ("dinov2",),
    {"cls_position": True},
    heads=DINOV2_HEADS,
    required=("*.layer_scale1.lambda1", "*embeddings.position_embeddings"),
    ignored=_MASK,
    fixed={**_LEARNED, "pool": ("cls", "cls-mean"), "registers": (0,), "dist_token": (False,)},
)
DINOV2_REGISTERS = _format(
    "hf-dinov2-registers",
    _dinov2("dinov2_with_registers.", *_REGISTERS),
    ("dinov2_with_registers",),
    {"cls_position": True},
    heads=DINOV2_HEADS,
    scheme="bicubic-antialias",
    ignored=_MASK,
    required=("*.layer_scale1.lambda1", "*embeddings.register_tokens", "*embeddings.position_embeddings"),
    fixed={**_LEARNED, "pool": ("cls", "cls-mean"), "dist_token": (False,)},
)
DINOV3 = _format(
    "hf-dinov3",
    DINOV3_RULES,
    ("dinov3_vit",),
    {"position": "rotary", "pool": "cls"},
    heads=DINOV3_HEADS,
    required=("*.layer_scale1.lambda1", "embeddings.patch_embeddings.weight"),
    ignored=_MASK,
    fixed={
        **_ALWAYS,
        "position": ("rotary",),
        "pool": ("cls",),
        "cls_token": (True,),
        "dist_token": (False,),
        "proj_bias": (True, False),
    },
)
_SIGLIP_FIXED = {
    **_ALWAYS,
    "position": ("learned",),
    "cls_token": (False,),
    "dist_token": (False,),
    "registers": (0,),
    "layer_scale": (None,),
    "activation": _ACTS,
    "qkv_bias": (True,),
}
SIGLIP = _format(
    "hf-siglip",
    SIGLIP_RULES,
    ("siglip_vision_model",),
    {"pool": "map"},
    heads=SIGLIP_HEADS,
    required=("*head.probe", "*embeddings.patch_embedding.weight"),
    ignored=_TEXT,
    canonical=_split_in_proj,
    fixed={**_SIGLIP_FIXED, "pool": ("map",)},
)
SIGLIP_CLASSIFIER = _format(
    "hf-siglip-classifier",
    SIGLIP_CLASSIFIER_RULES,
    ("siglip_vision_model",),
    {"pool": "mean"},
    heads=SIGLIP_HEADS,
    required=("classifier.weight", "*embeddings.patch_embedding.weight"),
    canonical=_dense_named,
    ignored={"vision_model.head.*": "the classifier reads the mean of all tokens"},
    fixed={**_SIGLIP_FIXED, "pool": ("mean",)},
)
SIGLIP2 = _format(
    "hf-siglip2",
    SIGLIP2_RULES,
    ("siglip2_vision_model",),
    {"pool": "map"},
    heads=SIGLIP_HEADS,
    required=(f"*{_DENSE}", "*head.probe"),
    ignored=_TEXT,
    canonical=_split_in_proj,
    scheme="bilinear-antialias",
    assumed=_at_one_size,
    fixed={**_SIGLIP_FIXED, "pool": ("map",)},
)
SIGLIP2_CLASSIFIER = _format(
    "hf-siglip2-classifier",
    SIGLIP2_CLASSIFIER_RULES,
    ("siglip2_vision_model",),
    {"pool": "mean"},
    heads=SIGLIP_HEADS,
    required=(f"*{_DENSE}", "classifier.weight"),
    canonical=_dense_named,
    scheme="bilinear-antialias",
    assumed=_at_one_size,
    ignored={"vision_model.head.*": "the classifier reads the mean of all tokens"},
    fixed={**_SIGLIP_FIXED, "pool": ("mean",)},
)
CLIP_HEADS = {**HEADS, (1408, 6144): 16, (1664, 8192): 16}
_BARE_MEAN = {
    **_ALWAYS,
    "position": ("learned",),
    "dist_token": (False,),
    "registers": (0,),
    "layer_scale": (None,),
    "activation": _ACTS,
}
_POSITION_IDS = {"*embeddings.position_ids": "indices of the positions"}
_CLIP_FIXED = {
    **_BARE_MEAN,
    "cls_token": (True,),
    "cls_position": (True,),
    "norm_pre": (True,),
    "patch_bias": (False,),
    "qkv_bias": (True,),
}
_TWO_GELUS = "OpenAI's CLIP computes quick_gelu and others, such as LAION's, gelu: no tensor shows which"
CLIP = _format(
    "hf-clip",
    CLIP_RULES,
    ("clip_vision_model",),
    _CLS,
    heads=CLIP_HEADS,
    undecided=_TWO_GELUS,
    required=("*pre_layrnorm.weight", "*post_layernorm.weight", "*embeddings.class_embedding"),
    ignored={
        **_TEXT,
        **_POSITION_IDS,
        "text_projection.weight": "the text tower",
        "visual_projection.weight": "projects the pooled features to compare them with texts",
    },
    fixed={**_CLIP_FIXED, "pool": ("cls",)},
)
CLIP_CLASSIFIER = _format(
    "hf-clip-classifier",
    CLIP_CLASSIFIER_RULES,
    ("clip_vision_model",),
    {"cls_position": True, "pool": "mean"},
    heads=CLIP_HEADS,
    undecided=_TWO_GELUS,
    required=("classifier.weight", "*pre_layrnorm.weight", "*embeddings.class_embedding"),
    ignored={**_POSITION_IDS, "vision_model.post_layernorm.*": "the classifier reads the mean of patches without it"},
    fixed={**_CLIP_FIXED, "pool": ("mean",), "final_norm": ("none",)},
)
IJEPA = _format(
    "hf-ijepa",
    IJEPA_RULES,
    ("ijepa",),
    {"pool": "mean"},
    heads={**HEADS, (1408, 6144): 16},
    required=("*embeddings.position_embeddings", "*.layernorm_before.weight"),
    ignored=_MASK,
    fixed={**_BARE_MEAN, "cls_token": (False,), "pool": ("mean",)},
)

_ALL = (
    VIT,
    DEIT,
    DEIT_DISTILLED,
    IJEPA,
    DINOV2,
    DINOV2_REGISTERS,
    DINOV3,
    SIGLIP,
    SIGLIP_CLASSIFIER,
    SIGLIP2,
    SIGLIP2_CLASSIFIER,
    CLIP,
    CLIP_CLASSIFIER,
)
FORMATS = {one.name: one for one in _ALL}
