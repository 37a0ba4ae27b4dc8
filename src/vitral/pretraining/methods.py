"""The table of methods of pretraining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from vitral.console import command_line
from vitral.model import ViTConfig
from vitral.pretraining.dino import SelfDistillation, seen
from vitral.pretraining.distill import FeatureDistillation
from vitral.pretraining.mae import MaskedAutoencoder
from vitral.pretraining.method import Draw, Method
from vitral.pretraining.mpp import MaskedPatchPrediction
from vitral.training.options import Run


class Parts(NamedTuple):
    """The two functions that make a method of a run."""

    build: Callable[..., Method]
    """The ViT, the run, its optimizer steps and, with `taught`, the teacher → the network to train."""
    draw: Callable[[Run, ViTConfig], Draw]
    views: Callable[[Run, ViTConfig], float] = lambda run, config: 1.0
    """Activations of a training step, in images that the network sees as a whole."""
    taught: bool = False
    """True if another network teaches: `Run.teacher`."""


METHODS: Mapping[str, Parts] = {
    "mae": Parts(MaskedAutoencoder.of, MaskedAutoencoder.draw),
    "mpp": Parts(MaskedPatchPrediction.of, MaskedPatchPrediction.draw),
    "dino": Parts(SelfDistillation.of, SelfDistillation.draw, seen),
    "distill": Parts(FeatureDistillation.of, FeatureDistillation.draw, taught=True),
}
"""Methods by the names of their recipes."""


def needs_teacher(recipe: str | None) -> bool:
    """True for a recipe of pretraining that learns from another network."""
    return recipe is not None and recipe in METHODS and METHODS[recipe].taught


def command_of(recipe: str | None) -> str:
    """Name of the command that runs a recipe."""
    return "pretrain" if recipe in METHODS else "train"


def command(given: Mapping[str, Any]) -> str:
    """Return the command line for these options of a run."""
    data = [given["data"]] if "data" in given else []
    options = {name: value for name, value in given.items() if name != "data"}
    if (name := command_of(given.get("recipe"))) == "pretrain":
        options = {"method": options.pop("recipe"), **options}
    return command_line(name, data, options)
