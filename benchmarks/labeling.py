"""Work that `vitral label` saves: a simulated person labels images and answers truly.

`python -m benchmarks labeling photos/` takes a folder, by default CIFAR-10. Up to 2,000 images are labeled, and the
accuracy is that of the suggestions for half as many others. The person begins with three images of each class. Then
they label 20 at a time: at random, the least certain suggestions first, or in the order of the page ("most useful
first"). "To 90%" counts the labels until the suggestions reach 90% of the accuracy that all labels bring. "Above 95%"
is the fraction of right ones among the suggestions with a probability above 95%, while labels are added at random.
"Wrong labels" are 10% of the labels flipped to another class at random, and the fraction of them among as many of the
most doubtful labels. Ten seeds, because the labels until 90% vary from 75 to 255 with the seed.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.results import Options, Table
from vitral.data import DataSet, load
from vitral.inference.options import InferenceOptions
from vitral.labeling.insight import FEWEST, SURE, Insight, Labels, insight
from vitral.workflows.tables.features import features_of

POOL = 2000
STEP = 20
REACHED = 0.9
FLIPPED = 0.1


def run(options: Options) -> list[Table]:
    """Simulate each seed on each data set."""
    places = options.names or [str(path) for path in [options.data("cifar10.tar")] if path]
    return [_table(place, options) for place in (["digits"] if options.quick else places)]


def _table(place: str, options: Options) -> Table:
    data, quick = load(place), options.quick
    count = 200 if quick else min(POOL, 2 * len(data["train"]) // 3)
    rows = [_row(data, seed, count, count // 2) for seed in range(options.seeds)]
    rows.append(_mean(rows))
    columns = {
        "seed": "seed",
        "all": "accuracy, all labels|.1%",
        "random": "labels to 90%, at random|,.0f",
        "doubtful": "least certain first|,.0f",
        "useful": "most useful first|,.0f",
        "sure": "suggestions above 95%|,.0f",
        "right": "right|.1%",
        "found": "wrong labels found|.1%",
        "seconds": "seconds for each insight|.2f",
    }
    caption = f"Labels that a person must give: {data.name}, {count:,} images, {count // 2:,} others to measure"
    return Table(caption, columns, rows, data.name if options.names else "")


def _mean(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each column; of the right suggestions, the fraction among those of all seeds."""
    mean: dict[str, Any] = {name: float(np.mean([row[name] or 0 for row in rows])) for name in rows[0]}
    right = sum(row["right"] * row["sure"] for row in rows if row["sure"])
    return mean | {"seed": "mean", "right": right / (len(rows) * mean["sure"]) if mean["sure"] else None}


def _row(data: DataSet, seed: int, count: int, test: int) -> dict[str, Any]:
    images = data["train"].select(np.random.default_rng(seed).permutation(len(data["train"]))[: count + test])
    predictor = InferenceOptions("cpu", "fp32").load("backbone")
    values = features_of(predictor.model, images, predictor.preprocessing, predictor.machine)
    person = Person(values.numpy().astype(np.float64), np.asarray(images.labels), count, seed)
    best = person.accuracy_of_all()
    by_chance, sure, right, seconds = person.labels_until(REACHED * best, "random")
    doubtful, *_ = person.labels_until(REACHED * best, "doubtful")
    useful, *_ = person.labels_until(REACHED * best, "useful")
    return {
        "seed": seed,
        "all": best,
        "random": by_chance,
        "doubtful": doubtful,
        "useful": useful,
        "sure": sure,
        "right": right / sure if sure else None,
        "found": person.found(),
        "seconds": seconds,
    }


class Person:
    """Someone who answers truly; the images from `count` on are never asked."""

    def __init__(self, features: np.ndarray, truth: np.ndarray, count: int, seed: int):
        self.features, self.truth, self.count, self.seed = features, truth, count, seed
        self.classes = int(truth.max()) + 1
        self.groups = np.arange(len(truth))

    def look(self, labels: np.ndarray) -> Insight:
        """Return the insight for these labels, -1 for none."""
        known = labels >= 0
        given = Labels(labels, known, ~known, np.zeros(len(labels), bool), self.classes)
        return insight(self.features, self.groups, given)

    def accuracy(self, found: Insight) -> float:
        """Return the accuracy of the suggestions for images that are never asked."""
        return float((found.suggested == self.truth)[self.count :].mean())

    def accuracy_of_all(self) -> float:
        """Return the accuracy with every label."""
        return self.accuracy(self.look(np.where(self.groups < self.count, self.truth, -1)))

    def labels_until(self, wanted: float, kind: str) -> tuple[int, int, int, float]:
        """Label in an order (random, doubtful, useful) until the accuracy is reached.

        Returns the number of labels, of all suggestions above 95% and of right ones on the way, and the mean seconds of
        an insight.
        """
        rng = np.random.default_rng(self.seed)
        order = rng.permutation(self.count)
        labels = np.full(len(self.truth), -1)
        for one in range(self.classes):
            first = order[self.truth[order] == one][:FEWEST]
            labels[first] = one
        sure = right = looks = 0
        begun = time.perf_counter()
        while True:
            found, looks = self.look(labels), looks + 1
            open_ = (labels < 0) & (found.probability > SURE)
            sure, right = sure + int(open_.sum()), right + int((open_ & (found.suggested == self.truth)).sum())
            waiting = order[labels[order] < 0]
            if self.accuracy(found) >= wanted or not len(waiting):
                return int((labels >= 0).sum()), sure, right, (time.perf_counter() - begun) / looks
            if kind == "doubtful":
                waiting = waiting[np.argsort(found.probability[waiting], kind="stable")]
            if kind == "useful":
                waiting = np.asarray([one for one in found.next if one < self.count])
            labels[waiting[:STEP]] = self.truth[waiting[:STEP]]

    def found(self) -> float:
        """Return the fraction of flipped labels among as many of the most doubtful ones."""
        rng = np.random.default_rng(self.seed)
        labels = np.where(self.groups < self.count, self.truth, -1)
        flipped = rng.permutation(self.count)[: round(FLIPPED * self.count)]
        labels[flipped] = (labels[flipped] + rng.integers(1, self.classes, len(flipped))) % self.classes
        worst = np.argsort(-self.look(labels).doubt, kind="stable")[: len(flipped)]
        return float(np.isin(flipped, worst).mean())
