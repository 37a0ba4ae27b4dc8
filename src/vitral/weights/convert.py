"""Our weights out again: into the files that another library opens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitral.data.transforms import Preprocessing
from vitral.errors import UsageError, WeightsError, unknown
from vitral.model import BiTConfig, ViTConfig
from vitral.model.position import POSITIONS
from vitral.weights import native
from vitral.weights.account import Account
from vitral.weights.formats import FORMATS, huggingface_writing
from vitral.weights.load import read
from vitral.weights.native import Weights
from vitral.weights.preprocessing import (
    DEFAULTS,
    differences,
    from_huggingface,
    from_timm,
    to_huggingface,
    to_timm,
)

_BIT = "-bit"  # a program's files of ResNets are a format of their own: jax-bit beside jax
_WRITERS = {
    **{name: one.write for name, one in FORMATS.items() if one.write is not None},
    "hf": huggingface_writing.write,  # chooses among Hugging Face's formats
}
TARGETS = ("native", *(name for name in _WRITERS if not name.endswith(_BIT)))
"""What can be written."""


def convert(source: str | Path, target: str | Path, to: str, **options: Any) -> Account:
    """Read `source`, whatever its format, and write it at `target` for the program that `to` names.

    `to` is `native`, `timm`, `hf`, `torchvision` or `jax`; `options` are those of `vitral.weights.load.read`. Gives the
    account of every tensor that was read, with the files that were written.
    """
    loaded = read(source, **options)
    loaded.account.written = [str(path) for path in write(loaded.weights, target, to)]
    loaded.account.notes += lost(loaded.weights, to)
    return loaded.account


def lost(weights: Weights, to: str) -> list[str]:
    """What a file for that program does not tell of how pictures are prepared: the commonest way to lose accuracy."""
    own = weights.preprocessing
    if to not in _TOLD:
        return []
    carried = to in _CARRIES
    found = differences(own, _TOLD[to](own)) if own.channels == 3 or carried else ["channels"]
    if not found:
        return []
    how = (
        "its files cannot say" if carried else "its files do not say how pictures are prepared, and its own way differs"
    )
    return [f"WARNING for {to}: {how}: {'; '.join(found)}"]


_CARRIES = ("timm", "hf")
_TOLD: Mapping[str, Callable[[Preprocessing], Preprocessing]] = {
    "timm": lambda own: from_timm(to_timm(own)),
    "hf": lambda own: from_huggingface(to_huggingface(own)),
    "torchvision": lambda own: DEFAULTS["torchvision"](own.image_size),
    "jax": lambda own: DEFAULTS["jax"](own.image_size),
}
"""How a program will prepare pictures for what was written: by what the file tells, else in its usual way."""


def write(weights: Weights, target: str | Path, to: str) -> Sequence[Path]:
    """Write `weights` for the program that `to` names; gives the files.

    Raises `UsageError` for an unknown format, `WeightsError` with the reason where that program has no such network.
    """
    if to not in TARGETS:
        raise unknown("format to write", to, TARGETS)
    path = Path(target)
    if path.exists() and (path.is_file() or any(path.iterdir())):
        raise UsageError("the target exists already", where=path, hint="another target, or remove it")
    if to == "native":
        path = path if path.suffix else path / "model.safetensors"
        native.save(path, weights)
        return [path]
    writer = _WRITERS.get(to + _BIT if isinstance(weights.config, BiTConfig) else to)
    if writer is None:
        raise WeightsError(f"a BiT cannot be written for {to}", why="vitral knows no such file")
    if getattr(weights.config, "conv_stem", None) is not None:
        why = "it has convolutions before its tokens, and no network there has them so"
        hint = "a network of patches alone: vitral train … --model Ti/16"
        raise WeightsError(f"this network cannot be written for {to}", why=why, hint=hint)
    return writer(materialised(weights), path)


def materialised(weights: Weights) -> Weights:
    """The same network with computed positions as a learned table: other programs compute them differently or not."""
    config = weights.config
    if not isinstance(config, ViTConfig) or config.position != "sincos":
        return weights
    table = POSITIONS["sincos"].table(config.grid, config.dim)
    if table is None:
        return weights
    prefix = torch.zeros(int(config.cls_token) + int(config.dist_token), config.dim)
    learned = dataclasses.replace(config, position="learned", cls_position=True)
    return dataclasses.replace(
        weights, config=learned, state={**weights.state, "pos_embed": torch.cat([prefix, table])[None]}
    )
