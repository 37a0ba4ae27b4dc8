"""Choose the weights that a run starts from: `--init auto`, the default.

The built-in model was trained on photographs of 200 kinds of things (docs/pretrained-model.md). A run starts from it,
unless an option asks for another network, the images are of another kind, or published weights are at hand, which know
more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from vitral.data.targets import targets_of
from vitral.device import Machine
from vitral.pretraining.methods import METHODS
from vitral.recipes.linear_probe import UNSUPPORTED as PROBE_UNSUPPORTED
from vitral.recipes.stats import DatasetStats
from vitral.recipes.table import RECIPES
from vitral.training.options import MODEL_OPTIONS
from vitral.training.plan import Choice
from vitral.weights.read.published import AtHand, Published, at_hand, proposed, unreadable
from vitral.weights.read.references import BUILT_IN, BuiltIn, is_included, starting_recipes
from vitral.wording import flag

AUTO, NONE = "auto", "none"
LIMIT = 600.0
"""Seconds for published weights if no `minutes` are stated: about as long as training the built-in model takes."""
_SHARE = 0.8
"""Share of the time for the download and the features. The rest is for planning, measuring and the report."""
_EPOCHS = 3
"""Epochs of all layers that a CPU needs time for. With fewer, the features of each image are computed once instead."""
_TRAINED = 4.0
"""Times the seconds of its features that an epoch of all layers takes: backward, augmentation, the optimizer."""
FEW = 1_000
"""Training images below which pretrained weights are recommended."""
_VERY_FEW = 200
_RECIPES = ("finetune", "linear-probe")
"""Recipes that start from any trained weights; a built-in model has one of its own, too."""
OTHER = {
    *MODEL_OPTIONS,
    "pack",
    "patch_sizes",
    "whiten",
    "mean",
    "std",
    "resize",
    "resize_size",
    "interpolation",
    "antialias",
    "levels",
    "channels",
} - {"dropout", "drop_path", "patch_dropout"}
"""Options that change the network, or the images that it sees, so that its weights no longer fit."""


def choose_start(
    given: Mapping[str, Any],
    task: str,
    stats: DatasetStats,
    machine: Machine,
    seconds_of: Callable[[Published], float] = lambda published: 0.0,
) -> tuple[dict[str, str], Choice | None]:
    """Return the option `init` of the run, empty for random weights, and its line in the plan, if there is a choice.

    `seconds_of` returns the time in which a CPU computes the features of all images with published weights.
    """
    stated = given.get("init", AUTO)
    if stated not in (AUTO, NONE):
        return {"init": stated}, Choice("init", stated, "requested")
    if given.get("recipe") in METHODS:
        return {}, None
    starts = {name: own for name, own in BUILT_IN.items() if own.recipe}
    excluded = {name: _contradiction(given, task, own, stats, machine) for name, own in starts.items()}
    if stated == NONE:
        excluded = dict.fromkeys(starts, "random weights, as requested")
    reasons = {name: why or _hidden(name) or _unlike(starts[name], stats, machine) for name, why in excluded.items()}
    name = next((name for name, why in reasons.items() if not why), next(iter(starts)))  # else the reasons of the first
    why, excluded_by = reasons[name], excluded[name]
    if not why:
        published = _find_published(given, machine, seconds_of) if _may_be_published(given, task, machine) else AtHand()
        damaged = "".join(f"; {one}" for one in published.damaged)
        if published.reference:
            return _published(given, stats, machine, published, f"; --init {name} is the built-in model{damaged}")
        if broken := unreadable(name):
            why = f"the built-in model cannot be read ({broken}){damaged}"
    if not why:
        silent = "the Hugging Face hub did not answer; " if published.silent else ""
        more = f"{silent}to start from a larger model: --init {proposed(_has_gpu(machine))}"
        known = f"the built-in model, {starts[name].about}; {published.why or more}{_local(stats)}{damaged}"
        return {"init": name}, Choice("init", name, known)
    if advice := _advice(stats, machine):
        why = advice if excluded_by and stated == AUTO else f"{why}; {advice}"
    elif excluded_by and "init" not in given:
        return {}, None
    return {}, Choice("init", NONE, why)


def _contradiction(given: Mapping[str, object], task: str, own: BuiltIn, stats: DatasetStats, machine: Machine) -> str:
    """Reason why the options exclude a built-in model; empty if they do not."""
    model = RECIPES[str(own.recipe)](stats, machine).run.model
    if targets_of(task).sequence:
        return "reading text needs a decoder, which the built-in model does not have"
    if given.get("recipe", own.recipe) not in (own.recipe, *_RECIPES):
        return f"--recipe {given['recipe']} trains from random weights"
    if given.get("model", model) != model:
        return f"--model {given['model']} is not the built-in model, {model}"
    other = (name for name in given if name in OTHER and given[name] not in (False, ()))
    return next((f"{flag(name)} does not fit the built-in model" for name in other), "")


def _hidden(name: str) -> str:
    """Reason why the name of a built-in model is not its own here; empty if it is."""
    hides = f"a run or weights called {name} in this folder hide the built-in model: rename them"
    return "" if is_included(name) else hides


def _unlike(own: BuiltIn, stats: DatasetStats, machine: Machine) -> str:
    """Reason why the images are better learned from random weights; empty if they are not."""
    if stats.channels == 1 and max(stats.size) < own.gray_from:
        return f"the images are gray and below {own.gray_from} pixels, where the built-in model hardly helps"
    if stats.channels == 1 and stats.plain > own.most_plain:
        return "the images are gray drawings or writing, and the built-in model was trained on photographs"
    if _has_gpu(machine) and own.most_on_gpu is not None and stats.images >= own.most_on_gpu:
        return f"with {stats.images:,} images and a GPU, vitral trains a larger network from random weights"
    return ""


def _advice(stats: DatasetStats, machine: Machine) -> str:
    """Recommend pretrained weights for small data sets that start from random ones; empty for others."""
    if stats.images >= FEW:
        return ""
    why = f"with only {stats.images:,} images, pretrained weights usually help most: --init"
    return f"{why} {proposed(_has_gpu(machine))}{_local(stats)}"


def _local(stats: DatasetStats) -> str:
    """Name finished runs for very few images."""
    if stats.images >= _VERY_FEW or not stats.finished_runs:
        return ""
    runs = " or --init ".join(stats.finished_runs)
    return f". If your images are similar to the images of an earlier run, start from it: --init {runs}"


def _recipe_of_published(given: Mapping[str, object], stats: DatasetStats, machine: Machine, found: AtHand) -> str:
    """A GPU trains all layers. A CPU fits a linear probe to the features, and then trains all layers if the stated
    minutes allow it and the images are enough to tell which is better: on few, all layers were not (docs/log/start.md).
    """
    if "recipe" in given:
        return str(given["recipe"])
    epochs = found.download_seconds + (1 + _EPOCHS * _TRAINED) * found.features_seconds
    asked = given.get("minutes") is not None and stats.images >= FEW
    return "finetune" if _has_gpu(machine) or (asked and epochs <= _limit(given)) else "linear-probe"


def _limit(given: Mapping[str, Any]) -> float:
    """Return the seconds for the download of published weights, their features and the training of all layers."""
    minutes = given.get("minutes")
    return _SHARE * (LIMIT if minutes is None else 60 * minutes)


def _may_be_published(given: Mapping[str, object], task: str, machine: Machine) -> bool:
    """True if the options fit published weights. On a CPU they have to fit a linear probe, too, which may be all."""
    probes = targets_of(task).one_class and given.get("val_fraction") != 0 and not {*given} & {*PROBE_UNSUPPORTED}
    fits = _has_gpu(machine) or (given.get("recipe", "linear-probe") == "linear-probe" and probes)
    return "model" not in given and given.get("recipe") not in starting_recipes() and fits


def _find_published(given: Mapping[str, object], machine: Machine, seconds_of: Callable[[Published], float]) -> AtHand:
    """Find published weights for the minutes of the run. A GPU trains in any time."""
    gpu = _has_gpu(machine)
    return at_hand(gpu, (lambda published: 0.0) if gpu else seconds_of, _limit(given))


def _published(
    given: Mapping[str, object], stats: DatasetStats, machine: Machine, found: AtHand, other: str
) -> tuple[dict[str, str], Choice]:
    """Return published weights that are at hand, and their line."""
    recipe = _recipe_of_published(given, stats, machine, found)
    how = "all layers are trained" if recipe == "finetune" else "the features of each image are computed once"
    init = Choice("init", found.reference, f"{found.why}; {how}{other}")
    return {"init": found.reference, "recipe": recipe}, init


def _has_gpu(machine: Machine) -> bool:
    return machine.device.type == "cuda"
