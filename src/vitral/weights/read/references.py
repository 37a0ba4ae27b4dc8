"""References to weights: a path, a name on a hub, or the name of a built-in model."""

from __future__ import annotations

import re
from pathlib import Path

from vitral.folders import is_run
from vitral.weights.read.source import SUFFIXES

BACKBONE = "backbone"
DEMO = Path(__file__).parents[2] / "demo" / "model.safetensors"
INCLUDED = {BACKBONE: Path(__file__).parents[1] / "backbone.safetensors", "demo": DEMO}
"""Built-in models: name → file. `backbone` is where training starts (docs/pretrained-model.md), `demo` is to try."""


def is_weights(text: str) -> bool:
    """True if `text` refers to weights (an existing path, a hub reference, `demo`), not to a network's name."""
    return Path(text).exists() or ":" in text or is_included(text)


def is_included(reference: str | Path) -> bool:
    """True if `reference` names a built-in model. A run or weights of that name in the current folder take
    precedence, as a folder does over a data set of its name; `./demo` and a `Path` always mean the path.
    """
    if not isinstance(reference, str) or reference not in INCLUDED:
        return False
    path = Path(reference)
    return not (path.is_file() or (path.is_dir() and (is_run(path) or holds_weights(path))))


def holds_weights(folder: Path) -> bool:
    """True if the folder has a file with a suffix of weights."""
    return any(one.name.endswith(SUFFIXES) for one in folder.iterdir())


def name_of(reference: str) -> str:
    """The last part of a reference to a model, a name for people; empty for a network in memory."""
    part = re.split(r"[/:\\]", reference.rstrip("/\\"))[-1].partition("@")[0]
    return part.removesuffix(".safetensors")
