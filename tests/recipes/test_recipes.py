"""The contract of every recipe in the table."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys

import pytest
import torch

from vitral.device import Machine
from vitral.model import ViT
from vitral.model import config as model_config
from vitral.recipes.facts import Facts, facts
from vitral.recipes.planning import TOLD_BY
from vitral.recipes.table import RECIPES
from vitral.training.run import Run

DATA = {
    "digits": Facts(images=1437, classes=10, size=(8, 8), uniform=True, channels=1, imbalance=1.0),
    "mnist": Facts(images=60_000, classes=10, size=(28, 28), uniform=True, channels=1, imbalance=1.2),
    "cifar": Facts(images=50_000, classes=10, size=(32, 32), uniform=True, channels=3, imbalance=1.0),
    "oblong": Facts(images=300, classes=4, size=(50, 90), uniform=False, channels=3, imbalance=9.0),
    "photographs": Facts(images=250, classes=2, size=(375, 500), uniform=False, channels=3, imbalance=1.1),
    "one picture": Facts(images=1, classes=2, size=(224, 224), uniform=True, channels=3, imbalance=1.0),
    "imagenet": Facts(images=1_281_167, classes=1000, size=(375, 500), uniform=False, channels=3, imbalance=1.8),
}
MACHINES = {kind: Machine(torch.device(kind), "bf16", "test") for kind in ("cpu", "cuda")}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("machine", MACHINES)
def test_a_recipe_is_a_complete_run(name, data, machine):
    plan = RECIPES[name](DATA[data], MACHINES[machine])
    assert plan.run.recipe == name
    assert Run.from_json(json.loads(json.dumps(plan.run.to_json()))) == plan.run
    assert plan.choices
    for choice in plan.choices:
        assert choice.name
        assert choice.value
        assert choice.reason
    names = [choice.name for choice in plan.choices]
    assert len(set(names)) == len(names)
    config = model_config(plan.run.model, classes=DATA[data].classes, **plan.run.model_changes())
    with torch.device("meta"):
        model = ViT(config)
        assert model(torch.zeros(2, config.channels, *config.image)).shape == (2, DATA[data].classes)
    assert plan.run.preprocessing.image_size == config.image


@pytest.mark.parametrize("name", RECIPES)
def test_a_choice_can_be_overruled(name):
    """Its name is the option's, or the table says which options it tells of; else the plan would contradict itself."""
    fields = {field.name.replace("_", " ") for field in dataclasses.fields(Run)}
    for choice in RECIPES[name](DATA["cifar"], MACHINES["cpu"]).choices:
        assert choice.name in fields | TOLD_BY.keys(), choice.name


def test_the_table_tells_of_options_that_exist():
    fields = {field.name for field in dataclasses.fields(Run)}
    assert all(set(told) <= fields for told in TOLD_BY.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_its_command(name):
    function = RECIPES[name]
    page = inspect.getdoc(sys.modules[function.__module__]) or ""
    assert re.search(r"^ {4}vitral train ", page, re.MULTILINE)
    assert function.__doc__


def test_facts_of_digits():
    from vitral.data import load

    found = facts(load("digits"))
    assert (found.classes, found.size, found.uniform, found.channels) == (10, (8, 8), True, 1)
    assert found.images == 1437
    assert 1 <= found.imbalance < 1.2


def test_facts_of_mixed_pictures(make_pictures):
    from vitral.data import load

    folder = make_pictures({"a": 9, "b": 3}, size=(20, 30))
    (folder / "a/broken.png").write_bytes(b"no picture")
    make_pictures({"a": 1}, name="photos/more", size=(5, 5))
    found = facts(load(folder))
    assert (found.size, found.channels) == ((20, 30), 3)
    assert not found.uniform
