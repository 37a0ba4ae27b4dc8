"""One self-contained page about a run: opens from disk, asks no network, runs no script.

`write_report` turns `ReportContent` into what each section shows (the functions below, in the order of the page) and
fills `report.html.jinja`. Every part is conditional: what is not known is left out or said to be missing.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from vitral.evaluation import figures
from vitral.evaluation.metrics import ENOUGH_PICTURES, ClassScore, Evaluation
from vitral.weights.files import write_text

GALLERY_PICTURES = 24
CLASS_PICTURES = 48
"""Small pictures beside the classes, all classes together; with the gallery and the samples this bounds the file."""

_PICTURES_PER_CLASS = 4
_SAMPLES = 12
_GALLERY_SIDE, _CLASS_SIDE = 224, 64  # pixels
_MATRIX_CLASSES = 30  # with more, numbers in cells are no longer readable
_CONFUSIONS = 12
_CLASSES_IN_DETAIL = 18
_CLASSES_AT_ONCE = 30
_HISTORY_LINES = 200
_SPLITS = {"val": "validation", "test": "test", "train": "training"}


class Choice(Protocol):
    """A line of the plan: what was chosen and why."""

    @property
    def name(self) -> str: ...
    @property
    def value(self) -> str: ...
    @property
    def reason(self) -> str: ...


@dataclass(frozen=True, eq=False)
class Mistake:
    """A picture taken for another class; `picture` is uint8 (H, W, C)."""

    picture: np.ndarray
    name: str
    label: str
    predicted: str
    confidence: float


@dataclass(frozen=True, eq=False)
class Sample:
    """A picture as the network sees it in training, after augmentation; `picture` is uint8 (H, W, C)."""

    picture: np.ndarray
    label: str


@dataclass(frozen=True, eq=False)
class LookedAt:
    """A mistake with maps of what it rests on; pictures are uint8 (H, W, C)."""

    picture: np.ndarray
    """As the network saw it."""
    maps: Sequence[tuple[str, float, np.ndarray]]
    """Class, its probability, and the map over the picture."""
    name: str
    label: str
    predicted: str


@dataclass(frozen=True, eq=False)
class ReportContent:
    """What the page tells; only `title` must be known."""

    title: str
    run: str = ""
    """The run or weights, as a person would type it; where it is not said, the page lies in the run's folder."""
    command: str = ""
    result: Mapping[str, Any] | None = None
    """As in result.json."""
    plan: Sequence[Choice] = ()
    history: Sequence[Mapping[str, Any]] = ()
    """The lines of metrics.jsonl."""
    evaluation: Evaluation | None = None
    evaluated_on: str = "val"
    """The split of `evaluation` and `mistakes`: "val" or "test"; "" of pictures that are in none."""
    caution: str = ""
    """Why these pictures may tell too much: a sentence."""
    findings: Sequence[tuple[str, str]] = ()
    """What else is to be said beside the figures: heading, sentence."""
    mistakes: Sequence[Mistake] = ()
    layers: Sequence[Mapping[str, Any]] = ()
    """Rows {name, type, output_shape, parameters, trainable, flops}."""
    samples: Sequence[Sample] = ()
    looked_at: Sequence[LookedAt] = ()
    """What the worst mistakes rest on."""
    looked_note: str = ""
    """How to read that, or why it is not there."""
    inside: Sequence[figures.Plot] = ()
    """Figure 7 of the paper: filters, positions, attention distance; `alt` is shown below each."""
    inside_note: str = ""


def write_report(path: Path, content: ReportContent) -> None:
    """Write the page; `path` holds either the old page or the whole new one, never a part."""
    path = Path(path)
    # File names may hold bytes that are no text (surrogates); a page that cannot be written would help nobody.
    write_text(path, render(content, run=content.run or str(path.parent)).encode("utf-8", errors="replace").decode())


def render(content: ReportContent, run: str) -> str:
    """The page as text; `run` is the run folder as a person would type it."""
    result = content.result or {}
    evaluation = content.evaluation
    split = _SPLITS.get(content.evaluated_on, content.evaluated_on)
    best_epoch = result.get("best_epoch")
    best_epoch = int(best_epoch) if isinstance(best_epoch, int | float) else None
    page = _environment().get_template("report.html.jinja")
    text = page.render(
        title=content.title,
        split=split,
        subtitle=_subtitle(evaluation, result),
        evaluation=evaluation,
        headline=_headline(evaluation, result, split),
        facts=_facts(evaluation, result, content.evaluated_on),
        caution=content.caution,
        findings=[*content.findings, *_findings(evaluation, content.history, best_epoch)],
        plots=figures.curves(content.history, best_epoch),
        history=_history_table(content.history, best_epoch),
        matrix=_matrix(evaluation),
        scores=_scores(evaluation),
        several=evaluation is not None and not evaluation.one_class,
        at_once=_CLASSES_AT_ONCE,
        failures=_failures(evaluation, content.mistakes),
        gallery=_gallery(content.mistakes),
        mistakes_left_out=max(0, len(content.mistakes) - GALLERY_PICTURES),
        reliability=figures.reliability(evaluation.calibration, evaluation.ece) if evaluation else None,
        samples=[(figures.picture(s.picture, _GALLERY_SIDE), s.label) for s in content.samples[:_SAMPLES]],
        looked_at=[_looked(one) for one in content.looked_at],
        looked_note=content.looked_note,
        inside=content.inside,
        inside_note=content.inside_note,
        plan=content.plan,
        layers=content.layers,
        command=content.command or str(result.get("command") or ""),
        told=_told(result),
        version=(result.get("versions") or {}).get("vitral", ""),
        run=shlex.quote(run),
    )
    # Characters that HTML forbids, from hostile names; tab and newline stay.
    return re.sub("[\x00-\x08\x0b-\x1f\x7f]", "�", text)


def _environment() -> Environment:
    environment = Environment(
        loader=FunctionLoader(lambda name: resources.files(__package__).joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, count=count, amount=amount, shape=shape, svg=Markup)
    return environment


# How values are written ------------------------------------------------------


def percent(fraction: float, digits: int = 1) -> str:
    return f"{100 * fraction:.{digits}f}\u202f%"


def count(number: float, singular: str = "", plural: str = "") -> str:
    """1234 → "1,234"; with words, "1 picture", "2 pictures"."""
    word = singular if number == 1 else plural or f"{singular}s"
    return f"{number:,} {word}" if singular else f"{number:,}"


def amount(value: object) -> str:
    """A cell of the layer table: nothing rather than 0 or an unknown."""
    return compact(value) if isinstance(value, int | float) and value else ""


def shape(sizes: object) -> str:
    """[1, 65, 384] → "1 × 65 × 384"."""
    return " × ".join(map(str, sizes)) if isinstance(sizes, list | tuple) else str(sizes or "")


def compact(number: float) -> str:
    """86567656 → "86.6 M"."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return (
                f"{number / size:.3g}\u202f{letter}" if number / size < 999.5 else f"{number / size:.0f}\u202f{letter}"
            )
    return f"{number:.3g}"


def duration(seconds: float) -> str:
    """3725 → "1 h 2 min"."""
    if seconds < 60:
        return f"{seconds:.1f}\u202fs" if seconds < 10 else f"{seconds:.0f}\u202fs"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}\u202fmin {rest}\u202fs" if rest else f"{minutes}\u202fmin"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours}\u202fh {minutes}\u202fmin"
    return f"{hours // 24}\u202fd {hours % 24}\u202fh"


# The sections, in the order of the page --------------------------------------


def _subtitle(evaluation: Evaluation | None, result: Mapping[str, Any]) -> str:
    trained = " trained on ".join(str(result[key]) for key in ("model", "data") if result.get(key))
    classes = count(len(evaluation.classes), "class", "classes") if evaluation else ""
    return " · ".join(part for part in (trained, classes) if part)


def _headline(evaluation: Evaluation | None, result: Mapping[str, Any], split: str) -> dict[str, Any] | None:
    """The one number, where it probably lies, and what guessing would reach; None where nothing was measured."""
    if evaluation:
        per_class = [score.images for score in evaluation.per_class]
        return {
            "split": split,
            "accuracy": evaluation.accuracy,
            "interval": evaluation.accuracy_interval,
            "images": evaluation.images,
            "right": int(np.trace(evaluation.confusion)),
            "guess": None if evaluation.one_class else max(per_class) / evaluation.images,
            "guess_class": evaluation.classes[int(np.argmax(per_class))],
            "digits": 2 if evaluation.images >= 10_000 else 1,
        }
    for split, key in (("test", "test_accuracy"), ("validation", "val_accuracy")):
        if figures.is_finite(result.get(key)):
            return {"split": split, "accuracy": float(result[key]), "interval": None, "digits": 1}
    return None


def _facts(evaluation: Evaluation | None, result: Mapping[str, Any], split: str) -> list[tuple[str, str, str]]:
    """The tiles below the headline: name, value, explanation."""
    facts: list[tuple[str, str, str]] = []

    def known(key: str) -> bool:
        return figures.is_finite(result.get(key))

    if known("test_accuracy") and evaluation and split != "test":
        facts.append(("test accuracy", percent(result["test_accuracy"]), "pictures that no choice was made on"))
    if known("val_accuracy") and (split == "test" if evaluation else known("test_accuracy")):
        facts.append(("validation accuracy", percent(result["val_accuracy"]), "what was kept was chosen on it"))
    if evaluation:
        if evaluation.top5 is not None:
            facts.append(("top-5", percent(evaluation.top5), "label among the five most probable"))
        if not evaluation.one_class:
            facts.append(("macro F1", percent(evaluation.macro_f1), "mean over classes, rare ones count the same"))
        facts.append(("loss", f"{evaluation.loss:.3f}", "cross-entropy, nats"))
        few = f"; {count(evaluation.images, 'picture')} are too few to tell" * (evaluation.images < ENOUGH_PICTURES)
        facts.append(("calibration error", percent(evaluation.ece), f"mean gap of confidence and accuracy{few}"))
    if known("parameters"):
        facts.append(("parameters", compact(result["parameters"]), count(int(result["parameters"]))))
    if known("seconds"):
        epochs = count(int(result["epochs"]), "epoch") if known("epochs") else ""
        compiling = f"{duration(result['compile_seconds'])} of it compiling" if known("compile_seconds") else ""
        facts.append(("training time", duration(result["seconds"]), ", ".join(filter(None, (epochs, compiling)))))
    if known("images_per_second"):
        facts.append(("speed", compact(result["images_per_second"]), "pictures a second"))
    if result.get("device"):
        facts.append(("device", str(result["device"]), str(result.get("precision") or "")))
    return facts


def _findings(
    evaluation: Evaluation | None, history: Sequence[Mapping[str, Any]], best_epoch: int | None
) -> list[tuple[str, str]]:
    """What a person who knows would say after a look at the page: heading, sentence."""
    findings = []
    if evaluation and evaluation.one_answer is not None:
        findings.append(("One answer", f"Every picture is taken for “{evaluation.one_answer}”."))
    elif evaluation and evaluation.accuracy < 1:
        label, predicted, times = evaluation.most_confused(1)[0]
        of = evaluation.per_class[evaluation.classes.index(label)].images
        sentence = f"“{label}” is taken for “{predicted}”: {times} of {count(of, 'picture')}."
        findings.append(("Most frequent mistake", sentence))
        weakest = min((score for score in evaluation.per_class if score.images), key=lambda score: score.recall)
        found = round(weakest.recall * weakest.images)
        if not evaluation.one_class:
            findings.append(
                ("Hardest class", f"“{weakest.name}”: {found} of {count(weakest.images, 'picture')} recognised.")
            )
    if evaluation:
        findings.append(("Confidence", _confidence_in_words(evaluation)))
        if without := [score.name for score in evaluation.per_class if not score.images]:
            names = ", ".join(f"“{name}”" for name in without[:5]) + (" …" if len(without) > 5 else "")
            sentence = f"{count(len(without), 'class', 'classes')} without pictures, so nothing is known of: {names}."
            findings.append(("Not measured", sentence))
    epochs = [epoch for epoch, _ in figures.series_of(history, "val_accuracy")]
    if best_epoch is not None and len(epochs) > 2 and best_epoch in epochs:
        after = sum(epoch > best_epoch for epoch in epochs)
        if after:
            sentence = f"Epoch {best_epoch} was the best; the {count(after, 'epoch')} after it did no better."
        else:
            sentence = f"The last epoch, {best_epoch}, was the best: more epochs may do better still."
        findings.append(("Length of training", sentence))
    return findings


def _confidence_in_words(evaluation: Evaluation) -> str:
    sure = sum(bin_.images * bin_.confidence for bin_ in evaluation.calibration) / evaluation.images
    low, high = evaluation.accuracy_interval
    means = f"on average {percent(sure)} sure and {percent(evaluation.accuracy)} right"
    if evaluation.images < ENOUGH_PICTURES:
        return f"Too few pictures to judge it: {means}."
    if sure > high:
        return f"Too sure of itself: {means}."
    if sure < low:
        return f"Too cautious: {means}."
    return f"No sign of being too sure or too cautious: {means}."


def _history_table(history: Sequence[Mapping[str, Any]], best_epoch: int | None) -> dict[str, Any] | None:
    """The numbers behind the curves, thinned out evenly where there are very many epochs."""
    columns = [
        ("epoch", "epoch", "{:g}"),
        ("train_loss", "train loss", "{:.4f}"),
        ("val_loss", "validation loss", "{:.4f}"),
        ("train_accuracy", "train accuracy", "{:.2%}"),
        ("val_accuracy", "validation accuracy", "{:.2%}"),
        ("lr", "learning rate", "{:.3g}"),
        ("images_per_second", "pictures/s", "{:,.0f}"),
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


def _matrix(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """The confusion matrix: as cells with numbers for few classes, as a heat map with a list for many."""
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
    """Opacity of a cell, at most 0.8 so that the number on it stays readable; the root keeps a rare mistake visible."""
    return round(0.7 * share**0.5 if right else 0.2 + 0.6 * share**0.5, 3)


def _scores(evaluation: Evaluation | None) -> list[ClassScore]:
    """Worst F1 first; classes without pictures at the end."""
    if evaluation is None:
        return []
    return sorted(evaluation.per_class, key=lambda score: (score.images == 0, score.f1, score.name))


def _failures(evaluation: Evaluation | None, mistakes: Sequence[Mistake]) -> dict[str, Any]:
    """For each class with mistakes, lowest recall first: what it is taken for, and its most confident mistakes."""
    if evaluation is None:
        return {"classes": [], "left_out": 0}
    failing = [(k, score) for k, score in enumerate(evaluation.per_class) if score.images and score.recall < 1]
    failing.sort(key=lambda pair: (pair[1].recall, pair[1].name))
    left = CLASS_PICTURES
    classes = []
    for k, score in failing[:_CLASSES_IN_DETAIL]:
        row = evaluation.confusion[k].copy()
        row[k] = 0
        order = [j for j in np.argsort(-row, kind="stable")[:4] if row[j]]
        own = _most_confident([m for m in mistakes if m.label == score.name])[: min(_PICTURES_PER_CLASS, left)]
        left -= len(own)
        classes.append(
            asdict(score)
            | {
                "found": int(evaluation.confusion[k, k]),
                "taken_for": [(evaluation.classes[j], int(row[j])) for j in order],
                "others": int(row.sum() - sum(row[j] for j in order)),
                "pictures": _shown(own, _CLASS_SIDE),
            }
        )
    return {"classes": classes, "left_out": len(failing) - len(classes)}


def _gallery(mistakes: Sequence[Mistake]) -> list[dict[str, Any]]:
    return _shown(_most_confident(mistakes)[:GALLERY_PICTURES], _GALLERY_SIDE)


def _most_confident(mistakes: Sequence[Mistake]) -> list[Mistake]:
    return sorted(mistakes, key=lambda mistake: -mistake.confidence)


def _shown(mistakes: Sequence[Mistake], side: int) -> list[dict[str, Any]]:
    return [
        {
            "picture": figures.picture(mistake.picture, side),
            "name": mistake.name,
            "label": mistake.label,
            "predicted": mistake.predicted,
            "confidence": float(mistake.confidence),
        }
        for mistake in mistakes
    ]


def _looked(one: LookedAt) -> dict[str, Any]:
    return {
        "picture": figures.picture(one.picture, _GALLERY_SIDE),
        "maps": [(label, probability, figures.picture(drawn, _GALLERY_SIDE)) for label, probability, drawn in one.maps],
        "name": one.name,
        "label": one.label,
        "predicted": one.predicted,
    }


def _told(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What else decides whether a repetition gives the same figures."""
    known = {key: result.get(key) for key in ("seed", "device", "precision")} | dict(result.get("versions") or {})
    return [(key, str(value)) for key, value in known.items() if value is not None]
