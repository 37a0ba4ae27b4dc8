"""Metrics of several labels an image: average precision, F1 at thresholds, sets, co-occurrence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console

from vitral.console import table
from vitral.errors import DataError, UsageError
from vitral.evaluation.intervals import Groups, Interval, count_groups, proportion_interval
from vitral.evaluation.metrics import GROUPED, Measured, is_wider, plain_text, without_images


@dataclass(frozen=True)
class LabelScore:
    """Scores of one label; a ratio with a denominator of 0 is 0."""

    name: str
    images: int
    """Images that have the label."""
    predicted: int
    """Images for which it is predicted."""
    threshold: float
    average_precision: float | None
    """None without an image that has the label."""
    precision: float
    recall: float
    f1: float


@dataclass(frozen=True, eq=False, repr=False)
class LabelsEvaluation(Measured):
    """Metrics computed by `measure_labels`; every rate is a fraction from 0 to 1."""

    images: int
    groups: int
    unlabeled: int
    """Images without any label."""
    mean_average_precision: float
    """Mean over the labels that an image has: the ranking of images, without any threshold."""
    macro_f1: float
    """Mean F1 of the labels that an image has."""
    micro_f1: float
    """F1 of all decisions together."""
    jaccard: float
    """Example-based accuracy: mean over images of |true ∩ predicted| / |true ∪ predicted|, 1 if both are empty."""
    exact_match: float
    """Share of images whose set of labels is predicted exactly."""
    exact_match_interval: Interval
    """95% interval, which counts groups (`vitral.evaluation.intervals`)."""
    loss: float
    """Mean binary cross-entropy in nats."""
    per_label: tuple[LabelScore, ...]
    together: np.ndarray
    """(K, K) int64: images that have both labels, or on the diagonal the one label."""
    together_predicted: np.ndarray
    """(K, K) int64: the same of the predicted labels."""

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(score.name for score in self.per_label)

    @property
    def widened(self) -> bool:
        return is_wider(self.exact_match_interval, self.exact_match, self.images)

    def unmeasured(self) -> str:
        return without_images([one.name for one in self.per_label if not one.images], "label", "labels")

    def headline(self) -> str:
        """The main metrics in a line."""
        low, high = self.exact_match_interval
        exact = f"exact sets {self.exact_match:.2%} ({low:.1%} to {high:.1%})"
        return f"mAP {self.mean_average_precision:.2%}, macro F1 {self.macro_f1:.2%}, {exact}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `json`, which `from_json` reads back without loss."""
        plain = {**vars(self), "task": "labels", "exact_match_interval": list(self.exact_match_interval)}
        plain["per_label"] = [asdict(score) for score in self.per_label]
        return plain | {name: plain[name].tolist() for name in ("together", "together_predicted")}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> LabelsEvaluation:
        """Invert `to_json`. Raises `DataError` for a missing or invalid part."""
        try:
            fields = {"groups": plain["images"], **{name: value for name, value in plain.items() if name != "task"}}
            low, high = fields["exact_match_interval"]
            scores = tuple(LabelScore(**score) for score in fields["per_label"])
            grids = {name: np.array(fields[name], np.int64) for name in ("together", "together_predicted")}
            return cls(**{**fields, **grids, "exact_match_interval": (low, high), "per_label": scores})
        except (KeyError, TypeError, ValueError) as error:
            raise DataError("not an evaluation of labels", why=f"{type(error).__name__}: {error}") from error

    def print_table(self, console: Console, worst: int = 10) -> None:
        """Print the main metrics and the `worst` labels by F1."""
        low, high = self.exact_match_interval
        rows = table(header=False)
        rows.add_column(style="bold")
        rows.add_column(justify="right")
        rows.add_column(style="dim")
        rows.add_row("mAP", f"{self.mean_average_precision:.2%}", "mean average precision of the labels, no threshold")
        rows.add_row("macro F1", f"{self.macro_f1:.2%}", "mean over labels, at their thresholds")
        rows.add_row("micro F1", f"{self.micro_f1:.2%}", "all decisions together")
        rows.add_row("accuracy", f"{self.jaccard:.2%}", "Jaccard index of true and predicted labels, mean over images")
        interval = f"95% interval {low:.2%} to {high:.2%}, {self.counted()}"
        rows.add_row("exact sets", f"{self.exact_match:.2%}", interval)
        if self.widened:
            rows.add_row("", "", GROUPED)
        rows.add_row("loss", f"{self.loss:.4f}", "binary cross-entropy")
        console.print(rows)
        scored = sorted((one for one in self.per_label if one.images), key=lambda one: (one.f1, one.name))
        title = "Labels, worst first" if len(scored) <= worst else f"The {worst} worst of {len(scored)} labels"
        rows = table(title)
        rows.add_column("label")
        for heading in ("images", "predicted", "threshold", "AP", "precision", "recall", "F1"):
            rows.add_column(heading, justify="right")
        for one in scored[:worst]:
            rates = (one.average_precision or 0.0, one.precision, one.recall, one.f1)
            counts = f"{one.images:,}", f"{one.predicted:,}", f"{one.threshold:.2f}"
            rows.add_row(plain_text(one.name), *counts, *(f"{rate:.1%}" for rate in rates))
        console.print(rows)
        if unmeasured := self.unmeasured():
            console.print(plain_text(unmeasured, style="dim"))


def measure_labels(
    probabilities: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    thresholds: Sequence[float],
    groups: Groups = None,
) -> LabelsEvaluation:
    """Compute the metrics of predictions.

    `probabilities` (n, K) from 0 to 1, `labels` (n, K) 0 or 1, `thresholds` (K,): a label is predicted if its
    probability reaches its threshold; `groups` (n,) are equal for images that belong together, which the interval
    counts. Raises `UsageError` for invalid shapes or values, `DataError` without images.
    """
    probabilities, labels = np.asarray(probabilities, np.float64), np.asarray(labels).astype(bool)
    _check(probabilities, labels, len(names))
    found = probabilities >= np.asarray(thresholds)
    hits, true, predicted = (labels & found).sum(0), labels.sum(0), found.sum(0)
    precision, recall = _ratio(hits, predicted), _ratio(hits, true)
    f1 = _ratio(2 * hits, true + predicted)
    average = average_precision(probabilities, labels)
    union, exact = (labels | found).sum(1), (labels == found).all(1)
    shares = np.where(union > 0, (labels & found).sum(1) / np.maximum(union, 1), 1.0)
    scores = tuple(
        LabelScore(
            str(name),
            int(true[k]),
            int(predicted[k]),
            float(thresholds[k]),
            None if np.isnan(average[k]) else float(average[k]),
            float(precision[k]),
            float(recall[k]),
            float(f1[k]),
        )
        for k, name in enumerate(names)
    )
    present = true > 0
    of_label = np.where(labels, probabilities, 1 - probabilities)
    return LabelsEvaluation(
        images=len(labels),
        groups=count_groups(groups, len(labels)),
        unlabeled=int((~labels.any(1)).sum()),
        mean_average_precision=float(average[present].mean()) if present.any() else 0.0,
        macro_f1=float(f1[present].mean()) if present.any() else 0.0,
        micro_f1=float(_ratio(2 * hits.sum(), true.sum() + predicted.sum())),
        jaccard=float(shares.mean()),
        exact_match=float(exact.mean()),
        exact_match_interval=proportion_interval(exact, groups),
        loss=float(-np.log(np.clip(of_label, 1e-12, 1.0)).mean()),
        per_label=scores,
        together=_together(labels),
        together_predicted=_together(found),
    )


def average_precision(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return Σ (Rₙ - Rₙ₋₁) Pₙ over the distinct scores of each label, (K,); NaN for a label that no image has."""
    result = np.full(labels.shape[1], np.nan)
    for k in range(labels.shape[1]):
        if labels[:, k].any():
            hits, taken = _cuts(scores[:, k], labels[:, k])[1:]
            recall = hits / hits[-1]
            result[k] = float((np.diff(recall, prepend=0.0) * hits / taken).sum())
    return result


def best_thresholds(scores: np.ndarray, labels: np.ndarray, default: float) -> np.ndarray:
    """Return for each label (K,) the threshold with the best F1, halfway to the next lower score.

    If several are equal, the highest. A label that all or no images have keeps the `default`.
    """
    result = np.full(labels.shape[1], default)
    for k in range(labels.shape[1]):
        if 0 < (total := int(labels[:, k].sum())) < len(labels):
            cuts, hits, taken = _cuts(scores[:, k], labels[:, k])
            best = int(np.argmax(2 * hits / (total + taken)))
            result[k] = cuts[best] if best + 1 == len(cuts) else (cuts[best] + cuts[best + 1]) / 2
    return result


def _cuts(scores: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the distinct scores, highest first, with the hits and the images at or above each."""
    order = np.argsort(-scores, kind="stable")
    ranked = scores[order]
    last = np.append(np.flatnonzero(np.diff(ranked)), len(ranked) - 1)
    return ranked[last], np.cumsum(labels[order])[last], last + 1


def _ratio(above: Any, below: Any) -> Any:
    return np.where(below > 0, above / np.maximum(below, 1), 0.0)


def _together(labels: np.ndarray) -> np.ndarray:
    counted = labels.astype(np.float32)  # exact up to 2²⁴ images, and a fast product
    return np.asarray((counted.T @ counted).round().astype(np.int64))


def _check(probabilities: np.ndarray, labels: np.ndarray, count: int) -> None:
    if probabilities.shape != labels.shape or probabilities.ndim != 2 or probabilities.shape[1] != count:
        shapes = f"probabilities {probabilities.shape}, labels {labels.shape}, {count} names"
        raise UsageError(
            "shapes of probabilities, labels and names do not match", why=shapes, hint="(n, K) and K names"
        )
    if not len(labels):
        raise DataError("no images to measure on", why="the split is empty")
    if not (probabilities.min() >= 0 and probabilities.max() <= 1):  # NaN fails every comparison
        raise UsageError("these are not probabilities", why="a value is not finite, or not from 0 to 1")
