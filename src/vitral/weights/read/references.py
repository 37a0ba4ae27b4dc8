"""References to weights: a path, a name on a hub, or `demo`, the network in the package."""

from __future__ import annotations

import re
from pathlib import Path

from vitral.folders import is_run
from vitral.weights.read.source import SUFFIXES

DEMO = Path(__file__).parents[2] / "demo" / "model.safetensors"
"""The file of `demo`."""


def is_weights(text: str) -> bool:
    """True if `text` refers to weights (an existing path, a hub reference, `demo`), not to a network's name."""
    return Path(text).exists() or ":" in text or is_demo(text)


def is_demo(reference: str | Path) -> bool:
    """True if `reference` is the network in the package. A run or weights named `demo` in the current folder take
    precedence, as a folder does over a data set of its name; `./demo` and a `Path` always mean the path.
    """
    path = Path("demo")
    own = path.is_file() or (path.is_dir() and (is_run(path) or holds_weights(path)))
    return reference == "demo" and not own


def holds_weights(folder: Path) -> bool:
    """True if the folder has a file with a suffix of weights."""
    return any(one.name.endswith(SUFFIXES) for one in folder.iterdir())


def name_of(reference: str) -> str:
    """The last part of a reference to a model, a name for people; empty for a network in memory."""
    part = re.split(r"[/:\\]", reference.rstrip("/\\"))[-1].partition("@")[0]
    return part.removesuffix(".safetensors")
