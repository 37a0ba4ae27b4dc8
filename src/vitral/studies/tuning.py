"""`vitral tune`: a search over the options that a plan leaves open, around the plan's own values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitral.errors import RunError, UsageError
from vitral.folders import same_path
from vitral.model import ModelConfig
from vitral.recipes.table import UNSUPPORTED
from vitral.studies.spans import Span
from vitral.studies.study import Study, StudyFolder
from vitral.training.options import Run
from vitral.workflows.planning.plan import plan_run

TITLE = "Tuned options"
TRIALS_FOR_AN_OPTION = 4
"""Trials for each varied option: fewer would leave its effect to chance."""
LEAST_OPTIONS = 2
_FACTOR = 5.0
"""Learning rates are searched from a fifth of the plan's to five times it."""


@dataclass(frozen=True)
class Open:
    """An option that the plan leaves open: the values to search, the plan's own, and the reason to vary it."""

    name: str
    values: tuple[Any, ...] | Span
    own: Any
    why: str


def tune_study(data: str, trials: int, minutes: float | None, given: Mapping[str, object], folder: str | Path) -> Study:
    """Return the search for these images: that of the folder, with so many trials and minutes, or a new one around the
    plan for them.

    The plan is made once, so that all trials have the same number of epochs and the first one is the plan's own.
    """
    place = StudyFolder(folder)
    if place.study.exists():
        return _kept(place, data, trials, minutes, given)
    if trials < 1:
        raise UsageError(f"a search has at least one trial, not {trials}", hint="--trials 20")
    share = {} if minutes is None or "epochs" in given else {"minutes": minutes / trials}
    job = plan_run({"data": data, **given, **share})
    if "batch_size" in UNSUPPORTED.get(job.run.recipe, ()):
        why = f"--recipe {job.run.recipe} is fitted in closed form and chooses its one option itself"
        raise UsageError("there is nothing to tune", why=why, hint=f"vitral train {data} --recipe {job.run.recipe}")
    found = [one for one in open_options(job.run, job.config) if one.name not in given]
    found = found[: max(LEAST_OPTIONS, trials // TRIALS_FOR_AN_OPTION)]
    if not found:
        raise UsageError("nothing is left to tune", why="--set gives all options", hint="leave some of them out")
    return Study(
        "search",
        data,
        vary={one.name: one.values for one in found},
        trials=trials,
        minutes=minutes,
        title=TITLE,
        first={one.name: one.own for one in found},
        options={"epochs": job.run.epochs, **given},
        note="; ".join(f"{one.name}: {one.why}" for one in found),
    )


def _kept(place: StudyFolder, data: str, trials: int, minutes: float | None, given: Mapping[str, object]) -> Study:
    """Return the folder's search; `RunError` if it asks for something else."""
    kept = place.read()
    same = {name: value for name, value in kept.options.items() if name != "epochs" or "epochs" in given}
    if not same_path(kept.data, data) or (kept.title, same) != (TITLE, dict(given)):
        why = f"it tunes {kept.data} with other options" if kept.title == TITLE else f"it asks: {kept.command}"
        raise RunError(
            "this folder is another study", where=place.path, why=why, hint="choose another folder with --out"
        )
    return dataclasses.replace(kept, data=data, trials=trials, minutes=minutes)


def open_options(run: Run, config: ModelConfig) -> list[Open]:
    """Return the options whose best value depends on the images in a way that no recipe knows, the most important
    first.

    Epochs are not among them: given the images, more are better or as good, and `--minutes` limits them.
    """
    rate = float(f"{run.lr:.4g}")
    found = [Open("lr", Span(rate / _FACTOR, rate * _FACTOR, log=True), rate, "of all options it matters most")]
    if run.layer_decay:
        why = "the rate of early blocks decides how much of the initial weights is kept"
        found.append(Open("layer_decay", Span(0.5, 1.0), float(run.layer_decay), why))
    policies = tuple(
        dict.fromkeys([run.augment, "none", "affine" if run.channels == 1 else "randaugment", "trivialaugment"])
    )
    found.append(Open("augment", policies, run.augment, "the best strength depends on how few the images are"))
    if hasattr(config, "drop_path"):
        own = float(run.drop_path if run.drop_path is not None else config.drop_path)
        why = "regularizes: more for few images and many epochs"
        found.append(Open("drop_path", Span(0.0, max(0.3, own)), own, why))
    if run.weight_decay > 0:
        decay = float(f"{run.weight_decay:.4g}")
        found.append(Open("weight_decay", Span(decay / 10, decay * 10, log=True), decay, "regularizes likewise"))
    own = float(run.erase)
    found.append(Open("erase", Span(0.0, max(0.5, own)), own, "hides parts of images, against shortcuts"))
    own = float(run.label_smoothing)
    found.append(Open("label_smoothing", Span(0.0, max(0.2, own)), own, "keeps probabilities moderate"))
    return found
