"""Rank the labels of a data set by doubt: `vitral data check DATA --labels`.

A logistic regression and a linear discriminant analysis on features of a network, fitted without the images that they
then predict (k folds), give each image the probabilities of the classes, by their geometric mean
(`vitral.evaluation.probe`).
`vitral.evaluation.label_errors` ranks the labels by them. The ranking is always shown. Calling labels wrong is a
separate claim: features that hardly tell the classes apart support none.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.text import Text

from vitral.atomic import write_text
from vitral.console import table
from vitral.data import DataSet
from vitral.data.checks.findings import Found, Place
from vitral.data.checks.groups import folds_of, joined, near_sets
from vitral.data.checks.validate import left_out
from vitral.data.label_table import label_table
from vitral.data.loader import Progress
from vitral.errors import DataError, UsageError
from vitral.evaluation.label_errors import Estimate, estimate
from vitral.evaluation.probe import discriminant, mixed, out_of_fold
from vitral.filesystem import relative
from vitral.folders import is_run
from vitral.inference.options import AUTO, InferenceOptions
from vitral.training.run_folder import RunFolder
from vitral.weights.read.references import BACKBONE
from vitral.workflows.checks.contact_sheet import contact_sheet
from vitral.workflows.checks.set_features import set_features
from vitral.workflows.checks.strangers import least_alike
from vitral.workflows.planning.run_data import is_data_of, seen_as
from vitral.workflows.tables.features import FeatureCache

MOST_FITTED = 10_000_000
"""Images times classes up to which a logistic regression is fitted. Its twenty fits take minutes there, and far longer
for 5,000 classes; the discriminant analysis has a closed form.
"""
DOUBTFUL = 24
"""Labels that are shown, also if none of them is called wrong."""
LEAST_ALIKE = 12
"""Images that are shown because they resemble the others least."""
_ON_SHEET = 60


@dataclass(frozen=True)
class Suspect:
    """An image with a doubtful label."""

    place: Place
    suggested: str
    confidence: float
    """Out-of-fold probability of the label."""
    probability: float
    """Out-of-fold probability of the suggested class."""
    doubt: float
    """Probability that the label is wrong."""
    likely_wrong: bool
    """True if the label is called wrong."""


@dataclass(frozen=True, eq=False)
class LabelCheck:
    """Labels of all splits, ranked by how likely they are wrong."""

    source: str
    weights: str
    classes: tuple[str, ...]
    places: tuple[Place, ...]
    """Every readable image, split after split."""
    estimate: Estimate
    probabilities: np.ndarray
    """(n, K), out of fold."""
    agreement: float
    """Share of images whose most probable class is their label."""
    folds: int
    strength: float | None
    """Inverse strength of the regularization; None without a logistic regression."""
    notes: tuple[str, ...]
    least_alike: tuple[Found, ...]
    """Images that resemble the others least, the farthest first; perhaps of none of the classes."""

    @property
    def is_weak(self) -> bool:
        """True if the features hardly tell the classes apart."""
        return self.agreement < min(0.6, 3 / len(self.classes))

    @property
    def wrong(self) -> np.ndarray:
        """(n,) True for labels that are called wrong: none with weak features."""
        return self.estimate.wrong & (not self.is_weak)

    def ranked(self, count: int | None = None) -> list[Suspect]:
        """The most doubtful labels, worst first; by default 24, or all that are called wrong if these are more."""
        count = max(DOUBTFUL, int(self.wrong.sum())) if count is None else count
        return [self._suspect(int(index)) for index in self.estimate.order[:count]]

    def _suspect(self, index: int) -> Suspect:
        other, wrong = int(self.estimate.suggested[index]), bool(self.wrong[index])
        own, doubt = float(self.estimate.confidence[index]), float(self.estimate.doubt[index])
        return Suspect(
            self.places[index], self.classes[other], own, float(self.probabilities[index, other]), doubt, wrong
        )

    @property
    def claim(self) -> str:
        """A sentence on how many of the shown labels are wrong."""
        found = self.ranked()
        wrong = int(self.wrong.sum())
        expected = round(sum(one.doubt for one in found))
        if self.is_weak:
            return (
                "None can be called wrong: the features hardly tell these classes apart (--init timm:NAME uses others)"
            )
        if wrong:
            called = f"{wrong:,} of {len(self.places):,} labels {'is' if wrong == 1 else 'are'} likely wrong"
            in_all = f"and about {self.estimate.errors:,} in all"
            return f"{called}; about {expected:,} of the {len(found):,} shown are, {in_all}"
        if expected:
            return f"None is certain; about {expected:,} of the {len(found):,} shown are wrong"
        return "None is certain: each may be a hard image with the right label"

    def to_json(self) -> dict[str, object]:
        """Plain data, with the most doubtful labels in order."""
        return {
            "data": self.source,
            "weights": self.weights,
            "images": len(self.places),
            "classes": list(self.classes),
            "agreement": self.agreement,
            "weak": self.is_weak,
            "likely_wrong": int(self.wrong.sum()),
            "estimated_errors": self.estimate.errors,
            "expected_precision": self.estimate.precision if self.wrong.any() else None,
            "folds": self.folds,
            "C": self.strength,
            "claim": self.claim,
            "doubtful": [asdict(one) for one in self.ranked()],
            "least_alike": [asdict(one) for one in self.least_alike],
            "notes": list(self.notes),
        }

    def print_table(self, console: Console) -> None:
        """Print the claim, the figures and the most doubtful labels."""
        found = self.ranked()
        shown = found[:DOUBTFUL]
        title = f"{self.source}: the {len(shown):,} most doubtful of {len(self.places):,} labels"
        console.print(Text(title, style="bold"))
        console.print(Text(self.claim))
        console.print(f"{self.agreement:.1%} of the labels agree with the predictions")
        rows = table()
        for name in ("image", "label", "suggested", "probability", "wrong"):
            right = name in ("probability", "wrong")
            rows.add_column(name, justify="right" if right else "left", overflow="fold")
        several = len({place.split for place in self.places}) > 1
        for one in shown:
            name = f"{one.place.split}: {one.place.name}" if several else one.place.name
            doubt = "?" if self.is_weak else f"{one.doubt:.0%}"
            rows.add_row(Text(name), Text(one.place.label), Text(one.suggested), f"{one.probability:.0%}", doubt)
        console.print(rows)
        console.print("probability: of the suggested class. wrong: the probability that the label is wrong.")
        if rest := len(found) - len(shown):
            console.print(f"… {rest:,} more that are likely wrong; --write fixed.csv has all images, in this order")
        if self.least_alike:
            console.print(Text("Images that resemble the others least, perhaps of none of the classes", style="bold"))
        far = table(header=False)
        for place in (one.place for one in self.least_alike):
            far.add_row(Text(f"{place.split}: {place.name}", overflow="fold"), Text(place.label))
        console.print(far)

    def draw(self, dataset: DataSet, path: Path) -> int:
        """Draw the most doubtful labels, worst first, then the images that resemble the others least. Returns how many
        images are on the sheet.
        """
        cells = [
            (
                dataset[one.place.split].image(one.place.index),
                f"{one.place.label} → {one.suggested} {one.probability:.0%}\n{one.place.name}",
            )
            for one in self.ranked()[:_ON_SHEET]
        ]
        cells += [
            (dataset[place.split].image(place.index), f"{place.label}: least alike\n{place.name}")
            for place in (one.place for one in self.least_alike)
        ]
        contact_sheet(cells, path)
        return len(cells)

    def write(self, path: Path) -> None:
        """Write a table of all images, the most doubtful labels first, with the suggested class of those called wrong.

        Its files are relative to the table, so that it can be trained on; `given` has the labels of the data.
        """
        folder, rows = path.absolute().parent, []
        for one in self.ranked(len(self.places)):
            place = one.place
            file = (relative(place.name, folder) if os.path.exists(place.name) else None) or place.name
            rows.append(
                {
                    "file": file,
                    "label": one.suggested if one.likely_wrong else place.label,
                    "split": place.split,
                    "given": place.label,
                    "checked": "no",
                    "suggested": one.suggested,
                    "confidence": f"{one.confidence:.6f}",
                    "doubt": f"{one.doubt:.6f}",
                }
            )
        write_text(path, label_table(rows))


def check_labels(
    dataset: DataSet,
    weights: str = BACKBONE,
    options: InferenceOptions = AUTO,
    *,
    folds: int = 5,
    skip: bool = False,
    cache: FeatureCache | None = None,
    progress: Progress | None = None,
) -> LabelCheck:
    """Rank the labels of all splits by out-of-fold predictions on features of `weights`.

    Near-duplicates (of sets in which a plan searches them) and the groups of a table are in one fold. `skip` leaves out
    unreadable images, which `notes` then name. Raises `UsageError` for fewer than two folds or more than images,
    `DataError` for a single class, and for unreadable images without `skip`.
    """
    dataset.targets.check(dataset.classes, dataset.source)
    if not dataset.targets.one_class:
        raise DataError(
            "--labels ranks one class per image", where=dataset.source, why=f"its task is {dataset.targets.task}"
        )
    total = sum(map(len, dataset.splits.values()))
    if not 2 <= folds <= total:
        raise UsageError(f"--folds must be from 2 to the number of images, not {folds}", hint="--folds 5")
    found = set_features(dataset, weights, options, skip=skip, every_size=True, cache=cache, progress=progress)
    kept, labels = found.dataset, found.labels
    folded = folds_of(labels, _groups(kept), folds)
    probabilities, strength = _predicted(found.values, labels, len(kept.classes), folded)
    agreement = float((probabilities.argmax(1) == labels).mean())
    notes = [
        left_out(kept.left_out),
        _memorized(weights, kept),
        _unfitted(len(labels), kept) if strength is None else "",
    ]
    return LabelCheck(
        kept.source,
        weights,
        kept.classes,
        found.places,
        estimate(labels, probabilities),
        probabilities,
        agreement,
        folds,
        strength,
        tuple(filter(None, notes)),
        tuple(least_alike(found, LEAST_ALIKE)),
    )


def _predicted(
    features: np.ndarray, labels: np.ndarray, classes: int, folds: np.ndarray
) -> tuple[np.ndarray, float | None]:
    """Predict each image (n, K) by the other folds; return the strength of the logistic regression, None without it."""
    by_means = discriminant(features, labels, classes, folds)
    if len(labels) * classes > MOST_FITTED:
        return by_means, None
    regressed, strength = out_of_fold(features, labels, classes, folds)
    return mixed(regressed, by_means), strength


def _unfitted(images: int, dataset: DataSet) -> str:
    """Return a note on a ranking without the logistic regression."""
    size = f"{images:,} images in {len(dataset.classes):,} classes"
    return f"a discriminant analysis ranks the labels of {size}; a logistic regression would take too long"


def _memorized(weights: str, dataset: DataSet) -> str:
    """Return a note if the network is a run that was trained on some of these labels; else ""."""
    if not is_run(Path(weights)):
        return ""
    plan = RunFolder(weights).read_plan()
    what = "the network was trained on {} of these labels: errors that it has memorized are not found"
    if is_data_of(plan, dataset):
        return what.format("all")
    seen = any(seen_as(plan, images) for images in dataset.splits.values())
    return what.format("some") if seen else ""


def _groups(dataset: DataSet) -> np.ndarray | None:
    """Groups of the images of all splits; None if all are apart."""
    parts, start = [], 0
    for images in dataset.splits.values():
        groups = joined(images, near_sets(images)).groups
        groups = np.arange(len(images)) if groups is None else groups
        parts.append(groups + start)
        start += int(groups.max(initial=0)) + 1
    return np.concatenate(parts)
