"""Published architectures by name and by signature, for the fields that tensors do not determine.

`timm.json` lists every ViT-like name of timm with the fields that only its code determines (heads, activation, epsilon,
rotary positions, location of norms and positions) or the reason why vitral's networks cannot compute it. It is written
by `tools/architectures.py` from timm, by `timm_module.fields`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from vitral.errors import WeightsError, nearest
from vitral.weights.transform.keymap import ConfigFields


@dataclass(frozen=True)
class Architecture:
    """An architecture of timm."""

    name: str
    network: str
    """Its class in timm."""
    signature: str
    """`signature` of its tensors."""
    fields: ConfigFields
    """Fields of `ViTConfig` that tensors do not determine; empty if `refused`."""
    refused: str
    """Reason why vitral's networks cannot compute it; empty if they can."""
    preprocessing: Mapping[str, Any]
    """The part of its default `pretrained_cfg` on preprocessing."""
    scheme: str = ""
    """Scheme that resizes its positions; empty for that of the format of its tensors."""

    @property
    def plain(self) -> bool:
        """True for the paper's ViT, DeiT and DeiT-III at a published size, the networks of most files."""
        return not self.refused and _PLAIN.fullmatch(self.name) is not None


_PLAIN = re.compile(
    r"(vit|deit|deit3)_(tiny|small|medium|base|large|huge|giant|gigantic)(_distilled)?_(patch\d+|r\d*_s\d+(_p\d+)?)_\d+"
)


@cache
def architectures() -> Mapping[str, Architecture]:
    """Load name → architecture of all ViT-like networks of timm."""
    listed = json.loads(files("vitral.weights.architectures").joinpath("timm.json").read_text("utf-8"))
    return {
        name: Architecture(name=name, **{"fields": {}, "refused": "", **one})
        for name, one in listed["architectures"].items()
    }


def named(name: str, where: object) -> Architecture:
    """Find the architecture named by a config or `--like`, with or without `timm:` and a tag; `WeightsError` for one
    that is unknown or that vitral's networks cannot compute.
    """
    plain = name.removeprefix("timm:").partition(".")[0]
    found = architectures().get(plain)
    if found is None:
        near = nearest(plain, architectures())
        why = f"nearest: {', '.join(near)}" if near else "it is none of timm's ViT-like networks"
        raise WeightsError(f"unknown architecture '{plain[:60]}'", where=where, why=why)
    if found.refused:
        raise WeightsError(f"vitral's networks cannot compute '{plain}'", where=where, why=found.refused)
    return found


def with_signature(shapes: Mapping[str, Iterable[int]]) -> list[Architecture]:
    """Find the architectures whose tensors have these names and widths, including refused ones."""
    wanted = signature(shapes)
    return [one for one in architectures().values() if one.signature == wanted]


def signature(shapes: Mapping[str, Iterable[int]]) -> str:
    """Hash the names and widths of tensors in timm's spelling. Depth, classes, image and patch size do not matter, nor
    does a missing head.
    """
    lines = set()
    for name, shape in shapes.items():
        if name.startswith("head"):
            continue
        kept = tuple(shape)
        for pattern, keep in _WIDTHS:
            if pattern.fullmatch(name):
                kept = tuple(kept[i] for i in keep if -len(kept) <= i < len(kept))
        lines.add(f"{_BLOCK.sub('blocks.*.', name)} {kept}")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]


_BLOCK = re.compile(r"^blocks\.\d+\.")
_WIDTHS = [
    (re.compile(r"(embeds\.)?pos_embed"), (-1,)),
    (re.compile(r"(patch_embed|embeds)\.proj\.weight"), (0,)),
    (re.compile(r"patch_embed\.backbone\.(stem\.)?conv\.weight"), (0,)),
    (re.compile(r"rope\.freqs"), (0, 2, 3)),
    (re.compile(r".*relative_position_bias_table"), (-1,)),
]
"""Tensors whose shape also depends on depth or image size, and the axes that are widths."""
