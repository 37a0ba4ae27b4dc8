"""Recipes by name: short functions from the data's numbers to a complete run."""

from collections.abc import Callable
from typing import Any

from vitral.data import DataSet
from vitral.device import Machine
from vitral.recipes import probe
from vitral.recipes.facts import Facts
from vitral.recipes.finetune import finetune, paper_finetune
from vitral.recipes.mnist_7562 import mnist_7562, mnist_7562_minute
from vitral.recipes.paper import paper
from vitral.recipes.places365 import places365
from vitral.recipes.planted import planted
from vitral.recipes.small import small
from vitral.training.run import Plan

RECIPES: dict[str, Callable[[Facts, Machine], Plan]] = {
    "small": small,
    "finetune": finetune,
    "paper": paper,
    "paper-finetune": paper_finetune,
    "places365": places365,
    "mnist-7562": mnist_7562,
    "mnist-7562-minute": mnist_7562_minute,
    "planted": planted,
    "linear-probe": probe.linear_probe,
}

RESIZES = ("paper-finetune",)
"""Recipes whose image size is part of them: weights are made to fit it."""

UNREAD: dict[str, tuple[str, ...]] = {"linear-probe": probe.UNREAD}
"""Options that have no meaning for a recipe, and are refused."""

CHECKS: dict[str, Callable[[DataSet, Any], None]] = {"linear-probe": probe.check}
"""What a recipe cannot work with is refused before any work."""
