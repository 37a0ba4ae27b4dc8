"""Find wrong labels of a data set: `vitral data check DATA --labels`.

A logistic regression on features of a network, fitted without the images that it then predicts (k folds), gives each
image the probabilities of the classes; `vitral.evaluation.label_errors` ranks the labels by them. Features that hardly
tell the classes apart are no evidence: then nothing is called wrong.
"""

from __future__ import annotations

import csv
import io
import os
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from vitral.atomic import write_text
from vitral.console import table
from vitral.data import DataSet
from vitral.data.checks.findings import Place
from vitral.data.checks.groups import folds_of, joined, near_sets
from vitral.data.loader import Progress
from vitral.device import choose
from vitral.errors import DataError, UsageError
from vitral.evaluation.label_errors import Estimate, estimate
from vitral.filesystem import relative
from vitral.folders import is_run
from vitral.inference.options import AUTO, InferenceOptions
from vitral.recipes.stats import dataset_stats
from vitral.training.run_folder import RunFolder
from vitral.weights.read.references import BACKBONE, is_included
from vitral.workflows.checks.contact_sheet import contact_sheet
from vitral.workflows.planning.run_data import is_data_of
from vitral.workflows.tables.features import FeatureCache, features_of

STRENGTHS = (0.001, 0.01, 0.1, 1.0)
"""Inverse strengths of the regularization, of which the lowest out-of-fold loss chooses."""
_MOST_STEPS = 300
_ON_SHEET = 60
_SHARP = 224
"""Side of images for the features of the built-in model, which tell large photographs apart better there."""


@dataclass(frozen=True)
class Suspect:
    """An image whose label is likely wrong."""

    place: Place
    suggested: str
    confidence: float
    """Out-of-fold probability of the label."""
    probability: float
    """Out-of-fold probability of the suggested class."""


@dataclass(frozen=True, eq=False)
class LabelCheck:
    """Labels of all splits, ranked by how likely they are wrong."""

    source: str
    weights: str
    classes: tuple[str, ...]
    places: tuple[Place, ...]
    """Every image, split after split."""
    estimate: Estimate
    probabilities: np.ndarray
    """(n, K), out of fold."""
    agreement: float
    """Share of images whose most probable class is their label."""
    folds: int
    strength: float
    notes: tuple[str, ...]

    @property
    def is_weak(self) -> bool:
        """True if the features hardly tell the classes apart."""
        return self.agreement < min(0.6, 3 / len(self.classes))

    @property
    def wrong(self) -> np.ndarray:
        """(n,) True for labels that are called wrong: none with weak features."""
        return self.estimate.wrong & (not self.is_weak)

    def ranked(self, count: int | None = None) -> list[Suspect]:
        """The first images of the ranking; by default those whose label is likely wrong."""
        order = self.estimate.order
        order = order[self.wrong[order]] if count is None else order[:count]
        return [self._suspect(int(index)) for index in order]

    def _suspect(self, index: int) -> Suspect:
        other = int(self.estimate.suggested[index])
        own = float(self.estimate.confidence[index])
        return Suspect(self.places[index], self.classes[other], own, float(self.probabilities[index, other]))

    def to_json(self) -> dict[str, Any]:
        """Plain data, with the likely errors in order."""
        suspects = [asdict(one) for one in self.ranked()]
        return {
            "data": self.source, "weights": self.weights, "images": len(self.places), "classes": list(self.classes),
            "agreement": self.agreement, "weak": self.is_weak, "estimated_errors": self.estimate.errors,
            "expected_precision": self.estimate.precision if suspects else None, "folds": self.folds,
            "C": self.strength, "suspects": suspects, "notes": list(self.notes),
        }  # fmt: skip

    def print_table(self, console: Console, most: int = 20) -> None:
        """Print the figures and the first of the likely errors."""
        found = self.ranked()
        title = f"{self.source}: {len(found):,} of {len(self.places):,} labels are likely wrong"
        if self.is_weak:
            title = f"{self.source}: no evidence on {len(self.places):,} labels"
        console.print(Text(title, style="bold"))
        agree = f"{self.agreement:.1%} of the labels agree with predictions of {self.folds} folds"
        if self.is_weak:
            agree += ": the features hardly tell these classes apart; --init timm:NAME takes others"
        console.print(agree)
        if found:
            expected = f"about {self.estimate.precision:.0%} of these are wrong"
            console.print(f"{expected}, and about {self.estimate.errors:,} labels in all, called so or not")
        rows = table()
        for name in ("image", "label", "suggested", "probability"):
            rows.add_column(name, justify="right" if name == "probability" else "left", overflow="fold")
        for one in found[:most]:
            name = f"{one.place.split}: {one.place.name}"
            rows.add_row(Text(name), Text(one.place.label), Text(one.suggested), f"{one.probability:.1%}")
        if found:
            console.print(rows)
        if rest := len(found[most:]):
            console.print(f"… {rest:,} more; --write fixed.csv has all, in this order")

    def draw(self, dataset: DataSet, path: Path) -> int:
        """Draw the first of the likely errors. Returns how many are on the sheet."""
        found = self.ranked()[:_ON_SHEET]
        cells = [
            (
                dataset[one.place.split].image(one.place.index),
                f"{one.place.label} → {one.suggested} {one.probability:.0%}\n{one.place.name}",
            )
            for one in found
        ]
        if cells:
            contact_sheet(cells, path)
        return len(cells)

    def write(self, path: Path) -> None:
        """Write a table of all images, the most likely errors first, with the suggested classes as labels of those.

        Its files are relative to the table, so that it can be trained on; `given` has the labels of the data. Raises
        `DataError` for weak features.
        """
        if self.is_weak:
            why = (
                f"{self.agreement:.1%} of the labels agree with predictions: the features hardly tell the classes apart"
            )
            raise DataError("no labels are suggested", where=self.source, why=why, hint="--init timm:NAME, or a run")
        text, folder = io.StringIO(), path.absolute().parent
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["file", "label", "split", "given", "suggested", "confidence"])
        for index in self.estimate.order.tolist():
            place, suggested = self.places[index], self.classes[int(self.estimate.suggested[index])]
            label = suggested if self.wrong[index] else place.label
            file = (relative(place.name, folder) if os.path.exists(place.name) else None) or place.name
            confidence = f"{self.estimate.confidence[index]:.6f}"
            writer.writerow([file, label, place.split, place.label, suggested, confidence])
        write_text(path, text.getvalue())


def check_labels(
    dataset: DataSet,
    weights: str = BACKBONE,
    options: InferenceOptions = AUTO,
    *,
    folds: int = 5,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
) -> LabelCheck:
    """Rank the labels of all splits by out-of-fold predictions on features of `weights`.

    Near-duplicates (of sets in which a plan searches them) and the groups of a table are in one fold. Raises
    `UsageError` for fewer than two folds or more than images, `DataError` for a single class or unreadable images.
    """
    dataset.targets.check(dataset.classes, dataset.source)
    if not dataset.targets.one_class:
        raise DataError(
            "--labels ranks one class an image", where=dataset.source, why=f"its task is {dataset.targets.task}"
        )
    total = sum(map(len, dataset.splits.values()))
    if not 2 <= folds <= total:
        raise UsageError(f"--folds must be from 2 to the number of images, not {folds}", hint="--folds 5")
    large = "train" in dataset.splits and min(dataset_stats(dataset).size) > 0.8 * _SHARP
    adapted = {"image_size": _SHARP} if weights == BACKBONE and is_included(weights) and large else {}
    predictor = replace(options, precision="fp32").load(weights, **adapted)
    machine = choose(options.device, options.precision, dim=predictor.network.config.dim)
    try:
        features = [
            features_of(predictor.network, images, predictor.preprocessing, machine, cache=cache, progress=progress)
            for images in dataset.splits.values()
        ]
    except DataError as error:
        hint = f"remove them, or name them all: vitral data check {dataset.source}"
        raise DataError(str(error.what), where=dataset.source, why=error.why, hint=hint) from error
    labels = np.concatenate([images.labels for images in dataset.splits.values()])
    values = np.concatenate([part.numpy() for part in features]).astype(np.float64)
    probabilities, strength = out_of_fold(
        values, labels, len(dataset.classes), folds_of(labels, _groups(dataset), folds)
    )
    places = tuple(
        Place(name, index, images.names[index], dataset.classes[label])
        for name, images in dataset.splits.items()
        for index, label in enumerate(images.labels.tolist())
    )
    agreement = float((probabilities.argmax(1) == labels).mean())
    notes: tuple[str, ...] = ()
    if is_run(Path(weights)) and is_data_of(RunFolder(weights).read_plan(), dataset):
        notes = ("the network was trained on these labels: errors that it has memorized are not found",)
    return LabelCheck(
        dataset.source, weights, dataset.classes, places, estimate(labels, probabilities), probabilities, agreement,
        folds, strength, notes,
    )  # fmt: skip


def out_of_fold(
    features: np.ndarray, labels: np.ndarray, classes: int, folds: np.ndarray, strengths: Sequence[float] = STRENGTHS
) -> tuple[np.ndarray, float]:
    """Predict each image (n, K) by a logistic regression on the other folds; return the strength with the lowest loss.

    An image whose class has no image in the other folds gets a probability of 1 for its label: nothing is known.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression  # takes a second to import

    best, chosen, lowest = np.zeros((len(labels), classes)), strengths[0], np.inf
    standardized = (features - features.mean(0)) / np.maximum(features.std(0), 1e-5)
    for strength in strengths:
        found = np.zeros((len(labels), classes))
        for fold in np.unique(folds):
            inside = folds == fold
            others = labels[~inside]
            if len(np.unique(others)) < 2:
                found[inside] = others[0] == np.arange(classes)
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", ConvergenceWarning)
                    model = LogisticRegression(C=strength, max_iter=_MOST_STEPS).fit(standardized[~inside], others)
                found[np.ix_(inside, model.classes_)] = model.predict_proba(standardized[inside])
            unknown = inside & ~np.isin(labels, others)
            found[unknown] = labels[unknown, None] == np.arange(classes)
        loss = -np.log(np.maximum(found[np.arange(len(labels)), labels], 1e-12)).mean()
        if loss < lowest:
            best, chosen, lowest = found, strength, loss
    return best, chosen


def _groups(dataset: DataSet) -> np.ndarray | None:
    """Groups of the images of all splits; None if all are apart."""
    parts, start = [], 0
    for images in dataset.splits.values():
        groups = joined(images, near_sets(images)).groups
        groups = np.arange(len(images)) if groups is None else groups
        parts.append(groups + start)
        start += int(groups.max(initial=0)) + 1
    return np.concatenate(parts)
