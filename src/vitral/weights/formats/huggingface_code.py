"""A network that transformers lacks, for transformers: with a modeling file of its own, plain PyTorch that holds the
parts of this network alone (`modeling_*.py.jinja`), which `trust_remote_code=True` runs.

BiT is such a network: transformers' Bit has timm's epsilons and padding alone, with which BiT of the authors and of
big_vision answered up to 1% apart at random weights.

The weights are vitral's own file, which names tensors as the modeling file does: both programs read it. transformers
saves them without vitral's header, so that `config.json` has it, too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vitral.atomic import write_text
from vitral.errors import WeightsError
from vitral.model import BiTConfig, ViTConfig
from vitral.model.registry import config_to_json
from vitral.model.resnet import BIT_NUMERICS, HYBRID_NUMERICS, ROOT, stem_width
from vitral.weights import class_names, native
from vitral.weights.native import Weights
from vitral.weights.preprocessing_configs import to_huggingface

MODELING = "modeling_vitral.py"
_HEADER = "vitral"
"""Field of config.json with network and preprocessing."""
_MODULE, _CLASS = MODELING.removesuffix(".py"), "VitralForImageClassification"


def write(weights: Weights, path: Path, why: str) -> Sequence[Path]:
    """Write code, configuration and weights into a folder. Raises `WeightsError` with `why`, transformers' own reason,
    for a network without classes: the code is that of a classifier.
    """
    config, preprocessing = weights.config, weights.preprocessing
    if not isinstance(config, ViTConfig | BiTConfig) or not config.classes:
        why += "; a modeling file is for networks with classes, and this one has none"
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
        _HEADER: {"model": config_to_json(config), "preprocessing": weights.preprocessing.to_json()},
    }
    write_text(path / MODELING, code(config))
    for name, data in {"config.json": fields, "preprocessor_config.json": to_huggingface(preprocessing)}.items():
        write_text(path / name, json.dumps(data, indent=2, ensure_ascii=False) + "\n")
    native.save(path / "model.safetensors", weights, {"format": "pt"})
    return [path / name for name in ("config.json", "model.safetensors", MODELING, "preprocessor_config.json")]


def header(config: Mapping[str, object] | None) -> Mapping[str, Any] | None:
    """Return the header of weights that transformers saved again, with their classes as they are now, from its
    `config.json`; None for other networks.
    """
    own = (config or {}).get(_HEADER)
    if config is None or config.get("model_type") != "vitral" or not isinstance(own, Mapping):
        return None
    names = class_names.from_config(config) or ()
    model = own.get("model")
    model = {**model, "classes": len(names)} if isinstance(model, Mapping) else model
    return {"format": native.FORMAT, "preprocessing": own.get("preprocessing"), "model": model, "classes": names}


def code(config: ViTConfig | BiTConfig) -> str:
    """Return the modeling file of a network."""
    from jinja2 import Environment, PackageLoader

    if isinstance(config, BiTConfig):
        name, numerics = "modeling_bit.py.jinja", BIT_NUMERICS[config.numerics]
    else:
        name, numerics = "modeling_vit.py.jinja", HYBRID_NUMERICS[config.stem_numerics]
    environment = Environment(loader=PackageLoader(__package__, ""), keep_trailing_newline=True)
    made = environment.get_template(name).render(c=config, numerics=numerics, root=ROOT, stem_width=stem_width)
    return re.sub(r"\n{4,}", "\n\n\n", made)
