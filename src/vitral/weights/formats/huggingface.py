"""Hugging Face's transformers: ViT, MAE, MSN, DeiT, DINOv2, DINOv3 and SigLIP, as files on the hub have them and as
transformers 5 names the same tensors in memory.

`transformers/models/*/modeling_*.py` are the reference for arithmetic and names, `configuration_*.py` for what a
`config.json` that is silent means. It is read as data: fields that name code (`auto_map`, `_class_name`) are not looked
at. Writing is in `huggingface_writing.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitral.data.transforms import Preprocessing
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.weights import labels
from vitral.weights.formats.format import Format
from vitral.weights.keymap import QUERY_VALUE_BIAS, SAME, STACKED, Facts, Form, Rule, both, rename, same
from vitral.weights.preprocessing import DEFAULTS, from_huggingface
from vitral.weights.source import Source

# ---------------------------------------------------------------- names


def _spellings(prefix: str, *rules: Rule) -> tuple[Rule, ...]:
    """With the prefix of a model that has a head, then as the bare model has them."""
    return (*rename(rules, lambda name: prefix + name), *rules)


def _attention(layer: str) -> tuple[Rule, ...]:
    """As published, then as in the memory of transformers 5."""
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


_POSITIONS = same({"pos_embed": "embeddings.position_embeddings"})
_EMBEDDINGS = same(
    {
        "cls_token": "embeddings.cls_token",
        "patch_embed.proj.*": "embeddings.patch_embeddings.projection.*",
        "norm.*": "layernorm.*",
    }
)
_VIT_BLOCKS = (
    *_vit_block("encoder.layer.{i}", "intermediate.dense", "output.dense"),
    *_vit_block("layers.{i}", "mlp.fc1", "mlp.fc2"),
)
_CLASSIFIER = same({"head.*": "classifier.*"})
# ViTModel's own output is tanh(dense(class token)), the pre-logits of §3.2; with a classifier it is not computed.
_POOLER = same({"pre_logits.*": "pooler.dense.*"})

_SECOND_OUT = Form(
    "without the distillation token's",
    lambda theirs: torch.cat([theirs[0][:, :1], theirs[0][:, 2:]], dim=1),
    lambda ours, heads: [torch.cat([ours[:, :1], torch.zeros_like(ours[:, :1]), ours[:, 1:]], dim=1)],
)


def _placed(theirs: Sequence[Tensor]) -> Tensor:
    token, place = theirs[0], theirs[1][:, 1:2]
    if token.shape != place.shape:
        raise ValueError("the token is not of its position's shape")  # they would be broadcast
    return token + place


# What is added to a token before the first block is part of that token. None: `_SECOND_OUT` writes the table.
_TOKEN_AND_PLACE = Form(
    "with its position, as a token that no head reads",
    _placed,
    lambda ours, heads: [ours, None],
)
_AS_REGISTER = (
    Rule("reg_token", ("embeddings.distillation_token", "embeddings.position_embeddings"), _TOKEN_AND_PLACE),
    Rule("pos_embed", ("embeddings.position_embeddings",), _SECOND_OUT),
)

VIT_RULES = (*_spellings("vit.", *_EMBEDDINGS, *_POSITIONS, *_VIT_BLOCKS), *_POOLER, *_CLASSIFIER)
DEIT_RULES = (*_spellings("deit.", *_EMBEDDINGS, *_AS_REGISTER, *_VIT_BLOCKS), *_POOLER, *_CLASSIFIER)
DEIT_DISTILLED_RULES = (
    *_spellings(
        "deit.", *_EMBEDDINGS, *_POSITIONS, *_VIT_BLOCKS, *same({"dist_token": "embeddings.distillation_token"})
    ),
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
# The value is named first: of the rules that begin with it, the one with a gate comes before the one without.
_VALUE_AND_GATE = Form(
    "gate and value stacked",
    lambda theirs: torch.cat([theirs[1], theirs[0]]),
    lambda ours, heads: ours.chunk(2)[::-1],
)


def _gated(layer: str) -> tuple[Rule, ...]:
    return (
        *both("blocks.{i}.mlp.fc1", (f"{layer}.mlp.up_proj", f"{layer}.mlp.gate_proj"), _VALUE_AND_GATE, _SWIGLU),
        *both("blocks.{i}.mlp.fc2", (f"{layer}.mlp.down_proj",), SAME),
    )


def _dinov2(prefix: str, *more: Rule) -> tuple[Rule, ...]:
    mlp = f"{_DINO_LAYER}.mlp"
    gated = [rule for n, way in ((1, "in"), (2, "out"))
             for rule in both(f"blocks.{{i}}.mlp.fc{n}", (f"{mlp}.weights_{way}",), SAME, _SWIGLU)]  # fmt: skip
    plain = same({f"blocks.{{i}}.mlp.fc{n}.*": f"{mlp}.fc{n}.*" for n in (1, 2)})
    blocks = (*_attention(_DINO_LAYER), *_dino_block(_DINO_LAYER), *gated, *plain, *_gated(_DINO_LAYER))
    return (*_spellings(prefix, *_EMBEDDINGS, *_POSITIONS, *blocks, *more), *_CLASSIFIER)


def _some_biases(ours: Tensor, heads: int) -> Sequence[Tensor | None]:
    q, k, v = ours.chunk(3)
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

_TABLE = Form("", lambda theirs: theirs[0][None], lambda ours, heads: [ours[0]])
_SIGLIP = (
    *same({"patch_embed.proj.*": "embeddings.patch_embedding.*", "norm.*": "post_layernorm.*"}),
    Rule("pos_embed", ("embeddings.position_embedding.weight",), _TABLE),
    *both("blocks.{i}.attn.qkv", [f"encoder.layers.{{i}}.self_attn.{name}_proj" for name in "qkv"], STACKED),
    *same(
        {
            f"blocks.{{i}}.{ours}.*": f"encoder.layers.{{i}}.{theirs}.*"
            for ours, theirs in {
                "attn.proj": "self_attn.out_proj", "norm1": "layer_norm1", "norm2": "layer_norm2",
                "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
            }.items()
        }
    ),
)  # fmt: skip
_SIGLIP_HEAD = (
    *same({"attn_pool.latent": "head.probe", "attn_pool.proj.*": "head.attention.out_proj.*"}),
    *same({"attn_pool.norm.*": "head.layernorm.*"}),
    *same({f"attn_pool.mlp.fc{n}.*": f"head.mlp.fc{n}.*" for n in (1, 2)}),
    *(
        Rule(f"attn_pool.{ours}.{kind}", (f"head.attention.in_proj_{kind}[{ours}]",))
        for ours in ("q", "kv")
        for kind in ("weight", "bias")
    ),
)
SIGLIP_RULES = _spellings("vision_model.", *_SIGLIP, *_SIGLIP_HEAD)
SIGLIP_CLASSIFIER_RULES = (*_spellings("vision_model.", *_SIGLIP), *_CLASSIFIER)


def _split_in_proj(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`in_proj_weight` (3D, D) holds q, k and v; the head's query and its keys and values are two layers of ours."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "head.attention.in_proj_" in name and not name.endswith("]") and tensor.ndim:
            third = len(tensor) // 3
            found |= {f"{name}[q]": tensor[:third], f"{name}[kv]": tensor[third:]}
        else:
            found[name] = tensor
    return found


# ---------------------------------------------------------------- config.json


@dataclass(frozen=True)
class _Usual:
    """What a configuration class means where `config.json` is silent."""

    norm_eps: float
    heads: int = 12
    activation: str = "gelu"
    image_size: int = 224
    preprocessing: str = "huggingface-vit"


_USUAL = {
    "vit": _Usual(1e-12),
    "vit_mae": _Usual(1e-12, preprocessing="mae"),
    "vit_msn": _Usual(1e-6, preprocessing="deit"),
    "deit": _Usual(1e-12, preprocessing="deit"),
    "dinov2": _Usual(1e-6, preprocessing="dinov2"),
    "dinov2_with_registers": _Usual(1e-6, preprocessing="dinov2"),
    "dinov3_vit": _Usual(1e-5, heads=6, preprocessing="dinov3"),
    "siglip_vision_model": _Usual(1e-6, activation="gelu_pytorch_tanh", preprocessing="siglip"),
}
_ACTIVATIONS = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu-tanh", "gelu_pytorch_tanh": "gelu-tanh",
    "gelu_fast": "gelu-tanh", "gelu_accurate": "gelu-tanh", "gelu_python_tanh": "gelu-tanh",
}  # fmt: skip


def _model(source: Source, types: Sequence[str]) -> tuple[str, Mapping[str, Any] | None]:
    """The model's type and its part of `config.json`; without a file, the first of the types and None.

    `WeightsError` for a type that is not among them: another model may have the same names and other arithmetic.
    """
    config = source.config
    if config is None:
        return types[0], None
    if config.get("model_type") == "siglip":
        inner = config.get("vision_config")
        config = {"model_type": "siglip_vision_model", **(inner if isinstance(inner, Mapping) else {})}
    kind = config.get("model_type", types[0])
    if kind not in types:
        why = f"config.json tells of '{str(kind)[:40]}'; these names are known of {' and '.join(types)}"
        raise WeightsError("a model of a kind that vitral does not know", where=source.where, why=why)
    return kind, config


def _facts(*types: str, **always: Any) -> Callable[[Source], Facts]:
    """What shapes cannot tell, from `config.json`, else as the model's class has it."""

    def facts(source: Source) -> Facts:
        kind, config = _model(source, types)
        usual, gated = _USUAL[kind], _is_gated(source)
        found: Facts = {"norm_eps": usual.norm_eps, **always}
        act = usual.activation
        if config is not None:
            found["heads"] = _whole(config, "num_attention_heads", usual.heads, source)
            found["image_size"] = _size(config, "image_size", usual.image_size, source)
            found["norm_eps"] = _positive(config, "layer_norm_eps", usual.norm_eps, source)
            act = config.get("hidden_act", act)
            _check_arithmetic(kind, config, gated, source)
        if not gated:  # the shapes tell that it is, and its inner function is silu
            if not isinstance(act, str) or act not in _ACTIVATIONS:
                raise _wrong("hidden_act", f"one of {', '.join(_ACTIVATIONS)}", act, source)
            found["activation"] = _ACTIVATIONS[act]
        return found

    return facts


def _is_gated(source: Source) -> bool:
    return any("mlp.weights_in." in name or "mlp.gate_proj." in name for name in source.tensors)


def _check_arithmetic(kind: str, config: Mapping[str, Any], gated: bool, source: Source) -> None:
    """Refuse what a configuration can ask for and our networks do not do."""
    wanted: dict[str, tuple[Any, Any]] = {}
    if kind in ("vit", "deit") and any(name.startswith("pooler.") for name in source.tensors):
        wanted["pooler_act"] = ("tanh", "tanh")
    if kind == "dinov3_vit":
        wanted["rope_theta"] = (100.0, 100.0)
        if gated:
            wanted["hidden_act"] = ("silu", "gelu")
    for field, (only, usual) in wanted.items():
        if (value := config.get(field, usual)) != only:
            raise _wrong(field, repr(only), value, source)


def _wrong(field: str, wanted: str, value: object, source: Source) -> WeightsError:
    why = f"'{field}' in config.json is {str(value)[:40]!r}; vitral's networks have {wanted}"
    return WeightsError("cannot follow the configuration that comes with the weights", where=source.where, why=why)


def _whole(config: Mapping[str, Any], field: str, usual: int, source: Source) -> int:
    value = config.get(field, usual)
    if type(value) is not int or value < 1:
        raise _wrong(field, "a positive whole number", value, source)
    return value


def _positive(config: Mapping[str, Any], field: str, usual: float, source: Source) -> float:
    value = config.get(field, usual)
    if type(value) not in (int, float) or not 0 <= value < 1:
        raise _wrong(field, "a small number", value, source)
    return float(value)


def _size(config: Mapping[str, Any], field: str, usual: int, source: Source) -> tuple[int, int]:
    value = config.get(field, usual)
    sides = value if isinstance(value, list | tuple) else [value, value]
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise _wrong(field, "a number of pixels, or two", value, source)
    return sides[0], sides[1]


def _preprocessing(*types: str) -> Callable[[Source, ViTConfig], tuple[Preprocessing, str]]:
    def of(source: Source, config: ViTConfig) -> tuple[Preprocessing, str]:
        if source.preprocessor is not None:
            return from_huggingface(source.preprocessor, config.image), "preprocessor_config.json"
        kind, _ = _model(source, types)
        return DEFAULTS[_USUAL[kind].preprocessing](config.image), f"no preprocessor_config.json: {kind}'s usual way"

    return of


def _assumed(*types: str) -> Callable[[Source], Sequence[str]]:
    def assumed(source: Source) -> Sequence[str]:
        if source.config is not None:
            return ()
        usual = _USUAL[types[0]]
        told = f"norms with epsilon {usual.norm_eps:g}, heads by the width"
        return (f"no config.json: taken as {types[0]}, {told}",)

    return assumed


def _classes(source: Source, count: int) -> tuple[str, ...] | None:
    return labels.from_config(source.config or {})


# ---------------------------------------------------------------- the formats

_ALWAYS: dict[str, Sequence[Any]] = {
    "norm": ("pre",), "attention_scale": ("head",), "logits_tanh": (False,), "stem": (None,), "qk_norm": (False,),
    "final_norm": ("tokens",), "proj_bias": (True,),
}  # fmt: skip
_LEARNED = {**_ALWAYS, "position": ("learned",), "cls_token": (True,), "cls_position": (True,)}
_PLAIN = {**_LEARNED, "pool": ("cls",), "layer_scale": (None,), "activation": ("gelu", "gelu-tanh")}
_MASK = {"*embeddings.mask_token": "stands for hidden patches in pre-training"}
_UNREAD = "the classifier reads the class token as it is"
_TEXT = {
    "text_model.*": "the text's tower", "logit_scale": "compares pictures and texts",
    "logit_bias": "compares pictures and texts",
}  # fmt: skip


def _format(name: str, rules: tuple[Rule, ...], types: tuple[str, ...], always: Facts, **more: Any) -> Format:
    return Format(
        name=name,
        rules=rules,
        preprocessing=_preprocessing(*types),
        facts=_facts(*types, **always),
        assumed=_assumed(*types),
        classes=_classes,
        **{"scheme": "bicubic", **more},
    )


_CLS: Facts = {"cls_position": True, "pool": "cls"}

VIT = _format(
    "hf-vit", VIT_RULES, ("vit", "vit_mae", "vit_msn"), _CLS,
    required=("*embeddings.position_embeddings", "*.layernorm_before.weight"),
    ignored={**_MASK, "decoder.*": "the decoder of pre-training", "vit.pooler.*": _UNREAD},
    fixed={**_PLAIN, "registers": (0,), "dist_token": (False,)},
)  # fmt: skip
DEIT = _format(
    "hf-deit", DEIT_RULES, ("deit",), _CLS,
    required=("*embeddings.distillation_token", "*.layernorm_before.weight"),
    ignored={**_MASK, "decoder.*": "the decoder of pre-training", "deit.pooler.*": _UNREAD},
    fixed={**_PLAIN, "registers": (1,), "dist_token": (False,)},
)  # fmt: skip
DEIT_DISTILLED = _format(
    "hf-deit-distilled", DEIT_DISTILLED_RULES, ("deit",), _CLS,
    required=("*embeddings.distillation_token", "distillation_classifier.weight"),
    ignored={**_MASK, "deit.pooler.*": _UNREAD},
    fixed={**_PLAIN, "registers": (0,), "dist_token": (True,)},
)  # fmt: skip
DINOV2 = _format(
    "hf-dinov2", _dinov2("dinov2."), ("dinov2",), {"cls_position": True},
    required=("*.layer_scale1.lambda1", "*embeddings.position_embeddings"), ignored=_MASK,
    fixed={**_LEARNED, "pool": ("cls", "cls-mean"), "registers": (0,), "dist_token": (False,)},
)  # fmt: skip
DINOV2_REGISTERS = _format(
    "hf-dinov2-registers", _dinov2("dinov2_with_registers.", *_REGISTERS), ("dinov2_with_registers",),
    {"cls_position": True}, scheme="bicubic-antialias", ignored=_MASK,
    required=("*.layer_scale1.lambda1", "*embeddings.register_tokens", "*embeddings.position_embeddings"),
    fixed={**_LEARNED, "pool": ("cls", "cls-mean"), "dist_token": (False,)},
)  # fmt: skip
DINOV3 = _format(
    "hf-dinov3", DINOV3_RULES, ("dinov3_vit",), {"position": "rotary", "pool": "cls"},
    required=("*.layer_scale1.lambda1", "embeddings.patch_embeddings.weight"), ignored=_MASK,
    fixed={
        **_ALWAYS, "position": ("rotary",), "pool": ("cls",), "cls_token": (True,), "dist_token": (False,),
        "proj_bias": (True, False),
    },
)  # fmt: skip
_SIGLIP_FIXED = {
    **_ALWAYS, "position": ("learned",), "cls_token": (False,), "dist_token": (False,), "registers": (0,),
    "layer_scale": (None,), "activation": ("gelu", "gelu-tanh"), "qkv_bias": (True,),
}  # fmt: skip
SIGLIP = _format(
    "hf-siglip", SIGLIP_RULES, ("siglip_vision_model",), {"pool": "map"},
    required=("*head.probe", "*embeddings.patch_embedding.weight"), ignored=_TEXT, canonical=_split_in_proj,
    fixed={**_SIGLIP_FIXED, "pool": ("map",)},
)  # fmt: skip
SIGLIP_CLASSIFIER = _format(
    "hf-siglip-classifier", SIGLIP_CLASSIFIER_RULES, ("siglip_vision_model",), {"pool": "mean"},
    required=("classifier.weight", "*embeddings.patch_embedding.weight"),
    ignored={"vision_model.head.*": "the classifier reads the mean of all tokens"},
    fixed={**_SIGLIP_FIXED, "pool": ("mean",)},
)  # fmt: skip

FORMATS = {
    one.name: one for one in (VIT, DEIT, DEIT_DISTILLED, DINOV2, DINOV2_REGISTERS, DINOV3, SIGLIP, SIGLIP_CLASSIFIER)
}
