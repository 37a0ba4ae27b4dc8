"""The metrics of an epoch, each declared once: its key in metrics.jsonl, name, format, how it is pooled, its curve.

The training loop, the console, the report, the page of pretraining and docs/tracking.md read these declarations. A task
declares its own as (key without `train_` or `val_`, title, format), of which `pairs` makes metrics. To add a metric of
each step, return it from the step or the objective under its key, and declare it here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TaskMetric = tuple[str, str, str]
"""Key without `train_` or `val_`, title, format of a value."""


@dataclass(frozen=True)
class Curve:
    """A plot over the epochs. Metrics that share a curve are its lines."""

    title: str
    form: str
    """Format of a value in the text that describes the plot."""
    of_steps: bool = False
    """True if it describes the steps and not the network: from zero, and without a mark at the best epoch."""


@dataclass(frozen=True)
class Metric:
    """A number of an epoch."""

    key: str
    """Its key in the epoch's line."""
    title: str
    """Its name in tables."""
    form: str
    """Format of a value in tables."""
    meaning: str
    """The row of docs/tracking.md."""
    pooled: Literal["images", "steps"] = "images"
    """The mean is over images or over optimizer steps, in the batches of all ranks."""
    curve: Curve | None = None
    label: str = ""
    """Its line in the plot."""
    console: str = ""
    """Its name in the line that the console prints; "" if it is not printed."""

    @property
    def split(self) -> str:
        """ "train" or "val" of a metric that was measured on both; "" for others."""
        prefix = self.key.partition("_")[0]
        return prefix if prefix in ("train", "val") else ""


def pair(key: str, title: str, form: str, curve: Curve, meaning: str = "") -> tuple[Metric, Metric]:
    """Return a metric of the training and of the validation images."""
    return (
        Metric(f"train_{key}", f"train {title}", form, f"{meaning} of the training images", curve=curve, label="train"),
        Metric(
            f"val_{key}",
            f"validation {title}",
            form,
            f"{meaning} of the validation images",
            curve=curve,
            label="validation",
        ),
    )


def pairs(measured: Iterable[TaskMetric]) -> tuple[Metric, ...]:
    """Return the metrics of a task."""
    found: list[Metric] = []
    for key, title, form in measured:
        spelled = title if any(map(str.isupper, title)) else title.capitalize()
        found += pair(key, title, form, Curve(spelled, form), title)
    return tuple(found)


_LOSS = Curve("Loss", "{:.4g}")
LOSS = pair("loss", "loss", "{:.4f}", _LOSS, "mean loss")
LEARNING_RATE = Metric(
    "lr",
    "learning rate",
    "{:.3g}",
    "learning rate of the last step",
    curve=Curve("Learning rate", "{:.3g}", of_steps=True),
    label="learning rate",
)
GRADIENT_NORM = Metric(
    "gradient_norm",
    "gradient norm",
    "{:.3g}",
    "norm of the gradient before clipping, the mean of all steps",
    pooled="steps",
    curve=Curve("Gradient norm", "{:.3g}", of_steps=True),
    label="gradient norm",
)
SPEED = Metric("images_per_second", "images/s", "{:,.0f}", "training images per second, without validation")
STEPS = (LEARNING_RATE, GRADIENT_NORM, SPEED)
"""Metrics of every run that is trained in steps."""

KNN = Metric(
    "knn_accuracy",
    "k nearest neighbors",
    "{:.2%}",
    "accuracy of k nearest neighbors on the features",
    curve=Curve("Neighbors accuracy", "{:.2%}"),
    label="k nearest neighbors",
    console="k-NN",
)
PROBE = Metric(
    "probe_accuracy",
    "linear probe",
    "{:.2%}",
    "accuracy of a linear probe of the features",
    curve=Curve("Probe accuracy", "{:.2%}"),
    label="linear probe",
    console="linear probe",
)
RANK = Metric(
    "feature_rank",
    "rank",
    "{:.1f}",
    "number of directions in which the features vary",
    curve=Curve("Rank", "{:.1f}"),
    label="rank of the features",
    console="rank",
)
SPREAD = Metric("feature_spread", "spread", "{:.3f}", "spread of the features")
FEATURES = (KNN, PROBE, RANK, SPREAD)
"""Measures of the features after an epoch of pretraining."""


def _of_method(key: str, curve: Curve, label: str, meaning: str) -> Metric:
    return Metric(key, meaning, curve.form, meaning, curve=curve, label=label)


METHODS = (
    _of_method("feature_loss", Curve("Distance of features", "{:.4g}"), "train", "distance to the teacher's features"),
    _of_method("logit_loss", Curve("Divergence of logits", "{:.4g}"), "train", "divergence from the teacher's logits"),
    _of_method(
        "usage_entropy",
        Curve("Usage of prototypes", "{:.3f}"),
        "entropy of all images' mean",
        "entropy of the use of dino's prototypes, 1 if all are used equally",
    ),
    _of_method(
        "target_entropy",
        Curve("Entropy", "{:.3f}"),
        "of each image's prototypes",
        "entropy of each image's prototypes in dino",
    ),
    _of_method("color_accuracy", Curve("Color accuracy", "{:.2%}"), "train", "accuracy of the colors mpp predicts"),
)
"""Measures of the methods of pretraining in their steps."""
DECLARED: tuple[Metric, ...] = (*LOSS, *STEPS, *FEATURES, *METHODS)
"""All metrics but those of tasks."""
_PER_STEP = frozenset(metric.key for metric in DECLARED if metric.pooled == "steps")


def per_step(key: str) -> bool:
    """True for a metric whose mean is over steps. Others, also those of other packages, are means over images."""
    return key in _PER_STEP


def of_training(measured: Sequence[TaskMetric]) -> tuple[Metric, ...]:
    """Return the metrics of a run that learns a task with these metrics, in the order of their curves."""
    return (*LOSS, *pairs(measured), *STEPS)


def of_pretraining() -> tuple[Metric, ...]:
    """Return the metrics of a run of pretraining, in the order of their curves."""
    return (LOSS[0], *FEATURES, *METHODS, GRADIENT_NORM)


def in_table(metrics: Iterable[Metric]) -> tuple[Metric, ...]:
    """Return metrics in the order of a table: of validation, of training, of the steps; the loss after the others."""
    splits = ("val", "train", "")
    return tuple(sorted(metrics, key=lambda metric: (splits.index(metric.split), metric.curve is _LOSS)))


def printed(line: Mapping[str, object]) -> list[str]:
    """Return what the console prints of an epoch's features."""
    return [f"{one.console} {one.form.format(line[one.key])}" for one in FEATURES if one.console and one.key in line]
