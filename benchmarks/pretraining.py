"""Pretraining without labels, then few labels: `vitral pretrain` on the images of CIFAR-10, and 500 labels.

Each method learns for `MINUTES` from the 50,000 training images without labels; then its weights are fine-tuned on 500
labeled ones, 50 of each class. Beside it: the same network from scratch on the 500 for as long as both together, and
the default of `vitral train` from scratch. Linear probes and k nearest neighbors on the frozen features use the same
500, and those on raw pixels, too; the regularization of the probe is the best on a fifth of them. Accuracy is that on
2,000 test images; with more than one seed, figures are means. A run that stops because its features have collapsed is a
row without accuracies.

`python -m benchmarks pretraining` measures for an hour each; a number is other minutes: `pretraining 5`. Names of
methods select them: `pretraining 5 mae dino`.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

import vitral
from benchmarks.results import Options, Table
from vitral.data import Split, load
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.device import choose
from vitral.errors import TrainingError
from vitral.evaluation.fewshot import least_squares
from vitral.evaluation.neighbors import knn
from vitral.inference.features import head_features
from vitral.pretraining.methods import METHODS
from vitral.workflows.planning import plan, run_data

MINUTES = 60.0
FINE_TUNING = 0.1
"""Minutes of fine-tuning, as a share of those of pretraining."""
LABELED, TESTED = 500, 2000
RIDGES = tuple(2.0**power for power in range(0, 18, 3))
MODEL = "Nano/4"
QUICK: dict[str, Any] = {"minutes": 0.02, "labeled": 60, "tested": 100, "data": "digits", "model": "mu/2"}


def run(options: Options) -> list[Table]:
    """Measure the named methods, by default all."""
    numbers = [float(name) for name in options.names if name.replace(".", "").isdigit()]
    methods = [name for name in options.names if not name.replace(".", "").isdigit()] or list(METHODS)
    if unknown := [name for name in methods if name not in METHODS]:
        raise SystemExit(f"no method '{unknown[0]}'; there are {', '.join(METHODS)}")
    given = {"minutes": MINUTES, "labeled": LABELED, "tested": TESTED, "data": "cifar10", "model": MODEL}
    if options.quick:
        given = QUICK
    elif not options.data("cifar10.tar"):
        return []
    if numbers:
        given = {**given, "minutes": numbers[0]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep / "pretraining" if options.keep else Path(temporary)
        found = [_Bench(options, given, folder / str(seed), seed).rows(methods) for seed in range(options.seeds)]
    rows = [_mean(parts) for parts in zip(*found, strict=True)]
    columns = {
        "way": "way",
        "n": "seeds|d",
        "minutes": "minutes|.2f",
        "rate": "images/s without labels|,.0f",
        "accuracy": "fine-tuned|.1%",
        "probe": "linear probe|.1%",
        "knn": "k-NN|.1%",
        "rank": "rank|.1f",
    }
    caption = f"{given['data']}, {given['minutes']:g} minutes without labels, then {given['labeled']} labels"
    return [Table(caption, columns, rows)]


class _Bench:
    """The runs of one seed."""

    def __init__(self, options: Options, given: Mapping[str, Any], folder: Path, seed: int):
        self.options, self.given, self.folder, self.seed = options, given, folder, seed
        whole = load(given["data"], root=options.data_root)
        rng = np.random.default_rng(seed)
        labels = whole["train"].labels
        each = given["labeled"] // len(whole.classes)
        drawn = [rng.permutation(np.flatnonzero(labels == k))[:each] for k in range(len(whole.classes))]
        test = whole["test"]
        chosen = rng.permutation(len(test))[: given["tested"]]
        self.labeled, self.tested = whole["train"].select(np.concatenate(drawn)), test.select(np.sort(chosen))
        self.few = replace(whole, splits={"train": self.labeled, "test": self.tested})
        self.minutes: float = given["minutes"]

    def rows(self, methods: Sequence[str]) -> list[dict[str, Any]]:
        """One row for each method and for what it is compared with."""
        after = FINE_TUNING * self.minutes
        scratch = self._tuned("scratch", self.minutes + after, model=self.given["model"], pool="mean")
        default = self._tuned("default", self.minutes + after)
        rows = [
            {"way": f"{self.given['model']} from scratch", "minutes": self.minutes + after, "accuracy": scratch},
            {"way": "the default from scratch", "minutes": self.minutes + after, "accuracy": default},
            {"way": "raw pixels", **self._classified(*map(self._pixels, (self.labeled, self.tested)))},
        ]
        return [*rows, *map(self._pretrained, methods)]

    def _pretrained(self, method: str) -> dict[str, Any]:
        out = self.folder / method
        row: dict[str, Any] = {"way": method, "minutes": (1 + FINE_TUNING) * self.minutes}
        try:
            found = vitral.pretrain(
                self.given["data"],
                method,
                model=self.given["model"],
                minutes=self.minutes,
                seed=self.seed,
                val_fraction=0.02,
                data_root=str(self.options.data_root),
                device=self.options.device,
                out=str(out),
                quiet=self.options.quick,
                resume=out.exists(),
            )
        except TrainingError as stopped:
            return {**row, "way": f"{method}: {stopped.what}"}
        sides = [self._features(out, side) for side in (self.labeled, self.tested)]
        row |= {"rate": found.result["images_per_second"], "rank": found.result["feature_rank"]}
        tuned = self._tuned(f"{method}-tuned", FINE_TUNING * self.minutes, init=str(out))
        return {**row, "accuracy": tuned, **self._classified(*sides)}

    def _tuned(self, name: str, minutes: float, **options: Any) -> float:
        """Accuracy on the test images of a network trained on the labeled ones."""
        out = self.folder / name
        with (
            patch.object(plan, "load", lambda data, root="data", **more: self.few),
            patch.object(run_data, "load", lambda data, root="data", **more: self.few),
        ):
            result = vitral.train(
                self.given["data"],
                minutes=minutes,
                seed=self.seed,
                device=self.options.device,
                out=str(out),
                quiet=self.options.quick,
                resume=out.exists(),
                **options,
            ).result
        return float(result["test_accuracy"])

    def _features(self, out: Path, side: Split) -> torch.Tensor:
        predictor = vitral.load(out, device=self.options.device, precision="fp32", engine="plain")
        batches = Batches(side, predictor.preprocessing, batch_size=128, device=predictor.machine.device)
        parts = [
            head_features(predictor.model, one.images, predictor.preprocessing, predictor.machine)
            for one in batches.epoch()
        ]
        return torch.cat(parts)

    def _pixels(self, side: Split) -> torch.Tensor:
        first = side.image(0)
        channels = first.shape[2]
        preprocessing = Preprocessing(first.shape[:2], channels, mean=(0.5,) * channels, std=(0.5,) * channels)
        batches = Batches(side, preprocessing, batch_size=len(side), device=choose("cpu").device)
        return preprocessing.standardize(next(batches.epoch()).images).flatten(1)

    def _classified(self, train: torch.Tensor, test: torch.Tensor) -> dict[str, float]:
        """Accuracies of a linear probe and of k-NN."""
        truth, classes = torch.from_numpy(self.tested.labels), len(self.few.classes)
        linear = probe(train, torch.from_numpy(self.labeled.labels), test, classes)
        near = knn(train, self.labeled.labels, test, 20, classes=classes)
        return {"probe": accuracy(linear, truth), "knn": accuracy(near, truth)}


def probe(train: torch.Tensor, labels: torch.Tensor, test: torch.Tensor, classes: int) -> torch.Tensor:
    """Scores (m, K) of test features (m, D), by least squares with the best of six λ on each fifth labeled image.

    The labeled images are in the order of their classes, so that each class has its share of those held out.
    """
    held = torch.arange(len(labels)) % 5 == 4

    def held_out(ridge: float) -> float:
        scores = least_squares(train[~held], labels[~held], train[held], classes, ridge)
        return accuracy(scores, labels[held])

    return least_squares(train, labels, test, classes, max(RIDGES, key=held_out))


def accuracy(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of rows whose highest score is that of the label."""
    return float((scores.argmax(1) == labels).double().mean())


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    names = {name for row in rows for name in row if name != "way"}
    means = {name: statistics.mean(row[name] for row in rows if name in row) for name in names}
    return {**dict.fromkeys(_FIGURES), "way": rows[0]["way"], "n": len(rows), **means}


_FIGURES = ("minutes", "rate", "accuracy", "probe", "knn", "rank")
"""Columns that may have no value in a row."""
