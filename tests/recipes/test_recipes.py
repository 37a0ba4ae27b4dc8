"""Test the contract of every recipe in the table."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys

import pytest
import torch

from running import mostly_slow
from vitral.device import Machine
from vitral.model import ViT
from vitral.model import config as model_config
from vitral.recipes.stats import DatasetStats, dataset_stats
from vitral.recipes.table import RECIPES
from vitral.training.options import Run
from vitral.workflows.planning.plan import EXPLAINS

DATA = {
    "digits": DatasetStats(images=1437, classes=10, size=(8, 8), uniform=True, channels=1, imbalance=1.0),
    "mnist": DatasetStats(images=60_000, classes=10, size=(28, 28), uniform=True, channels=1, imbalance=1.2),
    "cifar": DatasetStats(images=50_000, classes=10, size=(32, 32), uniform=True, channels=3, imbalance=1.0),
    "oblong": DatasetStats(images=300, classes=4, size=(50, 90), uniform=False, channels=3, imbalance=9.0),
    "photographs": DatasetStats(images=250, classes=2, size=(375, 500), uniform=False, channels=3, imbalance=1.1),
    "one image": DatasetStats(images=1, classes=2, size=(224, 224), uniform=True, channels=3, imbalance=1.0),
    "imagenet": DatasetStats(images=1_281_167, classes=1000, size=(375, 500), uniform=False, channels=3, imbalance=1.8),
}
MACHINES = {kind: Machine(torch.device(kind), "bf16", "test") for kind in ("cpu", "cuda")}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("data", mostly_slow(DATA, 3))
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


@pytest.mark.parametrize("name", ["small", "backbone", "text"])
@pytest.mark.parametrize(("epochs", "warmup"), [(1, 0.1), (2, 0.2), (10, 1.0), (20, 1.0)])
def test_a_short_run_warms_up_for_a_tenth_of_it(name, epochs, warmup):
    """A run of one epoch was all warm-up: it ended at the full rate."""
    found = RECIPES[name](dataclasses.replace(DATA["mnist"], epochs=epochs), MACHINES["cuda"]).run
    assert (found.epochs, found.warmup) == (epochs, pytest.approx(warmup))


def test_lines_of_text_are_learned_in_many_steps_on_a_cpu():
    found = {kind: RECIPES["text"](DATA["mnist"], machine).run.batch_size for kind, machine in MACHINES.items()}
    assert found == {"cpu": 16, "cuda": 64}


@pytest.mark.parametrize("name", RECIPES)
def test_a_choice_can_be_overridden(name):
    """Each choice has the name of an option or is in `EXPLAINS`; otherwise an override would contradict the plan."""
    fields = {field.name.replace("_", " ") for field in dataclasses.fields(Run)}
    for choice in RECIPES[name](DATA["cifar"], MACHINES["cpu"]).choices:
        assert choice.name in fields | EXPLAINS.keys(), choice.name


def test_the_table_names_existing_options():
    fields = {field.name for field in dataclasses.fields(Run)}
    assert all(set(reported) <= fields for reported in EXPLAINS.values())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_gives_its_command(name):
    function = RECIPES[name]
    page = inspect.getdoc(sys.modules[function.__module__]) or ""
    assert re.search(r"^ {4}vitral (pre)?train ", page, re.MULTILINE)
    assert function.__doc__


def test_statistics_of_digits():
    from vitral.data import load

    found = dataset_stats(load("digits"))
    assert (found.classes, found.size, found.uniform, found.channels) == (10, (8, 8), True, 1)
    assert found.images == 1437
    assert 1 <= found.imbalance < 1.2


def test_statistics_of_mixed_images(make_images):
    from vitral.data import load

    folder = make_images({"a": 9, "b": 3}, size=(20, 30))
    (folder / "a/broken.png").write_bytes(b"no image")
    make_images({"a": 1}, name="photos/more", size=(5, 5))
    found = dataset_stats(load(folder))
    assert (found.size, found.channels) == ((20, 30), 3)
    assert not found.uniform
