"""Read a configuration from a network of timm in memory, without importing timm.

timm's tensors do not determine the number of heads, the GELU, epsilon, rotary positions or location of the norms; the
module does. The world is closed: a class, option or value unknown here is refused, because its arithmetic may differ.
`timm/models/{vision_transformer,deit,eva,beit,naflexvit}.py` are the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from vitral.errors import WeightsError, type_of
from vitral.model.position import RotaryPosition
from vitral.weights.transform.keymap import ConfigFields


class UnreadableError(Exception):
    """A part of a network has no counterpart in vitral; the message names it."""


def fields(module: nn.Module) -> ConfigFields:
    """Read the fields of `ViTConfig` that tensors do not determine: heads, activation, epsilon, positions, pooling,
    image size.

    Raises `UnreadableError` with the reason for a network that vitral cannot compute.
    """
    kind = name_of(module)
    if kind not in _NETWORKS:
        raise UnreadableError(f"{kind.rpartition('.')[2]} has parts that vitral's networks do not have")
    network: Any = module
    for name, part in network.named_modules():
        if name_of(part) not in _KNOWN and not name.startswith("patch_embed.backbone"):
            raise UnreadableError(f"'{name}' is {type_of(part)}")
    return {
        **_embedding(network, kind),
        **_agreeing(_block(block) for block in network.blocks),
        **_rotary(network),
        **_pooling(network),
        "norm_eps": _epsilon(network),
    }


def refused(module: nn.Module, where: object) -> WeightsError | None:
    """Return the error for a network that cannot be read; None for one that can."""
    try:
        fields(module)
    except UnreadableError as reason:
        return WeightsError("vitral cannot compute this network", where=where, why=str(reason))
    return None


def name_of(part: nn.Module) -> str:
    """Module path and name of the part's exact class: a subclass is another class."""
    return f"{type(part).__module__}.{type(part).__qualname__}"


_VIT, _EVA, _NAFLEX = "timm.models.vision_transformer", "timm.models.eva", "timm.models.naflexvit"
_NETWORKS = {
    f"{_VIT}.VisionTransformer",
    "timm.models.deit.VisionTransformerDistilled",
    f"{_EVA}.Eva",
    f"{_NAFLEX}.NaFlexVit",
    "timm.models.beit.Beit",
}
_ACTIVATIONS: Mapping[str, Callable[[Any], str | None]] = {
    "torch.nn.modules.activation.GELU": lambda act: "gelu" if act.approximate == "none" else "gelu-tanh",
    "timm.layers.activations.GELU": lambda act: "gelu",
    "timm.layers.activations.GELUTanh": lambda act: "gelu-tanh",
    "timm.layers.activations.QuickGELU": lambda act: "quick-gelu",
    "torch.nn.modules.activation.ReLU": lambda act: "relu",
    "torch.nn.modules.activation.SiLU": lambda act: "silu",
}
_NORMS = ("timm.layers.norm.LayerNorm", "timm.layers.norm.LayerNormFp32", "torch.nn.modules.normalization.LayerNorm")
_BLOCKS = {
    f"{_VIT}.Block": "pre",
    f"{_EVA}.EvaBlock": "pre",
    "timm.models.beit.Block": "pre",
    f"{_VIT}.ResPostBlock": "res-post",
    f"{_EVA}.EvaBlockPostNorm": "res-post",
}
_ROPES = ("RotaryEmbeddingCat", "RotaryEmbeddingMixed", "RotaryEmbeddingDinoV3")
_KNOWN = {
    *_NETWORKS,
    *_ACTIVATIONS,
    *_NORMS,
    *_BLOCKS,
    *(f"timm.layers.pos_embed_sincos.{one}" for one in _ROPES),
    "timm.layers.patch_embed.PatchEmbed",
    "timm.layers.hybrid_embed.HybridEmbed",
    f"{_NAFLEX}.NaFlexEmbeds",
    f"{_VIT}.Attention",
    "timm.layers.attention.Attention",
    "timm.layers.attention.AttentionRope",
    f"{_EVA}.EvaAttention",
    "timm.models.beit.Attention",
    "timm.layers.mlp.Mlp",
    "timm.layers.mlp.GluMlp",
    "timm.layers.mlp.SwiGLU",
    "timm.layers.layer_scale.LayerScale",
    "timm.layers.drop.DropPath",
    "timm.layers.attention_pool.AttentionPoolLatent",
    "timm.layers.patch_dropout.PatchDropout",
    "timm.layers.patch_dropout.PatchDropoutWithIndices",
    "torch.nn.modules.container.Sequential",
    "torch.nn.modules.container.ModuleList",
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.linear.Identity",
    "torch.nn.modules.dropout.Dropout",
    "torch.nn.modules.conv.Conv2d",
}
_BACKBONE = {
    "ResNetV2",
    "ResNetStage",
    "Bottleneck",
    "DownsampleConv",
    "StdConv2dSame",
    "GroupNormAct",
    "MaxPool2dSame",
    "Sequential",
    "Identity",
    "ReLU",
    "ClassifierHead",
    "SelectAdaptivePool2d",
    "Flatten",
    "Dropout",
    "DropPath",
}


def _agreeing(blocks: Iterator[ConfigFields]) -> ConfigFields:
    """Return the fields shared by all blocks; `UnreadableError` if they differ."""
    first, *others = list(blocks) or [{}]
    if any(one != first for one in others):
        raise UnreadableError("its blocks differ")
    return first


def _block(block: Any) -> ConfigFields:
    kind = name_of(block)
    if kind not in _BLOCKS:
        raise UnreadableError(f"its blocks have the class {type(block).__name__}")
    if getattr(block, "gamma_1", None) is not None and block.gamma_2 is None:
        raise UnreadableError("only its attention has LayerScale")
    return {"norm": _BLOCKS[kind], **_attention(block.attn), "activation": _activation(block.mlp)}


def _attention(attention: Any) -> ConfigFields:
    heads, width = attention.num_heads, attention.proj.out_features
    if attention.proj.in_features != width or width % heads or abs(attention.scale - (width // heads) ** -0.5) > 1e-9:
        raise UnreadableError("its head width is not the network's width divided by the number of heads")
    if getattr(attention, "gate", None) is not None:
        raise UnreadableError("its attention has a gate")
    if getattr(attention, "num_kv_heads", heads) != heads:
        raise UnreadableError("several queries share a key (grouped-query attention)")
    if getattr(attention, "relative_position_bias_table", None) is not None:
        raise UnreadableError("its attention has a relative position bias")
    return {"heads": heads}


def _activation(mlp: Any) -> str:
    kind = name_of(mlp.act)
    if kind not in _ACTIVATIONS:
        raise UnreadableError(f"the activation of its MLP is {type(mlp.act).__name__}")
    act = _ACTIVATIONS[kind](mlp.act)
    if type(mlp).__name__ == "Mlp":
        return str(act)
    if act != "silu" or getattr(mlp, "gate_last", False) or getattr(mlp, "limit", None):
        raise UnreadableError("its gated MLP is not SwiGLU with the gate first")
    return "swiglu"


def _embedding(network: Any, kind: str) -> ConfigFields:
    embed = network.embeds if kind.endswith("NaFlexVit") else network.patch_embed
    if getattr(embed, "norm", None) is not None and not isinstance(embed.norm, nn.Identity):
        raise UnreadableError("its patches are followed by a norm")
    if kind.endswith("NaFlexVit"):
        return _naflex_embedding(embed)
    found: ConfigFields = {"image_size": tuple(embed.img_size) if embed.img_size else None}
    if type(embed).__name__ == "HybridEmbed":
        found |= _backbone(embed.backbone)
    if getattr(network, "pos_embed", None) is None:
        return found
    together = not getattr(network, "no_embed_class", False)
    return found | {"cls_position": together, "register_position": together}  # if there are registers


def _naflex_embedding(embed: Any) -> ConfigFields:
    if embed.pos_embed_type == "factorized":
        raise UnreadableError("its positions are factorized into rows and columns")
    if not embed.channels_last or embed.norm_input is not None:
        raise UnreadableError("its patches are laid out or normalized differently")
    if embed.pos_embed_interp_mode not in _MODES or embed.pos_embed_ar_preserving or not embed.pos_embed_antialias:
        raise UnreadableError("its positions are resized differently")
    found: ConfigFields = {"cls_position": False}
    if embed.pos_embed is not None:
        found["image_size"] = tuple(n * p for n, p in zip(embed.pos_embed.shape[1:3], embed.patch_size, strict=True))
    return found


_MODES = ("bicubic", "bilinear")


def scheme(module: nn.Module) -> str:
    """Return the scheme that resizes the positions of a network that `fields` reads (`transform.resize.SCHEMES`)."""
    embed: Any = getattr(module, "embeds", None)
    return (
        f"{embed.pos_embed_interp_mode}-antialias" if name_of(module) == f"{_NAFLEX}.NaFlexVit" else "bicubic-antialias"
    )


def _backbone(backbone: nn.Module) -> ConfigFields:
    for part in backbone.modules():
        if type(part).__name__ not in _BACKBONE:
            raise UnreadableError(f"its backbone has {type_of(part)}")
        if type(part).__name__ == "StdConv2dSame" and part.eps != 1e-8:
            raise UnreadableError("its convolutions are standardized with another epsilon")
    return {"stem_numerics": "timm"}


def _epsilon(network: nn.Module) -> float:
    found = {part.eps for name, part in network.named_modules() if isinstance(part, nn.LayerNorm)}
    if len(found) != 1:
        raise UnreadableError(f"its norms have epsilons {', '.join(f'{one:g}' for one in sorted(found))}")
    return float(found.pop())


def _rotary(network: Any) -> ConfigFields:
    """Read the fields of rotary positions; those of DINOv3 set `position`."""
    rope = getattr(network, "rope", None)
    if rope is None:
        return {}
    halves = {bool(getattr(block.attn, "rotate_half", False)) for block in network.blocks}
    half = bool(getattr(rope, "rotate_half", False))
    if halves != {half}:
        raise UnreadableError("its attention and its rotary positions pair channels differently")
    columns_first, kind = rope.grid_indexing == "xy", type(rope).__name__
    if kind == "RotaryEmbeddingDinoV3":
        usual = (rope.temperature, rope.min_period, rope.max_period, rope.grid_offset, rope.normalize_coords)
        if usual != (RotaryPosition.base, None, None, 0.0, "separate") or columns_first or not half:
            raise UnreadableError("its rotary positions are DINOv3's with other parameters")
        return {"position": "rotary"}
    if kind == "RotaryEmbeddingMixed":
        return {"rope": {"kind": "mixed", "columns_first": columns_first}}
    if rope.in_pixels or rope.grid_type != "index":
        raise UnreadableError("its rotary positions are counted in pixels")
    reference = rope.ref_feat_shape
    return {
        "rope": {
            "base": float(rope.temperature),
            "offset": float(rope.grid_offset),
            "reference": None if reference is None else list(reference),
            "columns_first": columns_first,
            "adjacent": not half,
        }
    }


_POOLS = {"token": "cls", "avg": "mean", "map": "map"}


def _pooling(network: Any) -> ConfigFields:
    name = network.global_pool
    if name not in _POOLS:
        raise UnreadableError(f"its tokens are pooled by '{name}'")
    prefix = bool(getattr(network, "pool_include_prefix", False))
    if name == "map":
        prefix = prefix or name_of(network) == f"{_EVA}.Eva"  # its pooling reads all tokens
        return {"pool": "map", "pool_prefix": prefix, **_attention_pooling(network.attn_pool, network)}
    return {"pool": "mean-all" if name == "avg" and prefix else _POOLS[name]}


def _attention_pooling(pool: Any, network: Any) -> ConfigFields:
    if pool.pos_embed is not None or pool.latent_len != 1 or pool.pool != "token" or pool.mlp is None:
        raise UnreadableError("its attention pooling has other parts")
    if (
        not isinstance(pool.q_norm, nn.Identity)
        or not isinstance(pool.q, nn.Linear)
        or isinstance(pool.norm, nn.Identity)
    ):
        raise UnreadableError("its attention pooling has other parts")
    block = network.blocks[0]
    if _activation(pool.mlp) != _activation(block.mlp) or pool.mlp.fc1.out_features != block.mlp.fc2.in_features:
        raise UnreadableError("the MLP of its attention pooling differs from the MLPs of its blocks")
    return {} if pool.num_heads == block.attn.num_heads else {"pool_heads": pool.num_heads}
