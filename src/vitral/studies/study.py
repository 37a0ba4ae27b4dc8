"""A study: one question, asked by training a grid of runs on the same held-out images."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from vitral.atomic import write_text
from vitral.console import command_line
from vitral.digest import KEY, read_json, sealed_json
from vitral.errors import RunError, UsageError, unknown
from vitral.folders import same_path
from vitral.kinds import named_fields
from vitral.studies.designs import DESIGNS, Design
from vitral.studies.spans import Span, combinations, corners, in_range
from vitral.training.options import Run, checked_options
from vitral.wording import flag
from vitral.workflows.planning.start import NONE, OTHER

OWN = ("data", "out", "seed", "split_seed", "val_share", "minutes", "bad_images")
"""Options of a run that a study sets itself, or that all cells share."""
MOST_CELLS = 1000
"""Most cells of a study; a larger grid is a slip of the hand."""
_FORMAT = 1


@dataclass(frozen=True)
class Cell:
    """One run of a study."""

    name: str
    """Of its run folder, inside `cells`."""
    factors: Mapping[str, Any]
    """Value of each factor but the seed, in the order of the table."""
    seed: int
    options: Mapping[str, Any]
    """Of `vitral.train`, without `out`."""


@dataclass(frozen=True)
class Expectation:
    """A difference that a claim expects: `first` is more accurate than `second` (">"), or as accurate ("=")."""

    first: str
    relation: Literal[">", "="]
    second: str
    where: float | None = None
    """The fraction or the number of epochs at which they are compared; None for any."""


@named_fields
@dataclass(frozen=True)
class Study:
    """All choices of a study, as in its study.json. Raises `UsageError` for a grid that asks nothing."""

    kind: str
    """A name of `DESIGNS`."""
    data: str
    models: tuple[str, ...] = ()
    """Names of networks; empty for that of the recipe."""
    fractions: tuple[float, ...] = ()
    """Of the training images, for `data`."""
    epochs: tuple[int, ...] = ()
    """Lengths of training, for `compute`."""
    vary: Mapping[str, tuple[Any, ...] | Span] = field(default_factory=dict)
    """Option of a run → its values, for `options` and `search`; a search takes ranges, too."""
    trials: int = 0
    """Most runs of a `search`."""
    first: Mapping[str, Any] = field(default_factory=dict)
    """Values of the first trial of a `search`; empty for any."""
    seeds: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options that all cells share."""
    minutes: float | None = None
    """For training and validation of all cells, each of which gets the same share."""
    title: str = ""
    claim: str = ""
    """A claim that the study tests, in a sentence."""
    expects: tuple[Expectation, ...] = ()
    """The differences that the claim expects."""
    note: str = ""
    """Differences of the study from the source of its claim."""

    def __post_init__(self) -> None:
        if self.kind not in DESIGNS:
            raise unknown("kind of study", self.kind, DESIGNS)
        if self.seeds < 1:
            raise UsageError("a study has at least one seed", hint="--seeds 3")
        for title, values in (("models", self.models), ("fractions", self.fractions), ("epochs", self.epochs)):
            if twice := _repeated(values):
                raise UsageError(f"--{title} names {twice} twice", hint="name each once")
        if bad := [one for one in self.fractions if not 0 < one <= 1]:
            raise UsageError(f"a fraction is above 0 and at most 1, not {bad[0]:g}", hint="--fractions 0.1 0.5 1")
        if self.minutes is not None and self.minutes <= 0:
            raise UsageError(f"--minutes must be above 0, not {self.minutes:g}", hint="--minutes 60")
        self._check_options()
        self._check_trials()
        if len(self.cells) > MOST_CELLS:
            raise UsageError(f"{len(self.cells):,} runs are too many for a study", hint="fewer values, or fewer seeds")
        if twice := _repeated(tuple(cell.name for cell in self.cells)):
            raise UsageError(f"two runs would be called {twice}", hint="make a study for each")

    def _check_options(self) -> None:
        for name in (*self.options, *self.vary):
            if name in (*OWN, *self.design.sets):
                why = "the study sets it for every run"
                raise UsageError(f"{flag(name)} cannot be set for single runs", why=why, hint=f"leave {name} out")
        if both := [name for name in self.vary if name in self.options]:
            raise UsageError(f"{both[0]} is both varied and set", hint="one of the two")
        if self.minutes is not None and self.design.fixes_epochs((*self.options, *self.vary)):
            raise UsageError("--minutes and epochs are mutually exclusive", hint="leave one out")
        for name, values in self.vary.items():
            if isinstance(values, tuple) and (twice := _repeated(values)):
                raise UsageError(f"--vary gives {name} the value {twice} twice", hint="name each once")
            if isinstance(values, Span) and not self.design.searches:
                why = f"{name} has infinitely many values"
                raise UsageError("a grid has no ranges", why=why, hint="--trials 20 searches them")
        for options in combinations(corners(self.vary)):
            Run(**checked_options({**self.options, **options}))  # refuse a bad value before the first run

    def _check_trials(self) -> None:
        if not self.design.searches:
            return
        if not 1 <= self.trials <= MOST_CELLS:
            raise UsageError(f"a search has 1 to {MOST_CELLS:,} trials, not {self.trials}", hint="--trials 20")
        if self.seeds != 1:
            why = "each trial is one run; the best of them can be trained with more seeds afterwards"
            raise UsageError("a search has one seed", why=why, hint="leave out --seeds")
        if self.first and not in_range(self.vary, self.first):
            raise UsageError("the first trial is outside the search", why=str(dict(self.first)), hint="wider ranges")
        sizes = [len(values) for values in self.vary.values() if isinstance(values, tuple)]
        if len(sizes) == len(self.vary) and (all_ := math.prod(sizes)) < self.trials:
            why = f"the lists have {all_} combinations"
            raise UsageError(
                "more trials than there are runs", why=why, hint=f"--trials {all_}, or no --trials: a grid"
            )

    @property
    def design(self) -> Design:
        """Its grid, its words, and its refusals."""
        return DESIGNS[self.kind]

    @property
    def start(self) -> dict[str, str]:
        """Random weights for every run of a study of networks, since the built-in weights fit only one of them.

        Empty if the study states or varies `init`, or varies nothing that decides on it.
        """
        networks = self.models or {*self.vary} & {"model", *OTHER}
        return {"init": NONE} if networks and "init" not in (*self.options, *self.vary) else {}

    @property
    def factors(self) -> tuple[str, ...]:
        """Names of the factors, in the order of the table."""
        return tuple(self.vary) if self.design.searches else tuple(self.cells[0].factors)

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """All runs: seed by seed, so that a study that is stopped has whole grids of fewer seeds.

        None of a search, whose `trial` depends on the results of the ones before.
        """
        if self.design.searches:
            return ()
        grid = list(self.design.grid(self))
        share = {} if self.minutes is None else {"minutes": self.minutes / (len(grid) * self.seeds)}
        cells = list[Cell]()
        for seed, factors in itertools.product(range(self.seeds), grid):
            seeds = {"seed": seed, "split_seed": 0}
            options = {**self.start, **self.options, **self.design.options_of(factors), **share, **seeds}
            parts = [re.sub(r"[^\w.+-]+", "-", shown(value)).strip("-.") or "none" for value in factors.values()]
            cells.append(Cell("_".join([*parts, f"seed{seed}"]), factors, seed, {"data": self.data, **options}))
        return tuple(cells)

    def trial(self, number: int, factors: Mapping[str, object]) -> Cell:
        """Return a run of a search, with these values of the varied options."""
        timed = self.minutes is not None and "epochs" not in (*self.options, *factors)
        share = {"minutes": self.minutes / self.trials} if timed and self.minutes else {}
        options = {**self.start, **self.options, **factors, **share, "seed": 0, "split_seed": 0}
        return Cell(f"trial-{number:03}", dict(factors), 0, {"data": self.data, **options})

    def to_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Study:
        """Read the form that `to_json` writes; an unknown field raises `UsageError`."""
        names = [one.name for one in dataclasses.fields(cls)]
        if bad := [name for name in data if name not in names]:
            raise unknown("field of a study", bad[0], names)
        frozen = {name: _frozen(value) for name, value in data.items()}
        frozen["expects"] = tuple(Expectation(**one) for one in frozen.get("expects", ()))
        frozen["vary"] = {name: Span.read(values) for name, values in frozen.get("vary", {}).items()}
        return cls(**frozen)

    @property
    def command(self) -> str:
        """The command line that makes this study, without `--out`."""
        given: dict[str, object] = {}
        if self.models:
            given["models"] = self.models
        if self.fractions:
            given["fractions"] = self.fractions
        if self.epochs:
            given["epochs"] = self.epochs
        if self.vary and not self.first:  # `vitral tune` finds the options and their ranges itself
            given["vary"] = [f"{name}={_as_typed(values)}" for name, values in self.vary.items()]
        if self.trials:
            given["trials"] = self.trials
        else:
            given["seeds"] = self.seeds
        if self.minutes is not None:
            given["minutes"] = f"{self.minutes:g}"
        if self.options:
            given["set"] = [f"{name}={shown(value)}" for name, value in self.options.items()]
        name = "tune" if self.first else f"study {self.design.command}"
        return command_line(name, [self.data], given).replace(f"'{name}'", name)


def _differing(old: Cell, new: Cell) -> str:
    """Name the options that differ between two runs of a name: "lr 0.001 there, 0.01 now"."""
    differing = [name for name in {**old.options, **new.options} if old.options.get(name) != new.options.get(name)]

    def value(cell: Cell, name: str) -> str:
        return shown(cell.options[name]) if name in cell.options else "not set"

    return "; ".join(f"{name} {value(old, name)} there, {value(new, name)} now" for name in differing)


def _as_typed(values: tuple[object, ...] | Span) -> str:
    return str(values) if isinstance(values, Span) else ",".join(map(shown, values))


def _repeated(values: tuple[object, ...]) -> str:
    return next((shown(one) for one in values if values.count(one) > 1), "")


def _frozen(value: object) -> Any:
    """Convert JSON lists to tuples."""
    if isinstance(value, dict):
        return {name: _frozen(one) for name, one in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value


def shown(value: object) -> str:
    """Format a value of a factor as typed."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return "x".join(map(shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


class StudyFolder:
    """The files of a study, and the only place with their names."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.study = self.path / "study.json"
        self.cells = self.path / "cells"
        self.trials = self.path / "trials.json"
        self.results = self.path / "results.csv"
        self.page = self.path / "study.html"
        self.png, self.svg = self.path / "figure.png", self.path / "figure.svg"

    def cell(self, cell: Cell) -> Path:
        """The run folder of a cell."""
        return self.cells / cell.name

    def outcome(self, cell: Cell) -> Path:
        """The file with the reason why a cell ended without a result."""
        return self.cells / f"{cell.name}.json"

    def read(self) -> Study:
        """Read study.json; `RunError` if it is missing or damaged."""
        if not self.study.is_file():
            why = "there is no study.json in it" if self.path.is_dir() else "there is no such folder"
            raise RunError("not a study", where=self.path, why=why, hint="vitral study data DATA --models …")
        try:
            record = dict(read_json(self.study))
            record.pop(KEY, None)
            if record.pop("format", None) != _FORMAT:
                raise ValueError("it is of another version")
            return Study.from_json(record)
        except (OSError, ValueError, TypeError) as error:
            raise RunError("cannot read the study", where=self.study, why=str(error)) from error

    def write_trials(self, cells: Sequence[Cell]) -> None:
        """Write the values that a search has drawn."""
        record = {"format": _FORMAT, "trials": [dict(cell.factors) for cell in cells]}
        write_text(self.trials, sealed_json(record, indent=2))

    def read_trials(self, study: Study) -> list[Cell]:
        """Read the trials of a search that have begun; `RunError` if the file is damaged."""
        if not self.trials.is_file():
            return []
        try:
            record = read_json(self.trials)
            if record["format"] != _FORMAT:
                raise ValueError("it is of another version")
            trials = [_frozen(one) for one in record["trials"]]
            if not all(in_range(study.vary, one) for one in trials):
                raise ValueError("it has values outside the search")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            hint = "restore it from a copy, or another --out"
            raise RunError("cannot read the trials", where=self.trials, why=str(error), hint=hint) from error
        return [study.trial(number, factors) for number, factors in enumerate(trials)]

    def open(self, study: Study) -> None:
        """Write study.json, or check that the folder's study is a part of this one; `RunError` otherwise."""
        if self.study.exists():
            self._check_part(self.read(), study)
        elif self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise RunError(
                "this folder is not a study",
                where=self.path,
                why="it is not empty",
                hint="choose another folder with --out",
            )
        self.cells.mkdir(parents=True, exist_ok=True)
        write_text(self.study, sealed_json({"format": _FORMAT, **study.to_json()}, indent=2))

    def _check_part(self, old: Study, new: Study) -> None:
        """A study may be extended by models, fractions, values and seeds: every cell of the old one is in the new. A
        search may have more trials and more time.
        """
        hint = f"vitral study resume {self.path}, or another --out"
        new = dataclasses.replace(new, data=old.data) if same_path(old.data, new.data) else new
        if old.design.searches or new.design.searches:
            if dataclasses.replace(old, trials=new.trials, minutes=new.minutes, title=new.title) != new:
                why = "only the number of trials and the minutes of a search may change"
                raise RunError("this folder is another study", where=self.path, why=why, hint=hint)
            return
        cells = {cell.name: cell for cell in new.cells}
        for cell in old.cells:
            if cells.get(cell.name) == cell:
                continue
            own = cells.get(cell.name)
            otherwise = f"trains otherwise: {_differing(cell, own)}" if own else "does not have"
            why = f"it has {cell.name}, which this one {otherwise}"
            raise RunError("this folder is another study", where=self.path, why=why, hint=hint)
