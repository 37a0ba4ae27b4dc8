"""Wrong labels (`vitral data check DATA --labels`): 5 % of 10,000 labels flipped at random to another class, ranked by
out-of-fold predictions of a linear probe on the features of `backbone`.

CIFAR-10's are the 10,000 test images, MNIST's 10,000 of the training digits. "In the first 6 %" is the share of the
flips among the first 600 of the ranking; "listed" are the labels that the command calls wrong and replaces. Accuracy is
that of the same probe, fitted to four fifths of the images, on the true labels of the others: with the flipped labels,
with the listed ones replaced, and with the true ones.

Tried on the features of `demo`: ranking by the margin to the most probable other class (75 % of CIFAR-10's flips in the
first 6 %) and by the margin after subtracting each class's threshold (73 %), instead of by the label's probability
(88 %). Confident learning with ten times the odds called 264 of 4,000 right labels wrong (features of `backbone`).
"""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np

from benchmarks.results import Options, Table
from vitral.data import DataSet, Split, load
from vitral.data.checks.groups import folds_of
from vitral.evaluation.label_errors import estimate
from vitral.evaluation.probe import out_of_fold
from vitral.inference.options import InferenceOptions
from vitral.workflows.tables.features import features_of

FLIPPED = 0.05
IMAGES = 10_000


def run(options: Options) -> list[Table]:
    """Flip labels of each set, and rank them."""
    if options.quick:
        digits = load("digits")["train"]
        return [_table({"digits": _features(digits.select(np.arange(300)))})]
    sets = {}
    if path := options.data("cifar10.tar"):
        sets["cifar10"] = _features(_drawn(load(str(path)), "test"))
    if path := options.data("mnist"):
        sets["mnist"] = _features(_drawn(load(str(path)), "train"))
    return [_table(sets)] if sets else []


def _drawn(dataset: DataSet, split: str) -> Split:
    images = dataset[split]
    return images.select(np.random.default_rng(0).permutation(len(images))[:IMAGES])


def _features(images: Split) -> tuple[np.ndarray, np.ndarray]:
    predictor = InferenceOptions("cpu", "fp32").load("backbone")
    values = features_of(predictor.model, images, predictor.preprocessing, predictor.machine)
    return values.numpy().astype(np.float64), images.labels


def _table(sets: dict[str, tuple[np.ndarray, np.ndarray]]) -> Table:
    rows = [{"data": name, **_row(*given)} for name, given in sets.items()]
    columns = {
        "data": "data",
        "images": "images|,d",
        "agreement": "agree with predictions|.1%",
        "found": "in the first 6 %|.1%",
        "listed": "listed|d",
        "precision": "of them wrong|.1%",
        "estimated": "estimated errors|d",
        "right_before": "right labels|.1%",
        "right_after": "after replacing|.1%",
        "flipped": "accuracy, flipped|.2%",
        "replaced": "replaced|.2%",
        "true": "true|.2%",
        "seconds": "seconds|.1f",
    }
    return Table("Flipped labels found", columns, rows)


def _row(features: np.ndarray, truth: np.ndarray) -> dict[str, Any]:
    count, classes = len(truth), int(truth.max()) + 1
    rng = np.random.default_rng(0)
    flips = rng.permutation(count)[: round(FLIPPED * count)]
    labels = truth.copy()
    labels[flips] = (truth[flips] + rng.integers(1, classes, len(flips))) % classes
    start = time.perf_counter()
    probabilities, strength = out_of_fold(features, labels, classes, folds_of(labels, None, 5))
    found = estimate(labels, probabilities)
    seconds = time.perf_counter() - start
    wrong = labels != truth
    replaced = np.where(found.wrong, found.suggested, labels)
    sides = {"flipped": labels, "replaced": replaced, "true": truth}
    return {
        "images": count,
        "agreement": float((probabilities.argmax(1) == labels).mean()),
        "found": float(wrong[found.order[: round(0.06 * count)]].sum() / wrong.sum()),
        "listed": int(found.wrong.sum()),
        "precision": float(wrong[found.wrong].mean()),
        "estimated": found.errors,
        "right_before": float((labels == truth).mean()),
        "right_after": float((replaced == truth).mean()),
        **{name: _accuracy(features, given, truth, strength) for name, given in sides.items()},
        "seconds": seconds,
    }


def _accuracy(features: np.ndarray, labels: np.ndarray, truth: np.ndarray, strength: float) -> float:
    """Fit on four fifths of the images, measure on the true labels of the others; the mean of five such cuts."""
    from sklearn.linear_model import LogisticRegression

    standardized = (features - features.mean(0)) / np.maximum(features.std(0), 1e-5)
    folds = folds_of(truth, None, 5, seed=1)
    correct = []
    for fold in range(5):
        inside = folds == fold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = LogisticRegression(C=strength, max_iter=300).fit(standardized[~inside], labels[~inside])
        correct.append(model.score(standardized[inside], truth[inside]))
    return float(np.mean(correct))
