"""The table of recipes by name, with their restrictions."""

from collections.abc import Callable
from typing import Any

from vitral.data import DataSet
from vitral.device import Machine
from vitral.recipes import linear_probe, pretrain
from vitral.recipes import text as reading
from vitral.recipes.backbone import backbone
from vitral.recipes.finetune import finetune, paper_finetune
from vitral.recipes.mnist_7562 import mnist_7562, mnist_7562_minute
from vitral.recipes.paper import paper
from vitral.recipes.places365 import places365
from vitral.recipes.planted import planted
from vitral.recipes.small import small
from vitral.recipes.stats import DatasetStats
from vitral.training.options import Run
from vitral.training.plan import Plan

RECIPES: dict[str, Callable[[DatasetStats, Machine], Plan]] = {
    "small": small,
    "backbone": backbone,
    "finetune": finetune,
    "paper": paper,
    "paper-finetune": paper_finetune,
    "places365": places365,
    "mnist-7562": mnist_7562,
    "mnist-7562-minute": mnist_7562_minute,
    "planted": planted,
    "linear-probe": linear_probe.linear_probe,
    "text": reading.text,
    "mae": pretrain.mae,
    "mpp": pretrain.mpp,
    "dino": pretrain.dino,
    "distill": pretrain.distill,
}

RESIZES = ("paper-finetune",)
"""Recipes with a fixed image size, to which initial weights are resized, as they are by the recipes of built-in models.
"""

UNSUPPORTED: dict[str, tuple[str, ...]] = {
    "linear-probe": linear_probe.UNSUPPORTED,
    "text": reading.UNSUPPORTED,
    **pretrain.UNSUPPORTED_BY,
}
"""Options without effect in a recipe; they are refused."""

CHECKS: dict[str, Callable[[DataSet, Any, Run], None]] = {
    "linear-probe": linear_probe.check,
    **dict.fromkeys(pretrain.UNSUPPORTED_BY, pretrain.check),
}
"""Functions that refuse unsupported data and networks before training."""
