"""Recipes by name: short functions from the data's numbers to a complete run."""

from collections.abc import Callable

from vitral.device import Machine
from vitral.recipes.facts import Facts
from vitral.recipes.mnist_7562 import mnist_7562
from vitral.recipes.paper import paper, paper_finetune
from vitral.recipes.places365 import places365
from vitral.recipes.small import small
from vitral.training.run import Plan

RECIPES: dict[str, Callable[[Facts, Machine], Plan]] = {
    "small": small,
    "paper": paper,
    "paper-finetune": paper_finetune,
    "places365": places365,
    "mnist-7562": mnist_7562,
}
