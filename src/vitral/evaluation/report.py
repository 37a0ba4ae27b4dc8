"""Write one self-contained HTML page about a run, without scripts and network access.

`write_report` converts `ReportContent` to the data of each section (the functions below, in the order of the page) and
renders `report.html.jinja`. Every section is optional: unknown parts are left out or reported as missing.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from vitral.epoch_metrics import Metric, TaskMetric, in_table, of_training
from vitral.evaluation import figures
from vitral.evaluation.enough import FOR_RATES
from vitral.evaluation.metrics import GROUPED, ClassScore, Evaluation
from vitral.evaluation.page_numbers import compact, duration, percent
from vitral.evaluation.pages import environment, finished, write_page
from vitral.evaluation.sections import Headline, Section
from vitral.wording import count

GALLERY_IMAGES = 24
CLASS_IMAGES = 48
"""Most small images next to the classes, for all classes; with the gallery and the samples this limits the file."""
SAMPLES = 12
"""Most augmented training images."""

_IMAGES_PER_CLASS = 4
_GALLERY_SIDE, _CLASS_SIDE = 224, 64  # pixels
_MATRIX_CLASSES = 30  # with more, numbers in cells are not readable
_CONFUSIONS = 12
_CLASSES_IN_DETAIL = 18
_FIRST_CLASSES = 30  # not collapsed in the table
_HISTORY_LINES = 200
_SPLITS = {"val": "validation", "test": "test", "train": "training"}


class Choice(Protocol):
    """A line of the plan: a choice and its reason."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def reason(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Mistake:
    """A misclassified image; `image` is uint8 (H, W, C)."""

    image: np.ndarray
    name: str
    label: str
    predicted: str
    confidence: float


@dataclass(frozen=True, eq=False)
class ExplainedMistake:
    """A misclassified image with heat maps; images are uint8 (H, W, C)."""

    image: np.ndarray
    """The input of the network."""
    maps: Sequence[tuple[str, float, np.ndarray]]
    """Class, its probability, and the heat map over the image."""
    name: str
    label: str
    predicted: str


@dataclass(frozen=True, eq=False)
class ReportContent:
    """Content of the page; only `title` is required."""

    title: str
    run: str = ""
    """The run or weights, as typed in a command; by default the folder of the page."""
    command: str = ""
    result: Mapping[str, Any] | None = None
    """The contents of result.json."""
    plan: Sequence[Choice] = ()
    history: Sequence[Mapping[str, object]] = ()
    """The lines of metrics.jsonl."""
    evaluation: Evaluation | None = None
    """Metrics of one class per image; other tasks have `headline` and `sections`."""
    measured: Sequence[TaskMetric] = (("accuracy", "accuracy", "{:.2%}"),)
    """Metrics of an epoch besides the loss: key without `train_` or `val_`, title, format."""
    headline: Headline | None = None
    sections: Sequence[Section] = ()
    evaluated_on: str = "val"
    """The split of `evaluation` and `mistakes`: "val" or "test"; "" for images without splits."""
    caution: str = ""
    """A sentence on why the metrics on these images may be too optimistic."""
    findings: Sequence[tuple[str, str]] = ()
    """Additional remarks: heading, sentence."""
    mistakes: Sequence[Mistake] = ()
    layers: Sequence[Mapping[str, object]] = ()
    """Rows {name, type, output_shape, parameters, trainable, flops}."""
    samples: Sequence[tuple[np.ndarray, str]] = ()
    """Augmented training images, uint8 (H, W, C), with their class names."""
    explained: Sequence[ExplainedMistake] = ()
    """Heat maps for the most confident errors."""
    explained_note: str = ""
    """Instructions to read them, or the reason why they are missing."""
    inside: Sequence[figures.Plot] = ()
    """Figure 7 of the paper: filters, positions, and attention distance, each with its `alt` text as caption."""
    inside_note: str = ""


def write_report(path: Path, content: ReportContent) -> None:
    """Write the page atomically."""
    write_page(Path(path), render(content, run=content.run or str(Path(path).parent)))


def render(content: ReportContent, run: str) -> str:
    """Render the page; `run` is the run folder as typed in a command."""
    result = content.result or {}
    evaluation = content.evaluation
    split = _SPLITS.get(content.evaluated_on, content.evaluated_on)
    metrics, best_epoch = of_training(content.measured), result.get("best_epoch")
    best_epoch = int(best_epoch) if isinstance(best_epoch, int | float) else None
    last_kept = result.get("keep") == "last"
    if last_kept:  # no epoch is marked as the best one
        best_epoch = None
    page = environment().get_template("report.html.jinja")
    text = page.render(
        title=content.title,
        split=split,
        subtitle=_subtitle(evaluation, result),
        evaluation=evaluation,
        headline=_headline(evaluation, result, split),
        facts=_facts(evaluation, result, content.evaluated_on),
        caution=content.caution,
        findings=[*content.findings, *_findings(evaluation, content.history, best_epoch), *[_LAST] * last_kept],
        plots=figures.curves(content.history, best_epoch, metrics),
        history=_history_table(content.history, best_epoch, in_table(metrics)),
        result_of=content.headline,
        sections=[_section(one) for one in content.sections],
        matrix=_matrix(evaluation),
        scores=_scores(evaluation),
        several=evaluation is not None and not evaluation.one_class,
        first_classes=_FIRST_CLASSES,
        failures=_failures(evaluation, content.mistakes),
        gallery=_embedded(_most_confident(content.mistakes)[:GALLERY_IMAGES], _GALLERY_SIDE),
        wrong=0 if evaluation is None else round(evaluation.images * (1 - evaluation.accuracy)),
        reliability=figures.reliability(evaluation.calibration, evaluation.ece) if evaluation else None,
        samples=[(figures.embedded(image, _GALLERY_SIDE), label) for image, label in content.samples[:SAMPLES]],
        explained=[_explained(one) for one in content.explained],
        explained_note=content.explained_note,
        inside=content.inside,
        inside_note=content.inside_note,
        plan=content.plan,
        layers=content.layers,
        command=content.command or str(result.get("command") or ""),
        environment=_reproduction(result),
        version=(result.get("versions") or {}).get("vitral", ""),
        run=shlex.quote(run),
        labeled=shlex.quote(str(result["data"])) if evaluation and "data" in result else "",
    )
    return finished(text)


def _subtitle(evaluation: Evaluation | None, result: Mapping[str, object]) -> str:
    trained = " trained on ".join(str(result[key]) for key in ("model", "data") if result.get(key))
    classes = count(len(evaluation.classes), "class", "classes") if evaluation else ""
    return " · ".join(part for part in (trained, classes) if part)


def _headline(evaluation: Evaluation | None, result: Mapping[str, Any], split: str) -> dict[str, object] | None:
    """Return accuracy, its interval, and the accuracy of guessing; None if nothing was measured."""
    if evaluation:
        per_class = [score.images for score in evaluation.per_class]
        return {
            "split": split,
            "accuracy": evaluation.accuracy,
            "interval": evaluation.accuracy_interval,
            "of": evaluation.counted(" ".join(filter(None, (split, "image")))),
            "alike": GROUPED if evaluation.widened else "",
            "right": int(np.trace(evaluation.confusion)),
            "of_ten": evaluation.of_ten_new(),
            "guess": None if evaluation.one_class else max(per_class) / evaluation.images,
            "guess_class": evaluation.classes[int(np.argmax(per_class))],
            "digits": 2 if evaluation.images >= 10_000 else 1,
        }
    for split, key in (("test", "test_accuracy"), ("validation", "val_accuracy")):
        if figures.is_finite(result.get(key)):
            return {"split": split, "accuracy": float(result[key]), "interval": None, "digits": 1}
    return None


def _facts(evaluation: Evaluation | None, result: Mapping[str, Any], split: str) -> list[tuple[str, str, str]]:
    """Return the tiles below the headline: name, value, explanation."""
    facts: list[tuple[str, str, str]] = []

    def known(key: str) -> bool:
        return figures.is_finite(result.get(key))

    if known("test_accuracy") and evaluation and split != "test":
        facts.append(("test accuracy", percent(result["test_accuracy"]), "on images that were not used for any choice"))
    if known("val_accuracy") and (split == "test" if evaluation else known("test_accuracy")):
        facts.append(("validation accuracy", percent(result["val_accuracy"]), "used to select the weights"))
    if evaluation:
        if evaluation.top5 is not None:
            facts.append(("top-5", percent(evaluation.top5), "the label is among the five most probable classes"))
        if not evaluation.one_class:
            facts.append(("macro F1", percent(evaluation.macro_f1), "mean over the classes, each with the same weight"))
        facts.append(("loss", f"{evaluation.loss:.3f}", "cross-entropy, nats"))
        few = evaluation.groups < FOR_RATES
        unreliable = f"; unreliable with only {evaluation.counted()}" if few else ""
        gap = "mean difference between confidence and accuracy, over 15 bins of confidence"
        facts.append(("calibration error", percent(evaluation.ece), f"{gap}{unreliable}"))
    if known("parameters"):
        facts.append(("parameters", compact(result["parameters"]), count(int(result["parameters"]))))
    if known("seconds"):
        epochs = count(int(result["epochs"]), "epoch") if known("epochs") else ""
        compiling = f"{duration(result['compile_seconds'])} of it compiling" if known("compile_seconds") else ""
        facts.append(("training time", duration(result["seconds"]), ", ".join(filter(None, (epochs, compiling)))))
    if known("images_per_second"):
        facts.append(("training speed", compact(result["images_per_second"]), "images per second"))
    return facts


def _findings(
    evaluation: Evaluation | None, history: Sequence[Mapping[str, object]], best_epoch: int | None
) -> list[tuple[str, str]]:
    """Summarize the page for the reader: heading, sentence."""
    findings = []
    if evaluation and evaluation.one_answer is not None:
        findings.append(("One class", f"Every image is classified as “{evaluation.one_answer}”."))
    elif evaluation and evaluation.accuracy < 1:
        label, predicted, times = evaluation.most_confused(1)[0]
        of = evaluation.per_class[evaluation.classes.index(label)].images
        sentence = f"“{label}” classified as “{predicted}”: {times} of {count(of, 'image')}."
        findings.append(("Most frequent error", sentence))
        weakest = min((score for score in evaluation.per_class if score.images), key=lambda score: score.recall)
        correct = round(weakest.recall * weakest.images)
        if not evaluation.one_class:
            findings.append(
                ("Hardest class", f"“{weakest.name}”: {correct} of {count(weakest.images, 'image')} correct.")
            )
    if evaluation:
        findings.append(("Confidence", _confidence_in_words(evaluation)))
        if without := [score.name for score in evaluation.per_class if not score.images]:
            names = ", ".join(f"“{name}”" for name in without[:5]) + (" …" if len(without) > 5 else "")
            sentence = f"{count(len(without), 'class', 'classes')} without images: {names}."
            findings.append(("Not measured", sentence))
    epochs = [
        epoch for epoch, _ in figures.series_of(history, "val_accuracy") or figures.series_of(history, "val_loss")
    ]
    if best_epoch == 0 and epochs:
        sentence = "No epoch was better than the linear probe of the initial weights, which was kept."
        findings.append(("Length of training", sentence))
    if best_epoch is not None and len(epochs) > 2 and best_epoch in epochs:
        after = sum(epoch > best_epoch for epoch in epochs)
        if after:
            sentence = f"Epoch {best_epoch} was the best; the {count(after, 'epoch')} after it did not improve."
        else:
            sentence = f"The last epoch, {best_epoch}, was the best."
        findings.append(("Length of training", sentence))
    return findings


_LAST = ("Weights", "The weights of the last epoch were kept. No best epoch was chosen on the validation images.")


def _confidence_in_words(evaluation: Evaluation) -> str:
    confidence = sum(bin_.images * bin_.confidence for bin_ in evaluation.calibration) / evaluation.images
    low, high = evaluation.accuracy_interval
    means = f"mean confidence {percent(confidence)}, accuracy {percent(evaluation.accuracy)}"
    if evaluation.groups < FOR_RATES:
        of = "images" if evaluation.groups == evaluation.images else "groups of images"
        return f"Too few {of} to judge calibration: {means}."
    if confidence > high:
        return f"Overconfident: {means}."
    if confidence < low:
        return f"Underconfident: {means}."
    return f"Neither overconfident nor underconfident: {means}."


def _history_table(
    history: Sequence[Mapping[str, object]], best_epoch: int | None, metrics: Sequence[Metric]
) -> dict[str, object] | None:
    """Return the table behind the curves, evenly subsampled for very many epochs."""
    columns = [
        ("epoch", "epoch", "{:g}"),
        *((metric.key, metric.title, metric.form) for metric in metrics),
    ]
    columns = [column for column in columns if any(figures.is_finite(line.get(column[0])) for line in history)]
    lines = [line for line in history if figures.is_finite(line.get("epoch"))]
    if not lines:
        return None
    step = -(-len(lines) // _HISTORY_LINES)
    kept = [line for i, line in enumerate(lines) if i % step == 0 or i == len(lines) - 1 or line["epoch"] == best_epoch]
    rows = [
        {
            "best": line["epoch"] == best_epoch,
            "cells": [form.format(line[key]) if figures.is_finite(line.get(key)) else "—" for key, _, form in columns],
        }
        for line in kept
    ]
    best = any(row["best"] for row in rows)
    return {
        "best": best,
        "headings": [heading for _, heading, _ in columns],
        "rows": rows,
        "left_out": len(lines) - len(kept),
    }


def _matrix(evaluation: Evaluation | None) -> dict[str, object] | None:
    """Return the confusion matrix: cells with numbers for few classes, a heat map with a list for many."""
    if evaluation is None:
        return None
    images, classes = evaluation.confusion.sum(axis=1), evaluation.classes
    confused = [
        {"label": label, "predicted": predicted, "times": times, "share": times / max(1, int(images[i]))}
        for label, predicted, times in evaluation.most_confused(_CONFUSIONS)
        for i in (classes.index(label),)
    ]
    if len(classes) > _MATRIX_CLASSES:
        return {"heat_map": figures.heat_map(evaluation.confusion), "confused": confused, "rows": None}
    share = evaluation.confusion / np.maximum(images, 1)[:, None]
    rows = [
        {
            "name": name,
            "cells": [
                {"times": int(evaluation.confusion[i, j]), "share": share[i, j], "shade": _shade(share[i, j], i == j)}
                for j in range(len(classes))
            ],
        }
        for i, name in enumerate(classes)
    ]
    upright = max(len(name) for name in classes) > (5 if len(classes) <= 12 else 2)
    return {"heat_map": None, "confused": confused, "rows": rows, "upright": upright}


def _shade(share: float, right: bool) -> float:
    """Return the opacity of a cell. It is at most 0.8, to keep its number readable; a root keeps rare errors
    visible."""
    return round(0.7 * share**0.5 if right else 0.2 + 0.6 * share**0.5, 3)


def _scores(evaluation: Evaluation | None) -> list[ClassScore]:
    """Sort the classes by F1, worst first, with classes without images at the end."""
    if evaluation is None:
        return []
    return sorted(evaluation.per_class, key=lambda score: (score.images == 0, score.f1, score.name))


def _failures(evaluation: Evaluation | None, mistakes: Sequence[Mistake]) -> dict[str, object]:
    """Return the predictions and most confident errors of each class with errors, lowest recall first."""
    if evaluation is None:
        return {"classes": [], "left_out": 0}
    failing = [(k, score) for k, score in enumerate(evaluation.per_class) if score.images and score.recall < 1]
    failing.sort(key=lambda pair: (pair[1].recall, pair[1].name))
    left = CLASS_IMAGES
    classes = []
    for k, score in failing[:_CLASSES_IN_DETAIL]:
        row = evaluation.confusion[k].copy()
        row[k] = 0
        order = [j for j in np.argsort(-row, kind="stable")[:4] if row[j]]
        own = _most_confident([m for m in mistakes if m.label == score.name])[: min(_IMAGES_PER_CLASS, left)]
        left -= len(own)
        classes.append(
            asdict(score)
            | {
                "found": int(evaluation.confusion[k, k]),
                "predicted": [(evaluation.classes[j], int(row[j])) for j in order],
                "others": int(row.sum() - sum(row[j] for j in order)),
                "mistakes": _embedded(own, _CLASS_SIDE),
            }
        )
    return {"classes": classes, "left_out": len(failing) - len(classes)}


def _section(section: Section) -> dict[str, object]:
    examples = [(figures.embedded(one.image, _GALLERY_SIDE), one.caption, one.name) for one in section.examples]
    return {**vars(section), "examples": examples}


def _most_confident(mistakes: Sequence[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: -mistake.confidence)


def _embedded(mistakes: Sequence[Mistake], side: int) -> list[dict[str, object]]:
    return [{**vars(one), "image": figures.embedded(one.image, side)} for one in mistakes]


def _explained(one: ExplainedMistake) -> dict[str, object]:
    maps = [(label, share, figures.embedded(drawn, _GALLERY_SIDE)) for label, share, drawn in one.maps]
    return {**vars(one), "image": figures.embedded(one.image, _GALLERY_SIDE), "maps": maps}


def _reproduction(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the settings and versions needed to reproduce the result."""
    known = {key: result.get(key) for key in ("seed", "device", "precision")} | dict(result.get("versions") or {})
    return [(key, str(value)) for key, value in known.items() if value is not None]
