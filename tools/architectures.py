"""Write src/vitral/weights/architectures/timm.json from the installed timm: python tools/architectures.py

Every ViT-like name is built at depth 2 without values and read by `vitral.weights.architectures.timm_module`.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from vitral.weights.architectures import signature
from vitral.weights.architectures.timm_module import UnreadableError, fields, scheme
from vitral.weights.formats.timm import TIMM

TARGET = Path(__file__).parents[1] / "src/vitral/weights/architectures/timm.json"
MODULES = (
    "beit",
    "deepseek_vit",
    "deit",
    "eva",
    "gemma4_vit",
    "naflexvit",
    "qwen3_vit",
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_relpos",
    "vision_transformer_sam",
)
"""The files of timm whose networks are like a ViT."""


def names() -> list[str]:
    """Every ViT-like name of the installed timm."""
    return [name for name in timm.list_models() if _file(name) in MODULES]


def _file(name: str) -> str:
    return str(timm.models.model_entrypoint(name).__module__).rpartition(".")[2]


def described(name: str) -> dict[str, Any]:
    """The entry of one name."""
    with torch.device("meta"), warnings.catch_warnings(action="ignore"):
        try:
            module = timm.create_model(name, depth=2)
        except (TypeError, AssertionError):  # it takes no depth, or options for each block
            module = timm.create_model(name)
    shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    found: dict[str, Any] = {
        "network": type(module).__name__,
        "signature": signature(shapes),
        "preprocessing": _preprocessing(module),
    }
    try:
        found["fields"] = {key: value for key, value in fields(module).items() if key != "image_size"}
    except UnreadableError as reason:
        found["refused"] = str(reason)
    if "fields" in found and scheme(module) != TIMM.scheme:
        found["scheme"] = scheme(module)
    return found


def _preprocessing(module: nn.Module) -> dict[str, Any]:
    wanted = ("input_size", "interpolation", "mean", "std", "crop_pct", "crop_mode")
    cfg: Any = module.pretrained_cfg
    return {key: list(cfg[key]) if isinstance(cfg[key], tuple) else cfg[key] for key in wanted if cfg.get(key)}


def listed() -> dict[str, Any]:
    """The whole file."""
    return {"timm": timm.__version__, "architectures": {name: described(name) for name in names()}}


if __name__ == "__main__":
    found = listed()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in found["architectures"].items())
    TARGET.write_text(f'{{"timm": {json.dumps(found["timm"])}, "architectures": {{\n{lines}\n}}}}\n', "utf-8")
    print(
        f"{len(found['architectures'])} names, {sum('fields' in one for one in found['architectures'].values())} read"
    )
