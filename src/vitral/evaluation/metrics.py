"""Metrics of a classifier from probabilities and labels: accuracy, calibration, scores per class, confusion matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vitral.console import Described, table
from vitral.errors import DataError, UsageError
from vitral.evaluation.enough import FOR_RATES
from vitral.evaluation.intervals import (
    Groups,
    Interval,
    count_groups,
    expected_right,
    proportion_interval,
    wilson_interval,
)
from vitral.evaluation.scores import CalibrationBin
from vitral.frames import Rows
from vitral.wording import count, in_groups

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CALIBRATION_BINS = 15
"""Equal-width bins of the confidence, as in Guo et al. 2017, "On Calibration of Modern Neural Networks"."""

DENSE_JSON_CLASSES = 1000
"""Up to this number of classes JSON holds the full confusion matrix; beyond, its nonzero cells (21,843² is a GB)."""

_SMALLEST_PROBABILITY = 1e-12  # keeps the loss finite if a float32 softmax rounds to 0


@dataclass(frozen=True)
class ClassScore:
    """Scores of one class.

    `precision`, `recall` and `f1` are fractions; a ratio with a denominator of 0 is 0. The scores of a class with
    `images == 0` are undefined, and no mean includes them.
    """

    name: str
    images: int
    precision: float
    recall: float
    f1: float
    most_confused_with: str | None
    """The most frequent wrong prediction for its images; None if all are correct."""
    times: int
    """Number of its images with that prediction."""


class Measured(Described):
    """Metrics of the images of a split, for any task."""

    images: int
    groups: int
    """Groups of images that belong together, such as copies; as many as images if each is on its own."""
    _rows: Callable[[], Iterable[dict[str, object]]] = tuple

    @cached_property
    def predictions(self) -> Rows[dict[str, Any]]:
        """One row per image, with its name, its label and its prediction; `to_frame()` is a pandas data frame.

        It is empty if the metrics were read from a file, and under torchrun in all processes except the first.
        """
        return Rows(self._rows())

    def headline(self) -> str:
        """The main metrics in a line."""
        raise NotImplementedError

    def of_ten_new(self) -> str:
        """A line on what the main metric means for ten new images; "" if the images were many, or it has no such
        meaning.
        """
        return ""

    def unmeasured(self) -> str:
        """A line on the classes or labels that have no image; "" if there are none."""
        return ""

    @property
    def widened(self) -> bool:
        """True if related images (groups) make the intervals wider than they would be for independent images."""
        return self.groups < self.images

    def counted(self, kind: str = "image") -> str:
        """Number of images, and of groups if there are fewer: "400 images in 80 groups"."""
        return in_groups(self.images, self.groups, kind)

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        return {"images": self.counted(), "metrics": self.headline()}


GROUPED = "images of a group are alike, so the interval is wider than for independent images"
"""The clause on a wider interval."""


def is_wider(interval: Interval, rate: float, images: int) -> bool:
    """True if the interval of a rate is wider than for as many independent images."""
    low, high = wilson_interval(rate * images, images)
    return interval[1] - interval[0] > high - low + 1e-9


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation(Measured):
    """Metrics computed by `measure`; every rate is a fraction from 0 to 1.

    Args:
        images: Number of images.
        groups: Number of groups of images that belong together; equal to `images` if each is on its own.
        accuracy: Fraction of images whose label is the most probable class.
        accuracy_interval: 95% interval of the accuracy, which counts groups (`vitral.evaluation.intervals`).
        top5: Fraction of images with the label among the five most probable classes; None for five classes or fewer.
        loss: Mean cross-entropy in nats.
        ece: Expected calibration error: mean distance between confidence and accuracy.
        calibration: The bins of confidence. `ece` is the mean distance between confidence and accuracy over them,
            weighted by images.
        macro_f1: Mean F1 of the classes that have images.
        per_class: Precision, recall and F1 of each class.
        confusion: (K, K) int64: a row for each true class, a column for each predicted one.
        temperature: Divisor of the logits, fitted on validation images, with which all other metrics are computed.
        raw_ece: ECE without the temperature; None if it is 1.

    Example:
        found = vitral.evaluate("runs/photos")
        print(found.accuracy, found.accuracy_interval, found.most_confused())
        wrong = [row["image"] for row in found.predictions if row["class"] != row["true"]]
    """

    images: int
    groups: int
    accuracy: float
    accuracy_interval: Interval
    top5: float | None
    loss: float
    ece: float
    calibration: tuple[CalibrationBin, ...]
    macro_f1: float
    per_class: tuple[ClassScore, ...]
    confusion: np.ndarray
    temperature: float = 1.0
    raw_ece: float | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(score.name for score in self.per_class)

    @property
    def widened(self) -> bool:
        return is_wider(self.accuracy_interval, self.accuracy, self.images)

    @property
    def balanced_accuracy(self) -> float:
        """Mean recall of the classes that have images: a rare class counts as much as a common one."""
        return float(np.mean([score.recall for score in self.per_class if score.images]))

    def headline(self) -> str:
        """The main metric in a line."""
        return f"Accuracy {with_interval(self.accuracy, self.accuracy_interval)}"

    def unmeasured(self) -> str:
        return without_images([score.name for score in self.per_class if not score.images], "class", "classes")

    def of_ten_new(self) -> str:
        """Return a line on how many of ten new images will be right; "" if many images were measured."""
        if self.groups >= FOR_RATES:
            return ""
        low, high = expected_right(self.accuracy, self.groups)
        right = f"{low} to {high}" if low < high else f"{low}"
        return f"Of 10 new photographs, expect {right} correct predictions (80% interval)"

    def figures(self) -> dict[str, Figure]:
        """Return figures of matplotlib by title: "Confusion" and "Reliability"."""
        from vitral.evaluation.figures import draw_confusion, draw_reliability  # matplotlib takes a second to import

        reliability = draw_reliability(self.calibration, self.ece).figure
        return {"Confusion": draw_confusion(self.confusion, self.classes), "Reliability": reliability}

    def most_confused(self, count: int = 10) -> list[tuple[str, str, int]]:
        """Return the most frequent errors as (true class, predicted class, times), most frequent first."""
        wrong = self.confusion * ~np.eye(len(self.confusion), dtype=bool)
        rows, columns = np.nonzero(wrong)
        order = np.argsort(-wrong[rows, columns], kind="stable")[:count]
        names = self.classes
        return [(names[rows[i]], names[columns[i]], int(wrong[rows[i], columns[i]])) for i in order]

    @property
    def one_class(self) -> bool:
        """True if all images are of one class, which makes precision meaningless."""
        return np.count_nonzero(self.confusion.sum(axis=1)) == 1

    @property
    def one_answer(self) -> str | None:
        """The predicted class, if all images get the same one although they are of several classes; otherwise None."""
        predicted = np.flatnonzero(self.confusion.sum(axis=0))
        return self.classes[predicted[0]] if len(predicted) == 1 and not self.one_class else None

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `json`, which `from_json` reads back without loss."""
        plain: dict[str, object] = {
            "images": self.images,
            "groups": self.groups,
            "accuracy": self.accuracy,
            "accuracy_interval": list(self.accuracy_interval),
            "balanced_accuracy": self.balanced_accuracy,
            "top5": self.top5,
            "loss": self.loss,
            "ece": self.ece,
            "macro_f1": self.macro_f1,
            "per_class": [asdict(score) for score in self.per_class],
            "calibration": [asdict(bin_) for bin_ in self.calibration],
        }
        if self.raw_ece is not None:
            plain |= {"temperature": self.temperature, "raw_ece": self.raw_ece}
        if len(self.confusion) <= DENSE_JSON_CLASSES:
            plain["confusion"] = self.confusion.tolist()
        else:
            rows, columns = np.nonzero(self.confusion)
            plain["confusion_cells"] = np.stack([rows, columns, self.confusion[rows, columns]], axis=1).tolist()
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Evaluation:
        """Invert `to_json`. Raises `DataError` for a missing or invalid part."""
        try:
            low, high = plain["accuracy_interval"]
            per_class = tuple(ClassScore(**score) for score in plain["per_class"])
            return cls(
                images=int(plain["images"]),
                groups=int(plain.get("groups", plain["images"])),
                accuracy=float(plain["accuracy"]),
                accuracy_interval=(float(low), float(high)),
                top5=None if plain["top5"] is None else float(plain["top5"]),
                loss=float(plain["loss"]),
                ece=float(plain["ece"]),
                calibration=tuple(CalibrationBin(**bin_) for bin_ in plain["calibration"]),
                macro_f1=float(plain["macro_f1"]),
                per_class=per_class,
                confusion=_confusion_from(plain, len(per_class)),
                temperature=float(plain.get("temperature", 1.0)),
                raw_ece=None if plain.get("raw_ece") is None else float(plain["raw_ece"]),
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise DataError("not an evaluation", why=f"{type(error).__name__}: {error}") from error

    def print_table(self, console: Console, worst: int = 5) -> None:
        """Print the main metrics and the `worst` classes by F1."""
        console.print(_headline(self))
        if self.one_answer is not None:
            console.print(plain_text(f"The model predicts the same class for every image: {self.one_answer}", "yellow"))
        scored = sorted((score for score in self.per_class if score.images), key=lambda score: (score.f1, score.name))
        if worst > 0 and (len(scored) > 1 or scored[0].times):
            all_of_them = "Classes, worst first" if len(scored) > 1 else "The class"
            title = all_of_them if len(scored) <= worst else f"The {worst} worst of {len(scored)} classes"
            console.print(_class_table(scored[:worst], title, recall_alone=self.one_class))
        if unmeasured := self.unmeasured():
            console.print(plain_text(unmeasured, style="dim"))


def without_images(names: Sequence[str], kind: str, kinds: str) -> str:
    """Make the line on classes or labels that no image shows; "" if there are none."""
    shown = ", ".join(names[:5]) + (" …" if len(names) > 5 else "")
    return f"Not measured: {count(len(names), kind, kinds)} without images ({shown})" if names else ""


def measure(probabilities: np.ndarray, labels: np.ndarray, classes: Sequence[str], groups: Groups = None) -> Evaluation:
    """Compute the metrics of predictions.

    `probabilities` is (n, K), with rows summing to 1; `labels` is (n,), indices into the K `classes`; `groups` (n,) are
    equal for images that belong together, which the interval counts. With equal probabilities, the lower index wins.
    Raises `UsageError` for invalid shapes or values, `DataError` without images.
    """
    probabilities, labels = np.asarray(probabilities), np.asarray(labels)
    _check(probabilities, labels, len(classes))
    images, number = probabilities.shape
    predicted = probabilities.argmax(axis=1)
    confidence = probabilities.max(axis=1).astype(np.float64)
    of_label = probabilities[np.arange(images), labels].astype(np.float64)
    correct = predicted == labels
    from sklearn.metrics import confusion_matrix  # takes a second to import

    confusion = confusion_matrix(labels, predicted, labels=np.arange(number)).astype(np.int64)
    per_class = _class_scores(labels, predicted, classes, confusion)
    calibration, ece = _calibrate(confidence, correct)
    return Evaluation(
        images=images,
        groups=count_groups(groups, images),
        accuracy=float(correct.mean()),
        accuracy_interval=proportion_interval(correct, groups),
        top5=float((_rank_of_label(probabilities, labels) < 5).mean()) if number > 5 else None,
        loss=float(-np.log(np.clip(of_label, _SMALLEST_PROBABILITY, 1.0)).mean()),
        ece=ece,
        calibration=calibration,
        macro_f1=float(np.mean([score.f1 for score in per_class if score.images])),
        per_class=per_class,
        confusion=confusion,
    )


def with_interval(rate: float, interval: tuple[float, float]) -> str:
    """Return a rate and its 95% interval as text."""
    return f"{rate:.2%} (95% interval {interval[0]:.1%} to {interval[1]:.1%})"


def _check(probabilities: np.ndarray, labels: np.ndarray, count: int) -> None:
    if probabilities.ndim != 2 or probabilities.shape[1] != count or labels.shape != probabilities.shape[:1]:
        raise UsageError(
            "shapes of probabilities, labels and classes do not match",
            why=f"probabilities {probabilities.shape}, labels {labels.shape}, {count} classes",
            hint="probabilities (n, K), labels (n,), K classes",
        )
    if not len(labels):
        raise DataError("no images to measure on", why="the split is empty")
    if labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= count:
        raise UsageError("labels are not class indices", why=f"expected integers from 0 to {count - 1}")
    # NaN fails every comparison, so it is caught here too; 2 % allows for sums in bfloat16.
    sums = probabilities.sum(axis=1, dtype=np.float64)
    if not (probabilities.min() >= 0 and np.abs(sums - 1).max() < 0.02):
        raise UsageError(
            "these are not probabilities",
            why="a row has a negative or non-finite value, or does not sum to 1",
            hint="apply softmax to the logits first; non-finite values indicate a diverged model",
        )


def _rank_of_label(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return (n,): the number of classes ranked before the label. It is 0 exactly if argmax is the label."""
    of_label = probabilities[np.arange(len(labels)), labels][:, None]
    ahead = np.arange(probabilities.shape[1]) < labels[:, None]
    return np.asarray(((probabilities > of_label) | ((probabilities == of_label) & ahead)).sum(axis=1))


def _class_scores(
    labels: np.ndarray, predicted: np.ndarray, classes: Sequence[str], confusion: np.ndarray
) -> tuple[ClassScore, ...]:
    from sklearn.metrics import precision_recall_fscore_support

    precision, recall, f1, images = precision_recall_fscore_support(
        labels, predicted, labels=np.arange(len(classes)), zero_division=0
    )
    scores = []
    for k, name in enumerate(classes):
        mistakes = confusion[k].copy()
        mistakes[k] = 0
        other = int(mistakes.argmax())
        times = int(mistakes[other])
        scores.append(
            ClassScore(
                name=str(name),
                images=int(images[k]),
                precision=float(precision[k]),
                recall=float(recall[k]),
                f1=float(f1[k]),
                most_confused_with=str(classes[other]) if times else None,
                times=times,
            )
        )
    return tuple(scores)


def _calibrate(confidence: np.ndarray, correct: np.ndarray) -> tuple[tuple[CalibrationBin, ...], float]:
    """Return bins of the confidence, and Σ share · |accuracy - confidence| over them. Both arrays are (n,)."""
    which = np.clip(np.ceil(confidence * CALIBRATION_BINS).astype(int) - 1, 0, CALIBRATION_BINS - 1)
    bins, ece = [], 0.0
    for index in range(CALIBRATION_BINS):
        inside = which == index
        images = int(inside.sum())
        mean_confidence = float(confidence[inside].mean()) if images else 0.0
        accuracy = float(correct[inside].mean()) if images else 0.0
        edges = index / CALIBRATION_BINS, (index + 1) / CALIBRATION_BINS
        bins.append(CalibrationBin(*edges, images, mean_confidence, accuracy))
        ece += images / len(confidence) * abs(accuracy - mean_confidence)
    return tuple(bins), ece


def _confusion_from(plain: Mapping[str, Any], count: int) -> np.ndarray:
    if "confusion" in plain:
        confusion = np.array(plain["confusion"], dtype=np.int64)
    else:
        confusion = np.zeros((count, count), dtype=np.int64)
        for row, column, times in plain["confusion_cells"]:
            confusion[row, column] = times
    if confusion.shape != (count, count):
        raise ValueError(f"confusion is {confusion.shape} for {count} classes")
    return confusion


def _headline(evaluation: Evaluation) -> Table:
    low, high = evaluation.accuracy_interval
    rows = table(header=False)
    rows.add_column(style="bold")
    rows.add_column(justify="right")
    rows.add_column(style="dim")
    interval = f"95% interval {low:.2%} to {high:.2%}, {evaluation.counted()}"
    rows.add_row("accuracy", f"{evaluation.accuracy:.2%}", interval)
    if evaluation.widened:
        rows.add_row("", "", GROUPED)
    if evaluation.top5 is not None:
        rows.add_row("top-5", f"{evaluation.top5:.2%}", "")
    if not evaluation.one_class:
        rows.add_row("balanced", f"{evaluation.balanced_accuracy:.2%}", "mean recall, each class counts the same")
        rows.add_row("macro F1", f"{evaluation.macro_f1:.2%}", "")
    rows.add_row("loss", f"{evaluation.loss:.4f}", "cross-entropy")
    few = f"; unreliable with only {evaluation.counted()}" if evaluation.groups < FOR_RATES else ""
    rows.add_row("calibration", f"{evaluation.ece:.2%}", f"mean difference of confidence and accuracy (ECE){few}")
    if evaluation.raw_ece is not None:
        rows.add_row("", f"{evaluation.raw_ece:.2%}", f"without the temperature {evaluation.temperature:.3g}")
    return rows


def _class_table(scores: Sequence[ClassScore], title: str, *, recall_alone: bool) -> Table:
    rows = table(title)
    rows.add_column("class")
    for heading in ("images", "recall") if recall_alone else ("images", "precision", "recall", "F1"):
        rows.add_column(heading, justify="right")
    rows.add_column("most often confused with")
    for score in scores:
        confused = f"{score.most_confused_with} ({score.times}×)" if score.most_confused_with is not None else "—"
        rates = (score.recall,) if recall_alone else (score.precision, score.recall, score.f1)
        rows.add_row(
            plain_text(score.name), f"{score.images:,}", *(f"{rate:.1%}" for rate in rates), plain_text(confused)
        )
    return rows


def plain_text(text: str, style: str = "") -> Text:
    """Return a name as literal text, without markup such as "[red]" and without escape sequences."""
    return Text("".join(character if character.isprintable() else "�" for character in text), style=style)
