"""What people call weights: a path, a name on a hub, or `demo`, the network that comes with the package."""

from __future__ import annotations

import json
from pathlib import Path

from vitral.weights.source import SUFFIXES

DEMO = Path(__file__).parents[1] / "demo" / "model.safetensors"
"""What `demo` stands for."""


def is_weights(text: str) -> bool:
    """Whether this stands for weights (a path that exists, a hub's reference, `demo`), not for a network's name."""
    return Path(text).exists() or ":" in text or is_demo(text)


def is_demo(reference: str | Path) -> bool:
    """Whether this is the network in the package. A run or weights in the current folder that are called `demo` come
    first, as a folder does before a data set of its name; `./demo` and a `Path` are always what lies there.
    """
    path = Path("demo")
    own = path.is_file() or (path.is_dir() and (is_run(path) or holds_weights(path)))
    return reference == "demo" and not own


def holds_weights(folder: Path) -> bool:
    """Whether there is a file in it that may be of weights."""
    return any(one.name.endswith(SUFFIXES) for one in folder.iterdir())


def is_run(folder: Path) -> bool:
    """Whether vitral trained here: hubs' folders have a config.json too, but of another kind."""
    try:
        return "run" in json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        return (folder / "metrics.jsonl").is_file()  # a run whose config.json is damaged
