"""The table of methods of pretraining."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from vitral.model import ViT, ViTConfig
from vitral.pretraining.dino import SelfDistillation, seen
from vitral.pretraining.mae import MaskedAutoencoder
from vitral.pretraining.method import Draw, Method
from vitral.pretraining.mpp import MaskedPatchPrediction
from vitral.training.options import Run


class Parts(NamedTuple):
    """The two functions that make a method of a run."""

    build: Callable[[ViT, Run, int], Method]
    """The ViT, the run, and its optimizer steps → the network to train."""
    draw: Callable[[Run, ViTConfig], Draw]
    views: Callable[[Run, ViTConfig], float] = lambda run, config: 1.0
    """Activations of a training step, in images that the network sees as a whole."""


METHODS: Mapping[str, Parts] = {
    "mae": Parts(MaskedAutoencoder.of, MaskedAutoencoder.draw),
    "mpp": Parts(MaskedPatchPrediction.of, MaskedPatchPrediction.draw),
    "dino": Parts(SelfDistillation.of, SelfDistillation.draw, seen),
}
"""Methods by the names of their recipes."""


def command_of(recipe: str | None) -> str:
    """Name of the command that runs a recipe."""
    return "pretrain" if recipe in METHODS else "train"
