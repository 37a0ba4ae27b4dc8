"""Whole runs: `vitral train` with only the options shown. Validation images are split off the training set, test images
are used once, at the end; intervals are 95 % (Wilson) of one run. `mnist-7562` validates on the test digits, as its
write-up does. Seconds are training and validation, without reading the data and the report. With more than one seed,
figures are means, and least and greatest are given.

Runs are deleted once they are measured. With `--keep FOLDER` they stay there, and the same command later reuses
finished runs and resumes a stopped one.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vitral
from benchmarks.results import Options, Table
from vitral.evaluation.metrics import Evaluation
from vitral.pretraining.methods import command
from vitral.training.run_folder import RunFolder
from vitral.workflows.quantize import quantize

# name → the options, and the required data
RUNS: dict[str, tuple[dict[str, Any], str | None]] = {
    "digits": ({"data": "digits"}, None),
    "mnist": ({"data": "mnist"}, "mnist"),
    "mnist-7562": ({"data": "mnist", "recipe": "mnist-7562"}, "mnist"),
    "mnist-7562-minute": ({"data": "mnist", "recipe": "mnist-7562-minute"}, "mnist"),
    "mnist-15": ({"data": "mnist", "epochs": 15}, "mnist"),
    "mnist-7562-small": ({"data": "mnist", "model": "mnist-7562", "epochs": 15}, "mnist"),
    "cifar10": ({"data": "cifar10"}, "cifar10.tar"),
    "cifar10-hour": (
        {"data": "cifar10", "epochs": 28},
        "cifar10.tar",
    ),  # estimated: an hour of two Zen 5 cores
    "cifar10-60-minutes": ({"data": "cifar10", "minutes": 60}, "cifar10.tar"),  # as many epochs as fit here
    "cifar10-minutes": ({"data": "cifar10", "minutes": 2.5}, "cifar10.tar"),  # for a GPU
    "tiny-imagenet": ({"data": "tiny-imagenet.tar", "minutes": 10.0, "init": "none"}, "tiny-imagenet.tar"),  # for a GPU
}
_SHIFTS: list[dict[str, Any]] = [{"tta": "shifts"}]
_VIEWS: list[dict[str, Any]] = [{"tta": "mirror"}, {"tta": "both"}]
_INTEGERS: list[dict[str, Any]] = [{"precision": "int8"}]
OTHERWISE = {
    "mnist": [*_SHIFTS, *_INTEGERS],
    "cifar10": [*_VIEWS, *_INTEGERS],
    "cifar10-hour": [*_VIEWS, *_INTEGERS],
    "cifar10-60-minutes": _VIEWS,
    "cifar10-minutes": _VIEWS,
}
"""Run → further options of `vitral evaluate RUN` on the test images; integers follow `vitral quantize RUN`."""

Result = Mapping[str, Any]
History = Sequence[Mapping[str, Any]]


def run(options: Options) -> list[Table]:
    """Measure the named runs, by default all: two tables each."""
    tables = []
    for name in options.names or RUNS:
        if name not in RUNS:
            raise SystemExit(f"no run '{name}'; there are {', '.join(RUNS)}")
        given, needs = RUNS[name]
        if needs and not options.data(needs):
            continue
        runs = [_train(name, given, seed, options) for seed in range(options.seeds)]
        tables += [_figures(name, given, [result for result, _ in runs]), course(name, runs[0][1])]
    return tables


def _train(name: str, given: dict[str, Any], seed: int, options: Options) -> tuple[Result, History]:
    """Train one run in its own folder, temporary unless `--keep` is given."""
    if options.quick:
        given = {**given, "epochs": 1, "minutes": None}
    if given["data"].endswith(".tar"):
        given = {**given, "data": str(options.data_root / given["data"])}
    with tempfile.TemporaryDirectory() as folder:
        out = (options.keep or Path(folder)) / f"{name}-{seed}"
        run = vitral.train(
            **given,
            seed=seed,
            data_root=str(options.data_root),
            out=str(out),
            device=options.device,
            quiet=options.quick,
            resume=RunFolder(out).exists(),
        )
        otherwise = {} if options.quick else {_flags(how): _evaluated(out, how) for how in OTHERWISE.get(name, ())}
        return {**run.result, **otherwise}, read_history(out / "metrics.jsonl")


def _flags(how: Mapping[str, Any]) -> str:
    return f"test, {' '.join(f'--{option} {value}' for option, value in how.items())}"


def _evaluated(run: Path, how: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate a finished run on its test images with other options."""
    if how.get("precision") == "int8":
        quantize(run)
    return vitral.evaluate(run, split="test", **how).to_json()


def read_history(path: Path) -> History:
    """Read the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _figures(name: str, given: dict[str, Any], results: Sequence[Result]) -> Table:
    last = "test" if "test" in results[0] else "val"
    rows = [
        {"what": split, **_accuracy(results, split)}
        for split in ("val", "test", *(split for split in results[0] if split.startswith("test, ")))
        if split in results[0]
    ]
    first = results[0]
    caption = (
        f"`{command(given)}`: {first['model']}, {first['parameters']:,} parameters, {_epochs(results)} epochs, "
        f"{first['precision']}, {_speed(results)}; "
        f"best epoch {first['best_epoch']}, {'test set kept to the end' if last == 'test' else 'validated on test'}"
    )
    columns = {
        "what": "images",
        "images": "|,d",
        "n": "seeds|d",
        "accuracy": "accuracy|.2%",
        "interval": "95 % interval",
        "least": "least|.2%",
        "greatest": "greatest|.2%",
    }
    if len(results) == 1:
        del columns["least"], columns["greatest"]
    return Table(caption, columns, rows, name=name)


def _epochs(results: Sequence[Result]) -> str:
    """Format the number of epochs, a range if it differs between seeds."""
    least, most = (function(result["epochs"] for result in results) for function in (min, max))
    return str(most) if least == most else f"{least} to {most}"


def _speed(results: Sequence[Result]) -> str:
    """Format median seconds and images a second by device: seeds may have run in parallel on fewer threads."""
    parts = []
    for device in dict.fromkeys(result["device"] for result in results):
        seeds = [seed for seed, result in enumerate(results) if result["device"] == device]
        seconds, rate = (
            statistics.median(results[seed][key] for seed in seeds) for key in ("seconds", "images_per_second")
        )
        which = f" (seeds {', '.join(map(str, seeds))})" if len(seeds) < len(results) else ""
        parts.append(f"{seconds:.0f} s, {rate:,.0f} images/s in training on {device}{which}")
    return "; ".join(parts)


def _accuracy(results: Sequence[Result], split: str) -> dict[str, Any]:
    found = [Evaluation.from_json(result[split]) for result in results]
    accuracies = [one.accuracy for one in found]
    low, high = found[0].accuracy_interval
    return {
        "images": found[0].images,
        "n": len(found),
        "accuracy": statistics.mean(accuracies),
        "interval": f"{low:.2%} – {high:.2%}" + (" (seed 0)" if len(found) > 1 else ""),
        "least": min(accuracies),
        "greatest": max(accuracies),
    }


def course(name: str, history: History, caption: str = "By seconds, seed 0") -> Table:
    """Tabulate accuracy by seconds at about twelve epochs spread over the run."""
    marks, seconds = [], 0.0
    every = max(1, len(history) // 12)
    for line in history:
        seconds += line["seconds"]
        if line["epoch"] % every == 0 or line["epoch"] in (1, len(history)):
            marks.append({"epoch": line["epoch"], "seconds": seconds, **_known(line)})
    columns = {
        "epoch": "epoch|d",
        "seconds": "seconds|.0f",
        "train_loss": "training loss|.4f",
        "val_loss": "val loss|.4f",
        "val_accuracy": "val accuracy|.2%",
    }
    return Table(caption, columns, marks, name=name)


def _known(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: line.get(key) for key in ("train_loss", "val_loss", "val_accuracy")}
