"""References to weights: a path, a name on a hub, or the name of a built-in model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vitral.folders import is_run
from vitral.weights.read.source import SUFFIXES


@dataclass(frozen=True)
class BuiltIn:
    """A network whose weights are in the package."""

    file: Path
    about: str
    """Its training, for the plan of a run that starts from it."""
    recipe: str | None = None
    """The recipe that fine-tunes it, and states its network. None: a run starts from it only if that is requested."""
    gray_from: int = 0
    """Longer side in pixels from which gray photographs start from it, too. Smaller ones start from random weights."""
    most_plain: float = 1.0
    """Gray images start from it up to this fraction of pixels of one gray (`DatasetStats.plain`)."""
    most_on_gpu: int | None = None
    """Training images from which a GPU trains a larger network from random weights instead. None: never."""
    feature_sizes: tuple[int, ...] = ()
    """Sides in pixels at which features of large photographs are computed, the best first."""


BACKBONE = "backbone"
DEMO = Path(__file__).parents[2] / "demo" / "model.safetensors"
BUILT_IN: dict[str, BuiltIn] = {
    BACKBONE: BuiltIn(
        Path(__file__).parents[1] / "backbone.safetensors",
        "pretrained on 100,000 photographs",
        recipe="backbone",
        gray_from=64,  # below, as for digits, it gained nothing or little (docs/log/start.md)
        most_plain=0.5,  # above are drawings and writing, which random weights learn better
        most_on_gpu=20_000,
        feature_sizes=(224, 128),  # both together rank wrong labels better than one
    ),
    "demo": BuiltIn(DEMO, "trained on CIFAR-10, to try commands"),
}
"""Built-in models by name. A run starts from the first whose recipe suits its images (docs/pretrained-model.md)."""


def built_in(reference: str | Path) -> BuiltIn | None:
    """Return the built-in model that `reference` names, if it does (`is_included`)."""
    return BUILT_IN[str(reference)] if is_included(reference) else None


def starting_recipes() -> tuple[str, ...]:
    """Names of the recipes that fine-tune built-in models."""
    return tuple(one.recipe for one in BUILT_IN.values() if one.recipe)


def is_weights(text: str) -> bool:
    """True if `text` refers to weights (an existing path, a hub reference, `demo`), not to a network's name."""
    return Path(text).exists() or ":" in text or is_included(text)


def is_included(reference: str | Path) -> bool:
    """True if `reference` names a built-in model. A run or weights of that name in the current folder take
    precedence, as a folder does over a data set of its name; `./demo` and a `Path` always mean the path.
    """
    if not isinstance(reference, str) or reference not in BUILT_IN:
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
