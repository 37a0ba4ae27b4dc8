"""Write checkpoints as `torch.load` reads them, for the authors' own programs of MAE and DINO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from vitral.atomic import replacing
from vitral.errors import WeightsError
from vitral.weights.formats.format import Format, check_square, translated
from vitral.weights.native import Weights

ENCODER: Mapping[str, Sequence[Any]] = {
    "position": ("learned",),
    "cls_token": (True,),
    "cls_position": (True,),
    "norm": ("pre",),
    "norm_eps": (1e-6,),
    "final_norm": ("tokens",),
    "activation": ("gelu",),
    "attention_scale": ("head",),
    "logits_tanh": (False,),
    "pre_logits": (False,),
    "layer_scale": (None,),
    "qk_norm": (False,),
    "registers": (0,),
    "dist_token": (False,),
    "qkv_bias": (True,),
    "proj_bias": (True,),
    "stem": (None,),
    "channels": (3,),
}
"""Values that the `VisionTransformer` of both programs can compute."""


def write_checkpoint(kind: Format, weights: Weights, path: Path, key: str) -> Sequence[Path]:
    """Write `{key: tensors by name}` as a .pth file. Raises `WeightsError` as `translated`."""
    config = weights.config
    if config.classes and getattr(config, "pool", "cls") != "cls":
        why = f"its head reads the mean of normalized patches; {kind.name}'s reads the class token"
        hint = "a network trained with --pool cls, or --to timm"
        raise WeightsError(f"this network cannot be written for {kind.name}", why=why, hint=hint)
    check_square(config, kind.name)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in translated(kind, weights).items()}
    file = path if path.suffix else path / "checkpoint.pth"
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        torch.save({key: tensors}, temporary)
    return [file]
