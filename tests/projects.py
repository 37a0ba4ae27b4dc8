"""Project files as the page of `vitral label --export` writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from vitral.weights.project import built_in_weights, hash_of


def parts(images: int = 6, width: int = 128, classes: tuple[str, ...] = ("day", "night")) -> tuple[Any, Any]:
    """Header and tensors of a project with a random head."""
    rng = np.random.default_rng(0)
    header = {
        "format": 1,
        "vitral": "0.0.1",
        "model": "backbone",
        "weights": hash_of(built_in_weights("backbone")),
        "classes": list(classes),
        "temperature": 1.5,
        "names": [f"{number}.png" for number in range(images)],
    }
    tensors = {
        "head.weight": rng.normal(size=(len(classes), width)).astype(np.float32),
        "head.bias": rng.normal(size=len(classes)).astype(np.float32),
        "features": rng.normal(size=(images, width)).astype(np.float32),
        "labels": (np.arange(images) % len(classes)).astype(np.int32),
        "groups": np.arange(images, dtype=np.int32),
    }
    return header, tensors


def write(path: Path, header: Any, tensors: Any) -> Path:
    """Write a project file."""
    text = header if isinstance(header, str) else json.dumps(header)
    save_file(tensors, path, metadata={"vitral_project": text})
    return path
