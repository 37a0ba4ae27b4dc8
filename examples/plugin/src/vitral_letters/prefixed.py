"""A format of weights: tensors have vitral's own names behind `letters.`."""

from __future__ import annotations

from typing import Any

from vitral.data.images.preprocessing import Preprocessing
from vitral.weights.formats.format import Format
from vitral.weights.read.source import Source
from vitral.weights.transform.keymap import same

NAMES = [
    "cls_token",
    "pos_embed",
    "patch_embed.proj.*",
    "norm.*",
    "head.*",
    *(f"blocks.{{i}}.{name}.*" for name in ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")),
]
"""Parameters of a plain ViT; `{i}` is a number, `.*` stands for weight and bias."""


def preprocessing(source: Source, config: Any) -> tuple[Preprocessing, str]:
    """Images as the network expects them, and the origin of that knowledge."""
    gray = (0.5,) * config.channels
    return Preprocessing(config.image, channels=config.channels, mean=gray, std=gray), "as all networks of letters"


LETTERS = Format(
    "letters",
    same({name: f"letters.{name}" for name in NAMES}),
    required=("letters.cls_token",),
    scheme="bicubic",
    preprocessing=preprocessing,
    heads={(16, 32): 2},
)
