"""The plan explained: each choice with its reason, and the alternatives that were open."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args, get_origin

from vitral.errors import VitralError
from vitral.evaluation.pages import environment, finished, write_page
from vitral.kinds import kinds_of
from vitral.model import config as model_config
from vitral.model import summarize
from vitral.model.variants import SIZES, Parts
from vitral.pretraining.methods import METHODS
from vitral.recipes.stats import dataset_stats, find_finished_runs
from vitral.recipes.table import RECIPES
from vitral.training.optimizers import OPTIMIZERS
from vitral.training.options import MODEL_OPTIONS, Run
from vitral.training.plan import Choice
from vitral.weights.read.references import starting_recipes
from vitral.wording import flag
from vitral.workflows.planning.draft import format_value
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.memory import training_bytes
from vitral.workflows.planning.plan import EXPLAINS

GENERAL = ("small", *starting_recipes(), "finetune", "paper")
"""Recipes for any images, whose values are alternatives; the others are for one data set or one method."""
_NEIGHBORS = 2
"""Sizes of the network to either side that are compared."""


@dataclass(frozen=True)
class Explained:
    """A choice with the options that set it, and what they might have been."""

    choice: Choice
    options: tuple[str, ...]
    """Flags that set it: `--lr`; none of a remark."""
    alternatives: tuple[str, ...]
    """Other values, each with the recipe that has it, or all that there are."""


@dataclass(frozen=True)
class Compared:
    """A size of the network beside the one chosen."""

    model: str
    parameters: int
    flops: int
    """Of one image."""
    step_memory: int
    """Bytes of weights, moments and a step's activations."""
    chosen: bool


def explain_plan(job: Job) -> list[Explained]:
    """Return the choices of a plan in order, each with its alternatives."""
    others = dict(_other_recipes(job))
    kinds = kinds_of(Run)
    found = list[Explained]()
    for choice in job.plan.choices:
        names = EXPLAINS.get(choice.name, (choice.name.replace(" ", "_"),))
        fields = tuple(name for name in names if name in kinds)
        alternatives = [
            text for name in fields for text in _alternatives(name, job.run, kinds[name], others, len(fields) > 1)
        ]
        method = "method" if job.run.recipe in METHODS else "recipe"  # as `vitral pretrain` names it
        flags = tuple(flag(method if name == "recipe" else name) for name in fields)
        found.append(Explained(choice, flags, tuple(alternatives)))
    return found


def _other_recipes(job: Job) -> Iterator[tuple[str, Run]]:
    """Run the other general recipes on the statistics of the same data."""
    stats = dataset_stats(job.dataset)
    runs = find_finished_runs(job.dataset, stats)
    stats = dataclasses.replace(stats, images=len(job.dataset["train"]), finished_runs=runs)
    for name in GENERAL:
        if name != job.run.recipe and job.run.recipe not in METHODS:
            with contextlib.suppress(VitralError):
                yield name, RECIPES[name](stats, job.machine).run


def _alternatives(name: str, run: Run, kind: object, others: Mapping[str, Run], named: bool) -> Iterator[str]:
    """List what an option might have been: the values of other recipes, and all of a short list."""
    own = getattr(run, name)
    prefix = f"{flag(name)} " if named else ""
    values: dict[str, list[str]] = {}
    for recipe, other in others.items():
        value = getattr(other, name)
        if value != own and value is not None:
            values.setdefault(format_value(value), []).append(recipe)
    yield from (f"{prefix}{value} (recipe {', '.join(recipes)})" for value, recipes in values.items())
    listed = get_args(kind) if get_origin(kind) is not None and all(isinstance(v, str) for v in get_args(kind)) else ()
    listed = tuple(OPTIMIZERS) if name == "optimizer" else listed
    if rest := [value for value in listed if value != own and value not in values]:
        yield f"{prefix}{', '.join(rest)}"


def compare_sizes(job: Job) -> list[Compared]:
    """Return networks of smaller and larger sizes with their costs, in order of FLOPs; none for a network without."""
    parts = Parts.of(job.run.model)
    if job.init or parts.size not in SIZES:
        return []
    changes = job.run.model_changes()
    shared = {name: value for name, value in changes.items() if name not in ("dim", "depth", "heads", "mlp_dim")}
    classes = len(job.dataset.classes)
    found = list[Compared]()
    ordered = sorted(SIZES, key=lambda name: SIZES[name].dim ** 2 * SIZES[name].depth)
    place = ordered.index(parts.size)
    for other in ordered[max(0, place - _NEIGHBORS) : place + _NEIGHBORS + 1]:
        name = str(parts._replace(size=other))
        with contextlib.suppress(VitralError):
            config = job.config if other == parts.size else model_config(name, classes=classes, **shared)
            cost, (held, per_image) = summarize(config), training_bytes(job.run, config, job.machine)
            memory = held + per_image * job.run.batch_size
            found.append(Compared(name, cost.parameters, cost.flops, memory, other == parts.size))
    return sorted(found, key=lambda one: one.flops)


def untouched(job: Job) -> list[tuple[str, str]]:
    """Return the options that no choice names, with their values: the run's defaults and the recipe's."""
    named = {one for choice in job.plan.choices for one in EXPLAINS.get(choice.name, (choice.name.replace(" ", "_"),))}
    return [
        (flag(field.name), format_value(getattr(job.run, field.name)))
        for field in dataclasses.fields(Run)
        if field.name not in named and field.name not in MODEL_OPTIONS and getattr(job.run, field.name) is not None
    ]


def to_json(job: Job) -> dict[str, object]:
    """Return the plan with its alternatives as plain data."""
    choices = [
        {**dataclasses.asdict(one.choice), "options": one.options, "alternatives": one.alternatives}
        for one in explain_plan(job)
    ]
    return {
        "run": job.run.to_json(),
        "choices": choices,
        "sizes": [dataclasses.asdict(one) for one in compare_sizes(job)],
    }


def write_plan(path: Path, job: Job, command: str) -> None:
    """Write the page of a plan atomically, with folders that are missing."""
    text = (
        environment(__package__)
        .get_template("plan.html.jinja")
        .render(
            title=job.dataset.name,
            run=job.run,
            machine=job.machine,
            explained=explain_plan(job),
            sizes=compare_sizes(job),
            images={name: len(split) for name, split in job.dataset.splits.items()},
            untouched=untouched(job),
            command=command,
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_page(path, finished(text))
