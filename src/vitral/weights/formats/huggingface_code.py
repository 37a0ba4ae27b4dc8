"""A network that transformers lacks, for transformers: with a modeling file of its own, plain PyTorch that holds the
parts of this network alone (`modeling_vitral.py.jinja`), which `trust_remote_code=True` runs.

The weights are vitral's own file, which names tensors as the modeling file does: both programs read it.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from vitral.atomic import write_text
from vitral.errors import WeightsError
from vitral.model import ViTConfig
from vitral.weights import native
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import to_huggingface

MODELING = "modeling_vitral.py"
_MODULE, _CLASS = MODELING.removesuffix(".py"), "VitralForImageClassification"


def write(weights: Weights, path: Path, why: str) -> Sequence[Path]:
    """Write code, configuration and weights into a folder. Raises `WeightsError` with `why`, transformers' own reason,
    for a network that the code cannot compute either.
    """
    config, preprocessing = weights.config, weights.preprocessing
    if not isinstance(config, ViTConfig) or config.stem is not None or not config.classes:
        raise WeightsError("transformers has no such network", why=why)
    if config.channels == 1:  # pipelines supply color images, of which the code computes the gray
        mean, std = preprocessing.mean * 3, preprocessing.std * 3
        preprocessing = dataclasses.replace(preprocessing, channels=3, mean=mean, std=std)
    fields = {
        "architectures": [_CLASS],
        "model_type": "vitral",
        "auto_map": {"AutoConfig": f"{_MODULE}.VitralConfig", "AutoModelForImageClassification": f"{_MODULE}.{_CLASS}"},
        "id2label": {str(number): label for number, label in enumerate(weights.classes)},
        "label2id": {label: number for number, label in enumerate(weights.classes)},
        "image_size": list(config.image),
        "num_channels": 3,
    }
    write_text(path / MODELING, code(config))
    for name, data in {"config.json": fields, "preprocessor_config.json": to_huggingface(preprocessing)}.items():
        write_text(path / name, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    native.save(path / "model.safetensors", weights, {"format": "pt"})
    return [path / name for name in ("config.json", "model.safetensors", MODELING, "preprocessor_config.json")]


def code(config: ViTConfig) -> str:
    """Return the modeling file of a network."""
    from jinja2 import Environment

    text = resources.files(__package__).joinpath(f"{MODELING}.jinja").read_text("utf-8")
    present = {
        "self.cls_token": config.cls_token, "self.dist_token": config.dist_token,
        "self.reg_token": config.register_position,
    }  # fmt: skip
    made: str = Environment(keep_trailing_newline=True).from_string(text).render(
        c=config, prefix=", ".join(name for name, there in present.items() if there),
        rotary=config.rope is not None or config.position == "rotary",
        mixed=config.rope is not None and config.rope.kind == "mixed",
    )  # fmt: skip
    return re.sub(r"\n{4,}", "\n\n\n", made)
