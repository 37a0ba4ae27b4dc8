"""Other tasks and other networks by `vitral train` and its plan: several labels an image, a number, and networks of
timm and torchvision.

*Two digits* are two MNIST digits side by side in an image of 28 × 56 pixels, labeled with both. *An angle* is an MNIST
digit turned by -60 to 60 degrees. 12,000 images to train, with 1,200 for validation, and 2,000 to test; digits of the
test images are test digits. Both have four minutes. The networks of timm and torchvision learn the digits in the
package (8 × 8 pixels) from random weights at 32 pixels, for 30 epochs.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sklearn import metrics

import vitral
from benchmarks.results import Options, Table
from vitral.data import Split, load
from vitral.data.options import DataOptions
from vitral.inference.options import AUTO
from vitral.workflows.evaluate import evaluate_images

MINUTES = 4.0
TRAINED, TESTED = 12_000, 2_000
NETWORKS = ("timm:efficientnet_b0", "torchvision:resnet18", "C+Femto/4")
EPOCHS = 30

Drawn = tuple[Image.Image, str]
"""An image, and its cell in the table."""


def run(options: Options) -> list[Table]:
    """Measure the parts that are named, by default all."""
    parts: Mapping[str, Callable[[Options], Table]] = {"labels": _labels, "numbers": _numbers, "networks": _networks}
    if unknown := [name for name in options.names if name not in parts]:
        raise SystemExit(f"no part '{unknown[0]}'; there are {', '.join(parts)}")
    needed = options.quick or options.data("mnist")
    return [
        part(options)
        for name, part in parts.items()
        if name in (options.names or parts) and (needed or name == "networks")
    ]


def _digits(options: Options, split: str) -> Split:
    if options.quick:
        return load("digits")["train"]
    return load("mnist", root=options.data_root)[split]


def _two_digits(digits: Split, rng: np.random.Generator) -> Drawn:
    pair = rng.integers(0, len(digits), 2)
    image = Image.fromarray(np.hstack([digits.image(int(i), 1)[..., 0] for i in pair]))
    return image, "|".join(sorted({str(digits.labels[i]) for i in pair}))


def _turned(digits: Split, rng: np.random.Generator) -> Drawn:
    angle = rng.uniform(-60, 60)
    image = Image.fromarray(digits.image(int(rng.integers(len(digits))), 1)[..., 0])
    return image.rotate(angle, Image.Resampling.BILINEAR), f"{angle:.3f}"


def _written(folder: Path, column: str, draw: Callable[[Split, np.random.Generator], Drawn], options: Options) -> Path:
    """Write images and their table."""
    rng = np.random.default_rng(0)
    counts = {"train": 200, "test": 50} if options.quick else {"train": TRAINED, "test": TESTED}
    with open(folder / "table.csv", "w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["file", column, "split"])
        for split, count in counts.items():
            digits = _digits(options, split)
            for number in range(count):
                image, cell = draw(digits, rng)
                image.save(folder / f"{split}-{number}.png")
                table.writerow([f"{split}-{number}.png", cell, split])
    return folder / "table.csv"


def _trained(table: Path, out: Path, options: Options) -> tuple[Any, np.ndarray, np.ndarray]:
    """Train within the minutes; return the evaluation on test, its predicted values, and the true ones."""
    limit: dict[str, Any] = {"epochs": 1} if options.quick else {"minutes": MINUTES}
    run = vitral.train(str(table), out=str(out), device=options.device, quiet=options.quick, val_fraction=0.1, **limit)
    found = evaluate_images(run.folder, DataOptions(str(table), "test"), AUTO)
    return found.evaluation, found.probabilities, found.images.labels


def _labels(options: Options) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        table = _written(Path(folder), "labels", _two_digits, options)
        own, values, truth = _trained(table, Path(folder) / "run", options)
    thresholds = np.array([one.threshold for one in own.per_label])
    rows = {
        "mAP": (own.mean_average_precision, metrics.average_precision_score(truth, values, average="macro")),
        "macro F1": (own.macro_f1, metrics.f1_score(truth, values >= thresholds, average="macro")),
    }
    return _beside("Two digits an image", "labels", rows)


def _numbers(options: Options) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        table = _written(Path(folder), "angle", _turned, options)
        own, values, truth = _trained(table, Path(folder) / "run", options)
    rows = {
        "R²": (own.r2, metrics.r2_score(truth, values)),
        "MAE, degrees": (own.per_number[0].mae, metrics.mean_absolute_error(truth, values)),
    }
    return _beside("An angle", "numbers", rows)


def _beside(title: str, name: str, figures: Mapping[str, tuple[float, float]]) -> Table:
    rows = [{"what": what, "own": own, "theirs": theirs} for what, (own, theirs) in figures.items()]
    columns = {"what": f"on {TESTED:,} test images", "own": "vitral|.4f", "theirs": "scikit-learn|.4f"}
    return Table(title, columns, rows, name=name)


def _networks(options: Options) -> Table:
    rows = []
    for name in NETWORKS[-1:] if options.quick else NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            run = vitral.train(
                "digits",
                model=name,
                image_size=32,
                channels=3,
                epochs=1 if options.quick else EPOCHS,
                device=options.device,
                out=str(Path(folder) / "run"),
                quiet=options.quick,
            )
        test = run.result["test"]
        low, high = test["accuracy_interval"]
        rows.append(
            {
                "model": name,
                "parameters": run.result["parameters"],
                "accuracy": test["accuracy"],
                "interval": f"{low:.1%} to {high:.1%}",
                "seconds": run.result["seconds"],
            }
        )
    columns = {
        "model": "network",
        "parameters": "parameters|,d",
        "accuracy": "test accuracy|.2%",
        "interval": "95 % interval",
        "seconds": "seconds|.0f",
    }
    return Table(f"Networks of other libraries on 360 test digits, {EPOCHS} epochs", columns, rows, name="networks")
