"""Fewer FLOPs for the same accuracy: Nano/4 on CIFAR-10 by the default recipe, with patch dropout (`--patch-dropout`),
progressive resizing (`--start-size`), distillation (`--teacher`), and AdamW instead of Muon at two learning rates.

Each variant is trained twice: for as many epochs as the baseline, and for the number of epochs closest to its seconds
(by the variant's own seconds per epoch, seed 0), because a truncated schedule shows nothing. Seconds are training and
validation, without reading the data and the report; the teacher's training is included. Networks are trained on a tenth
of the training images; `python -m benchmarks fewer full` uses all of them and the recipe's number of epochs. Test
images are used once, at the end of each run; with more than one seed, figures are means. With `--keep FOLDER` runs stay
there, and the same command later reuses finished ones.

`python -m benchmarks fewer frozen` measures a frozen backbone: the network of `vitral demo`, trained on CIFAR-10, on a
tenth of MNIST's training digits. All layers are trained, then the head alone by steps, then the head on features that
are computed once (`--recipe linear-probe`), and the same again with cached features.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import vitral
from benchmarks.results import Options, Table
from vitral.console import command_line
from vitral.training.run_folder import RunFolder
from vitral.workflows.saving import command

# name → the options of a variant; the teacher is a run folder, which exists once it is trained
WAYS: dict[str, dict[str, Any]] = {
    "drop-25": {"patch_dropout": 0.25},
    "drop-50": {"patch_dropout": 0.5},
    "growing": {"start_size": 16},
    "teacher": {"teacher": ""},
    "adamw-1e-3": {"optimizer": "adamw", "lr": 1e-3},
    "adamw-3e-3": {"optimizer": "adamw", "lr": 3e-3},
}
SHARE: dict[str, Any] = {"data": "cifar10", "model": "Nano/4", "train_share": 0.1, "epochs": 8}
FULL: dict[str, Any] = {"data": "cifar10", "model": "Nano/4"}
TEACHER: dict[str, Any] = {"model": "C+Femto/4"}  # convolutions before the blocks: better in as many epochs

FROZEN: dict[str, Any] = {"data": "mnist", "init": "demo", "train_share": 0.1}
PROBE: dict[str, Any] = {"recipe": "linear-probe"}
BACKBONES: dict[str, dict[str, Any]] = {
    "all layers": {},
    "the head, by steps": {"freeze": ("[!h]*",)},
    "the head, on features": PROBE,
    "again": PROBE,
}

QUICK: dict[str, Any] = {"data": "digits", "train_share": 0.2, "epochs": 2}
QUICK_CHANGES = {"start_size": 4}  # of 8 pixels
QUICK_TEACHER: dict[str, Any] = {"model": "mu/2"}
QUICK_FROZEN: dict[str, Any] = {"data": "digits", "init": "demo", "train_share": 0.2}


@dataclass(frozen=True)
class Trained:
    """A finished run: accuracy, epochs and seconds, including the teacher's."""

    accuracy: float
    epochs: int
    seconds: float


def run(options: Options) -> list[Table]:
    """Measure the named variants, by default all, and the plain run."""
    if unknown := [name for name in options.names if name not in (*WAYS, "full", "frozen")]:
        raise SystemExit(f"no variant '{unknown[0]}'; there are {', '.join(WAYS)}, full for all images, and frozen")
    if "frozen" in options.names:
        if len(options.names) > 1:
            raise SystemExit("frozen is measured alone")
        return _frozen(options)
    full = "full" in options.names
    base = QUICK if options.quick else FULL if full else SHARE
    if not options.quick and not options.data("cifar10.tar"):
        return []
    ways = [{**WAYS[name]} for name in options.names if name != "full"] or [{**way} for way in WAYS.values()]
    for way in ways if options.quick else ():
        way |= {name: value for name, value in QUICK_CHANGES.items() if name in way}
    name = "full" if full else ""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep / f"fewer-{name}" if options.keep else Path(temporary)
        return [_table(_Bench(options, base, folder), ways, name)]


class _Bench:
    """Runs on the same data, seed by seed; the teacher of a seed is trained at its first use."""

    def __init__(self, options: Options, base: Mapping[str, Any], folder: Path):
        self.options, self.base, self.folder = options, base, folder
        self.teachers: dict[int, Trained] = {}

    def train(self, changes: Mapping[str, Any]) -> list[Trained]:
        """Train one run for each seed."""
        return [self._train(changes, seed) for seed in range(self.options.seeds)]

    def teacher(self, seed: int) -> Trained:
        """Train the teacher of this seed in `self.folder`, on the same training images."""
        if seed not in self.teachers:
            model = QUICK_TEACHER if self.options.quick else TEACHER
            self.teachers[seed] = self.fit(model, seed, self.folder / f"teacher-{seed}")
        return self.teachers[seed]

    def _train(self, changes: Mapping[str, Any], seed: int) -> Trained:
        changes, before = {**changes}, 0.0
        if "teacher" in changes:
            before = self.teacher(seed).seconds
            changes["teacher"] = str(self.folder / f"teacher-{seed}")
        way = "-".join(f"{name}-{value}" for name, value in changes.items() if name != "teacher")
        taught = "-taught" * ("teacher" in changes)
        found = self.fit(changes, seed, self.folder / f"run{taught}-{way}-{seed}")
        return Trained(found.accuracy, found.epochs, found.seconds + before)

    def fit(self, changes: Mapping[str, Any], seed: int, out: Path) -> Trained:
        """Train one run."""
        options = self.options
        result = vitral.train(
            **{**self.base, **changes}, seed=seed, data_root=str(options.data_root), out=str(out),
            device=options.device, quiet=options.quick, resume=RunFolder(out).exists(),
        ).result  # fmt: skip
        accuracy = result.get("test_accuracy", result.get("val_accuracy"))
        return Trained(accuracy, result["epochs"], result["seconds"])


def _table(bench: _Bench, ways: Sequence[Mapping[str, Any]], name: str) -> Table:
    plain = bench.train({})
    rows = [{"way": "plain", **_means(plain), **_nothing()}]
    for way in ways:
        same = bench.train(way)
        row = {"way": _flags(way), **_means(same), **_nothing()}
        if epochs := _fitting(bench, way, plain[0], same[0]):
            fitting = same if epochs == same[0].epochs else bench.train({**way, "epochs": epochs})
            row |= {f"fit_{key}": value for key, value in _means(fitting).items()}
        rows.append(row)
    if bench.teachers:
        taught = [bench.teacher(seed) for seed in range(bench.options.seeds)]
        rows.append({"way": "the teacher itself", **_means(taught), **_nothing()})
    columns = {
        "way": "way", "n": "seeds|d", "epochs": "epochs|d", "seconds": "seconds|.0f", "accuracy": "accuracy|.2%",
        "fit_epochs": "epochs in the plain run's time|d", "fit_seconds": "seconds|.0f",
        "fit_accuracy": "accuracy|.2%",
    }  # fmt: skip
    return Table(f"`{command(bench.base)}` and its variants", columns, rows, name=name)


def _frozen(options: Options) -> list[Table]:
    """Measure the savings of a frozen backbone."""
    base = QUICK_FROZEN if options.quick else FROZEN
    if not options.quick and not options.data("mnist"):
        return []
    runs: dict[str, list[Trained]] = {}
    for seed in range(options.seeds):  # each with an empty cache of features
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
            bench = _Bench(options, base, Path(folder))
            for number, (way, changes) in enumerate(BACKBONES.items()):
                given = {**changes, "epochs": 1} if options.quick and changes is not PROBE else changes
                runs.setdefault(way, []).append(bench.fit(given, seed, Path(folder) / f"run-{number}"))
    rows = [{"way": way, "typed": _typed(BACKBONES[way]), **_means(found)} for way, found in runs.items()]
    columns = {
        "way": "trained", "typed": "", "n": "seeds|d", "epochs": "epochs|d", "seconds": "seconds|.1f",
        "accuracy": "accuracy|.2%",
    }  # fmt: skip
    return [Table(f"`{command(base)}` and a frozen backbone", columns, rows, "frozen")]


def _fitting(bench: _Bench, way: Mapping[str, Any], plain: Trained, same: Trained) -> int:
    """Count the epochs of a variant that fit into the plain run's seconds; 0 if the teacher's training leaves none."""
    before = bench.teacher(0).seconds if "teacher" in way else 0.0
    return max(0, round((plain.seconds - before) / ((same.seconds - before) / same.epochs)))


def _means(runs: Sequence[Trained]) -> dict[str, Any]:
    return {
        "n": len(runs), "epochs": runs[0].epochs, "seconds": statistics.mean(r.seconds for r in runs),
        "accuracy": statistics.mean(r.accuracy for r in runs),
    }  # fmt: skip


def _nothing() -> dict[str, Any]:
    return dict.fromkeys(("fit_epochs", "fit_seconds", "fit_accuracy"))


def _flags(changes: Mapping[str, Any]) -> str:
    """Format as "--start-size 16 --patch-dropout 0.25"."""
    return _typed({name: value or "RUN" for name, value in changes.items()})


def _typed(options: Mapping[str, Any]) -> str:
    """Format options as typed; empty if there are none."""
    words = command_line("train", [], options).removeprefix("vitral train").strip()
    return f"`{words}`" if words else ""
