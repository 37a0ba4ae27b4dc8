"""Results of a study: one outcome a run, means over seeds, and the differences that can be claimed."""

from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from vitral import bounded
from vitral.data.loader import Progress
from vitral.digest import read_json
from vitral.errors import RunError, UsageError
from vitral.evaluation.metrics import Evaluation
from vitral.kinds import checked
from vitral.model import ModelConfig, summarize
from vitral.pretraining.methods import command
from vitral.studies.paired import holm
from vitral.studies.seeds import Mean, SeedDifference, mean_of, paired_difference
from vitral.studies.spans import corners
from vitral.studies.study import Cell, Study, StudyFolder, shown
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.wording import in_groups

Status = Literal["done", "failed", "pruned", "begun", "open"]

MEASURED_ON = ("test", "val")
"""Splits to measure a run on: the first that its data have."""
ON_VALIDATION = ("val",)
"""Splits of a search, which chooses by the figure."""


@dataclass(frozen=True)
class Outcome:
    """The figures of one run; those of a run without a result are None."""

    cell: Cell
    status: Status
    why: str = ""
    """Reason of a run that failed."""
    split: str = ""
    images: int = 0
    """Held-out images."""
    groups: int | None = None
    """Groups of them that belong together; None for runs from before these were counted."""
    train_images: int | None = None
    accuracy: float | None = None
    loss: float | None = None
    ece: float | None = None
    macro_f1: float | None = None
    epochs: int | None = None
    best_epoch: int | None = None
    batch_size: int | None = None
    """Images of an optimizer step; None for a run without steps."""
    parameters: int | None = None
    flops: float | None = None
    """Of the whole training: three forward passes (backward is twice forward) of every image seen."""
    seconds: float | None = None
    """Of training and validation."""
    images_per_second: float | None = None
    at_chance: bool = False
    """The interval of the accuracy reaches down to the share of the largest class: nothing is seen to be learned."""
    held_out: str = ""
    """Digest of the names and labels of the held-out images."""
    curve: tuple[float, ...] = ()
    """Validation accuracy after each epoch, of a trial."""
    planned_epochs: int | None = None
    """Of a trial that was stopped early."""
    test: Evaluation | None = None
    """On the test split, of a trial: it plays no part in the choice."""

    @property
    def independent(self) -> int:
        """Number of groups of held-out images, among which an image alone is one."""
        return self.images if self.groups is None else self.groups

    @property
    def done(self) -> bool:
        return self.status == "done"

    @property
    def compared(self) -> bool:
        """True if differences may be claimed of it."""
        return self.done and not self.at_chance

    @property
    def ended(self) -> bool:
        """True if nothing is left to train."""
        return self.status in ("done", "failed", "pruned")


_NO_FIGURES = ("cell", "status", "why", "at_chance", "held_out", "curve", "planned_epochs", "test")


@dataclass(frozen=True)
class Group:
    """The runs of one combination of factors, over all seeds."""

    factors: dict[str, Any]
    outcomes: tuple[Outcome, ...]

    @cached_property
    def done(self) -> tuple[Outcome, ...]:
        return tuple(one for one in self.outcomes if one.done)

    @cached_property
    def accuracy(self) -> Mean | None:
        """Mean over the finished seeds; None if there is none."""
        if not self.done:
            return None
        mean = mean_of([one.accuracy or 0.0 for one in self.done], 1 / max(1, self.done[0].independent))
        low, high = mean.interval  # Student's interval knows no bounds
        return dataclasses.replace(mean, interval=(max(0.0, low), min(1.0, high)))

    def mean(self, name: str) -> float | None:
        """Mean of another figure over the finished seeds; None if one lacks it."""
        values = [getattr(one, name) for one in self.done]
        return None if not values or None in values else mean_of(values).value

    def label(self, without: Sequence[str] = ()) -> str:
        """The factors in words: "S/16", or "lr 0.001, augment none"."""
        rest = {name: value for name, value in self.factors.items() if name not in without}
        if list(rest) == ["model"]:
            return shown(rest["model"])
        return ", ".join(f"{name} {shown(value)}" for name, value in rest.items()) or "the recipe's network"


@dataclass(frozen=True)
class _Runs:
    """Accuracies of one side of a difference, by what pairs them: the seed, and the other factors."""

    name: str
    accuracy: dict[tuple[Any, ...], float]


def _by_others(done: Sequence[Outcome], name: str, value: object) -> dict[tuple[object, ...], float]:
    """Accuracies of the runs with this value of an option, by seed and the other options."""
    return {
        (one.cell.seed, *(v for n, v in one.cell.factors.items() if n != name)): one.accuracy or 0.0
        for one in done
        if one.cell.factors[name] == value
    }


def listed(names: Sequence[str]) -> str:
    """Join names with commas and "and"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


@dataclass(frozen=True)
class Results:
    """All outcomes of a study."""

    study: Study
    outcomes: tuple[Outcome, ...]

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Combinations of factors, in the order of the grid."""
        found: dict[tuple[object, ...], list[Outcome]] = {}
        for one in self.outcomes:
            found.setdefault(tuple(one.cell.factors.values()), []).append(one)
        return tuple(Group(dict(each[0].cell.factors), tuple(each)) for each in found.values())

    @property
    def finished(self) -> bool:
        """True if no run is left to train."""
        ended = all(one.ended for one in self.outcomes)
        if not self.study.design.searches:
            return ended
        return ended and (len(self.outcomes) >= self.study.trials or self.out_of_time)

    @property
    def ranked(self) -> list[Outcome]:
        """Outcomes of a search, the best first, then those that were stopped early, then those without a figure."""
        return sorted(self.outcomes, key=lambda one: (not one.done, -(one.accuracy or 0.0), one.loss or 0.0))

    @property
    def out_of_time(self) -> bool:
        """True if another trial of a search would take it beyond its minutes by more than a tenth."""
        if self.study.minutes is None or not self.outcomes:
            return False
        whole = [one.seconds for one in self.outcomes if one.done and one.seconds]
        spent = sum(one.seconds or 0.0 for one in self.outcomes)
        return spent + (statistics.median(whole) if whole else 0.0) > 1.1 * 60 * self.study.minutes

    @cached_property
    def best(self) -> Outcome | None:
        """The finished run of the highest accuracy, of equal ones that of the lowest loss; None without any."""
        return next((one for one in self.ranked if one.done), None)

    @cached_property
    def images(self) -> int:
        """Number of held-out images."""
        return next((one.images for one in self.outcomes if one.done), 0)

    @cached_property
    def groups_of_images(self) -> int:
        """Number of groups of held-out images that belong together."""
        return next((one.independent for one in self.outcomes if one.done), 0)

    def counted(self, kind: str = "image") -> str:
        """Number of held-out images, and of groups if there are fewer."""
        return in_groups(self.images, self.groups_of_images, kind)

    @cached_property
    def split(self) -> str:
        """Held-out split: test if the data have one, else val, which also chose the best epoch of each run."""
        return next((one.split for one in self.outcomes if one.done), "")

    @cached_property
    def differences(self) -> tuple[SeedDifference, ...]:
        """Differences of all pairs that the study asks about, with Holm's correction over them.

        Networks are compared at the same amount of data or length of training. In a grid, values of an option are
        compared over all values of the others: pairs of runs that differ in this option alone.
        """
        if self.study.design.searches:
            return ()
        factor = self.study.design.factor
        compared = self._at_the_same(factor) if factor else self._values_of_options()
        found = [one for one in itertools.starmap(self._difference, compared) if one is not None]
        adjusted = holm([one.p_value for one in found])
        return tuple(dataclasses.replace(one, p_adjusted=p) for one, p in zip(found, adjusted, strict=True))

    def _at_the_same(self, factor: str) -> Iterator[tuple[str, _Runs, _Runs]]:
        for value in dict.fromkeys(group.factors[factor] for group in self.groups):
            where = self.study.design.in_words(value)
            here = [
                _Runs(group.label((factor,)), {(o.cell.seed,): o.accuracy or 0.0 for o in group.done if o.compared})
                for group in self.groups
                if group.factors[factor] == value
            ]
            yield from ((where, a, b) for a, b in itertools.combinations(here, 2))

    def _values_of_options(self) -> Iterator[tuple[str, _Runs, _Runs]]:
        done = [one for one in self.outcomes if one.compared]
        for name, values in corners(self.study.vary).items():
            where = f"over all values of {listed([other for other in self.study.vary if other != name])}"
            runs = [_Runs(f"{name} {shown(value)}", _by_others(done, name, value)) for value in values]
            yield from ((where if len(self.study.vary) > 1 else "", a, b) for a, b in itertools.combinations(runs, 2))

    def _difference(self, where: str, a: _Runs, b: _Runs) -> SeedDifference | None:
        """The difference over the runs that both have finished, the better one first; None without one."""
        keys = sorted(a.accuracy.keys() & b.accuracy.keys(), key=str)
        if not keys:
            return None
        if sum(a.accuracy[key] for key in keys) < sum(b.accuracy[key] for key in keys):
            a, b = b, a
        first, second = ([one.accuracy[key] for key in keys] for one in (a, b))
        claims = self.study.seeds > 1
        return paired_difference(where, a.name, b.name, first, second, self.groups_of_images, claims=claims)

    def front(self, cost: str) -> tuple[Group, ...]:
        """Groups that no other one beats in accuracy at the same or a lower `cost` (flops or seconds)."""
        ranked = [(group.mean(cost), group) for group in self.groups if group.accuracy]
        ranked = sorted(
            ((float(x), group) for x, group in ranked if x is not None),
            key=lambda one: (one[0], -(one[1].accuracy.value if one[1].accuracy else 0)),
        )
        front, best = list[Group](), -1.0
        for _, group in ranked:
            if group.accuracy and group.accuracy.value > best:
                front.append(group)
                best = group.accuracy.value
        return tuple(front)

    def to_csv(self) -> str:
        """One line a run, with the factors first."""
        factors = list(self.study.factors)
        figures = [one.name for one in dataclasses.fields(Outcome) if one.name not in _NO_FIGURES]
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow([*factors, "seed", "status", *figures, "folder", "why"])
        for one in self.outcomes:
            values = [getattr(one, name) for name in figures]
            own = [shown(one.cell.factors[name]) for name in factors]
            rows.writerow([*own, one.cell.seed, one.status, *values, f"cells/{one.cell.name}", one.why])
        return text.getvalue()

    def to_json(self) -> dict[str, object]:
        """Plain data: the study, every run, means over seeds and differences."""
        runs = [_as_json(one) for one in self.outcomes]
        means = [
            {
                "factors": one.factors,
                "accuracy": one.accuracy and dataclasses.asdict(one.accuracy),
                "flops": one.mean("flops"),
                "seconds": one.mean("seconds"),
            }
            for one in self.groups
        ]
        differences = [{**dataclasses.asdict(one), "claimed": one.claimed} for one in self.differences]
        return {
            "study": self.study.to_json(),
            "finished": self.finished,
            "split": self.split,
            "images": self.images,
            "image_groups": self.groups_of_images,
            "runs": runs,
            "means": means,
            "differences": differences,
            **self._winner(),
        }

    def _winner(self) -> dict[str, object]:
        """The winner of a search with its figure on the test split, the only one that is stated."""
        best = self.best
        if not self.study.design.searches or best is None:
            return {}
        test = best.test and {
            "accuracy": best.test.accuracy,
            "interval": list(best.test.accuracy_interval),
            "images": best.test.images,
            "groups": best.test.groups,
        }
        return {
            "winner": {
                "run": best.cell.name,
                "factors": dict(best.cell.factors),
                "val_accuracy": best.accuracy,
                "test": test,
                "command": command(best.cell.options),
            }
        }


def _as_json(one: Outcome) -> dict[str, object]:
    about = {field.name: getattr(one, field.name) for field in dataclasses.fields(one) if field.name not in _OF_TRIALS}
    of_trial = {"curve": one.curve, "planned_epochs": one.planned_epochs} if one.curve else {}
    return {**about, **of_trial, "cell": one.cell.name, "factors": dict(one.cell.factors), "seed": one.cell.seed}


_OF_TRIALS = ("curve", "planned_epochs", "test")


@checked
def read_results(study: Study, folder: StudyFolder, progress: Progress | None = None) -> Results:
    """Read the outcome of every cell from its run folder."""
    outcomes = list[Outcome]()
    searched = study.design.searches
    for cell in folder.read_trials(study) if searched else study.cells:
        outcomes.append(read_outcome(cell, folder, ON_VALIDATION if searched else MEASURED_ON))
        if progress:
            progress(1)
    check_held_out(outcomes)
    return Results(study, tuple(outcomes))


def check_held_out(outcomes: Sequence[Outcome]) -> None:
    """Raise `UsageError` for runs without held-out images, and for runs that hold out other images than the first."""
    done = [one for one in outcomes if one.done]
    if bad := next((one for one in done if not one.split), None):
        why = f"{bad.cell.name} has trained on all images"
        raise UsageError("nothing is held out to compare on", why=why, hint="--set val_fraction=0.1")
    if bad := next((one for one in done if one.held_out != done[0].held_out), None):
        why = f"{bad.cell.name} holds out other images than {done[0].cell.name}"
        raise UsageError("these runs cannot be compared", why=why, hint="use the same --set val_fraction=… for all")


def read_outcome(cell: Cell, folder: StudyFolder, splits: Sequence[str] = MEASURED_ON) -> Outcome:
    """Read the outcome of a cell on the first of these splits that it has; `RunError` for a damaged result."""
    if folder.outcome(cell).is_file():
        return _ended(cell, folder.outcome(cell))
    run = RunFolder(folder.cell(cell))
    if not run.result.is_file():
        return Outcome(cell, "begun" if run.is_run() else "open")
    result = run.read_result()
    split = next((name for name in splits if name in result), "")
    of_trial: dict[str, Any] = {}
    if "test" not in splits:
        test = Evaluation.from_json(result["test"]) if "test" in result else None
        of_trial = {"curve": _curve(run), "test": test}
    measured, plan = result.get(split, {}), run.read_plan()
    return Outcome(
        cell,
        "done",
        split=split,
        images=measured.get("images", 0),
        groups=measured.get("groups"),
        train_images=result["images"]["train"],
        accuracy=measured.get("accuracy"),
        loss=measured.get("loss"),
        ece=measured.get("ece"),
        macro_f1=measured.get("macro_f1"),
        epochs=result["epochs"],
        best_epoch=result["best_epoch"],
        batch_size=plan.run.batch_size * plan.run.accumulate if result["epochs"] else None,
        parameters=result["parameters"],
        flops=_training_flops(run),
        seconds=result["seconds"],
        images_per_second=result["images_per_second"],
        at_chance=_at_chance(measured),
        held_out=plan.fingerprint.digests.get(split, "") if plan.fingerprint else "",
        **of_trial,
    )


def _at_chance(measured: Mapping[str, Any]) -> bool:
    if not measured.get("per_class"):
        return False
    largest = max(one["images"] for one in measured["per_class"]) / measured["images"]
    return bool(measured["accuracy_interval"][0] <= largest)


def _curve(run: RunFolder) -> tuple[float, ...]:
    return tuple(line["val_accuracy"] for line in run.read_history() if "val_accuracy" in line)


def _ended(cell: Cell, file: Path) -> Outcome:
    try:
        record = read_json(file)
        curve = tuple(map(float, record.get("curve", ())))
        return Outcome(
            cell,
            record["status"],
            why=record["why"],
            curve=curve,
            accuracy=max(curve, default=None),
            epochs=len(curve) or None,
            planned_epochs=record.get("planned_epochs"),
            seconds=record.get("seconds"),
        )
    except (ValueError, KeyError, TypeError) as error:
        hint = "delete it, and the run is trained again"
        raise RunError("cannot read an outcome", where=file, why=str(error), hint=hint) from error


def _training_flops(run: RunFolder) -> float | None:
    """FLOPs of training by the images that the run has seen; None for a run that is fitted in closed form."""
    lines = run.manifest.read(run.metrics).splitlines()
    seen = bounded.parse(lines[-1]).get("images_seen") if lines else None
    if seen is None:
        return None
    return 3.0 * _forward_flops(native.read(run.weights).config) * seen


@lru_cache(64)
def _forward_flops(config: ModelConfig) -> int:
    return summarize(config).flops
