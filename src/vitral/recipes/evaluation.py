"""How good a trained network is: on its own held-out pictures, or on any other set with the same classes."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from vitral.data import DataSet, Split
from vitral.data import load as load_data
from vitral.data.check import Unreadable, left_out, readable
from vitral.data.loader import Batches, Progress
from vitral.device import choose
from vitral.errors import DataError, UsageError, unknown
from vitral.evaluation.metrics import Evaluation, measure
from vitral.model import summarize
from vitral.model.linear import plainly
from vitral.model.views import COUNTS, Views
from vitral.predict import Engine, Predictor, load
from vitral.recipes.room import at_once
from vitral.recipes.run_data import OwnData, are_its, own_data
from vitral.training.run import RunFolder
from vitral.weights.labels import match

CAUTION = {
    "train": "The network learned from these pictures, so expect less on new ones.",
    "val": "What was kept of training was chosen on these pictures, so expect slightly less on new ones.",
}
"""What to know of a run's figures on a split of its own data."""


@dataclass(frozen=True)
class Beside:
    """An evaluation with merged tokens, or over several views, beside the same network without either."""

    merged: int
    """Tokens merged in each block."""
    views: int
    """Views of each picture."""
    accuracy: float
    accuracy_without: float
    agree: float
    """The share of pictures that are answered alike."""

    def __str__(self) -> str:
        merged = f"{self.merged} {'token' if self.merged == 1 else 'tokens'} merged in each block"
        views = f"averaged over {self.views} views of each picture"
        done = " and ".join([merged] * bool(self.merged) + [views] * (self.views > 1))
        return f"{done}: {self.accuracy:.2%} right, without {self.accuracy_without:.2%}; {self.agree:.1%} alike"


_LOOKED_AT_PLAINLY = "Maps are of the picture alone, with all its tokens."


@dataclass(frozen=True, eq=False)
class Evaluated:
    """An evaluation with what it was made from."""

    evaluation: Evaluation
    predictor: Predictor
    pictures: Split
    """In the order of `probabilities`, labelled with the network's classes."""
    source: str
    split: str
    """ "all" where the data have no splits."""
    probabilities: np.ndarray
    beside: Beside | None = None
    """Where tokens were merged or views averaged: what that changes."""

    caution: str = ""
    """Why a run's figures on these pictures tell too much of it."""
    changed: str = ""
    """How a run's own pictures differ from those that it began with."""
    unreadable: tuple[str, ...] = ()
    """Names of pictures that were left out."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Words of warning for the command line, with what to type instead of a measurement on train pictures."""
        other = f" On others: vitral evaluate {shlex.quote(self.predictor.source)}"
        caution = self.caution + other * (self.caution == CAUTION["train"])
        return tuple(filter(None, (left_out(self.unreadable), self.changed, caution)))

    def write_report(self, path: Path, command: str) -> None:
        """A page with the figures, the confusion matrix and the most confident mistakes."""
        from vitral.evaluation.report import ReportContent, write_report  # here: what draws takes a second to import
        from vitral.recipes.looking import confident_mistakes, look_inside

        mistakes = confident_mistakes(self.probabilities, self.pictures, self.predictor.classes)
        summary = summarize(self.predictor.model)
        looks = look_inside(self.predictor, mistakes, self.pictures, summary.flops)
        if looks.looked_at and self.beside:
            looks = dataclasses.replace(looks, looked_note=f"{looks.looked_note} {_LOOKED_AT_PLAINLY}".strip())
        findings = [("Views and merging", f"{self.beside}.")] if self.beside else []
        if self.changed:
            findings.insert(0, ("Other pictures", self.changed))
        if self.unreadable:
            findings.insert(0, ("Unreadable", left_out(self.unreadable)))
        content = ReportContent(
            title=f"{self.predictor.source} on {self.source}", run=self.predictor.source, command=command,
            evaluation=self.evaluation,
            evaluated_on="" if self.split == "all" else self.split, caution=self.caution,
            findings=findings,
            mistakes=mistakes, layers=summary.to_json()["layers"], **vars(looks),
        )  # fmt: skip
        write_report(path, content)


def evaluate(
    model: str | Path | Predictor,
    data: str | Path | None = None,
    *,
    split: str | None = None,
    data_root: str | Path = "data",
    bad_images: str = "error",
    device: str = "auto",
    precision: str = "auto",
    engine: Engine = "auto",
    merge: int = 0,
    tta: Views = "none",
    progress: Progress | None = None,
) -> Evaluation:
    """Measure `model` (a run folder, weights file or predictor) on `data`, by default the data of its own run.

    `split` is by default the one furthest from training that there is: test, else val, else all the pictures. Classes
    are matched by name: the data may lack some of the network's, and may not have others (`DataError`). `precision`,
    `engine`, `merge` and `tta` are those of `vitral.load`, for a model that is no predictor yet; but where nothing else
    is asked for, the module itself computes, as at the end of its run, and figures are the same to the last picture.
    Unreadable pictures are an error that names them, or are left out: with `bad_images="skip"`, and of a run's own data
    where the run did so. A run's own data may have changed: `DataError` where it may have learned from some of the
    pictures.
    """
    return evaluate_pictures(
        model, data, split=split, data_root=data_root, bad_images=bad_images, device=device, precision=precision,
        engine=engine, merge=merge, tta=tta, progress=progress,
    ).evaluation  # fmt: skip


def evaluate_pictures(
    model: str | Path | Predictor,
    data: str | Path | None,
    *,
    split: str | None,
    data_root: str | Path,
    bad_images: str,
    device: str,
    precision: str,
    engine: Engine = "auto",
    merge: int = 0,
    tta: Views = "none",
    progress: Progress | None,
) -> Evaluated:
    """`evaluate`, with the predictions beside the figures."""
    skip = skips(bad_images)
    if isinstance(model, Predictor):
        predictor, machine = model, model.machine
    elif precision == "int8" or merge or engine in ("openvino", "packed", "compiled"):
        predictor = load(model, device=device, precision=precision, engine=engine, merge=merge, tta=tta)
        machine = predictor.machine
    else:  # the module's fp32 weights under autocast, as at the end of training: the same figures to the last picture
        itself: Engine = "plain" if engine == "auto" else engine
        predictor = load(model, device=device, precision="fp32", engine=itself, tta=tta)
        if itself == "plain" and (folder := RunFolder(predictor.source)).is_run() and folder.read_plan().run.plain:
            plainly(predictor.model)
        machine = choose(device, precision, dim=predictor.model.config.dim)
    dataset, own = data_for(model, data, data_root)
    whole = set(dataset.splits) == {"train"}  # nobody has parted them: they are no one's train pictures
    chosen = split or next(name for name in ("test", "val", "train") if name in dataset.splits)
    chosen = "train" if whole and chosen == "all" else chosen
    caution = CAUTION.get(chosen, "") if data is None or _learned(predictor, dataset) else ""
    dataset = dataclasses.replace(dataset, splits={chosen: dataset[chosen]})
    told = (own.instead(chosen) if split is None else "", own.measured_on(chosen)) if own else ()  # it may refuse
    changed = " ".join(filter(None, told))
    skip = skip or (own is not None and left_out_bad(predictor))
    pictures, batches, unreadable = in_batches(
        predictor, in_classes_of(predictor, dataset), chosen, skip=skip, progress=progress
    )
    altered = predictor.merge or predictor.tta != "none"
    with nullcontext() if machine is predictor.machine else machine.autocast():
        logits, *plain = _logits([predictor, *[predictor.plainly()] * bool(altered)], batches)
    probabilities = logits.softmax(1).numpy()
    evaluation = measure(probabilities, pictures.labels, predictor.classes)
    beside = _beside(predictor, logits, plain[0], pictures.labels) if plain else None
    named = "all" if whole else chosen
    return Evaluated(
        evaluation, predictor, pictures, dataset.source, named, probabilities, beside, caution, changed, unreadable
    )


def _learned(predictor: Predictor, dataset: DataSet) -> bool:
    """Whether these are the data of the predictor's own run, there or elsewhere."""
    folder = RunFolder(predictor.source)
    if not folder.is_run():
        return False
    plan = folder.read_plan()
    return _same(plan.located("data"), dataset.source) or are_its(plan, dataset)


def skips(bad_images: str) -> bool:
    """Whether unreadable pictures are left out; `UsageError` for a choice that there is not."""
    if bad_images not in ("error", "skip"):
        raise unknown("choice for bad pictures:", bad_images, ("error", "skip"))
    return bad_images == "skip"


def left_out_bad(predictor: Predictor) -> bool:
    """Whether the predictor's own run left out pictures that cannot be read: nobody need say so again of its data."""
    folder = RunFolder(predictor.source)
    return folder.is_run() and folder.read_plan().run.bad_images == "skip"


def _same(data: str, other: str) -> bool:
    return data == other or (os.path.exists(data) and os.path.exists(other) and os.path.samefile(data, other))


def _logits(predictors: Sequence[Predictor], batches: Batches) -> list[torch.Tensor]:
    """Logits (n, K) by each of them on the CPU; pictures are read once."""
    rows = [[predictor.logits(batch.images) for predictor in predictors] for batch in batches.epoch()]
    return [torch.cat(column).cpu() for column in zip(*rows, strict=True)]


def _beside(predictor: Predictor, logits: torch.Tensor, plain: torch.Tensor, labels: np.ndarray) -> Beside:
    answers, others = logits.argmax(1).numpy(), plain.argmax(1).numpy()
    shares = (float(np.mean(same)) for same in (answers == labels, others == labels, answers == others))
    return Beside(predictor.merge, COUNTS[predictor.tta], *shares)


def in_batches(
    predictor: Predictor,
    dataset: DataSet,
    split: str,
    *,
    skip: bool,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> tuple[Split, Batches, tuple[str, ...]]:
    """The pictures of a split that can be read, what the predictor reads of them, and the names of others, which are
    left out where `skip` says so; else `DataError` names them.
    """

    device = predictor.machine.device
    count = batch_size or at_once(predictor.model.config, device)

    def read(pictures: Split) -> Batches:
        return Batches(pictures, predictor.preprocessing, batch_size=count, device=device, progress=progress)

    pictures, bad = dataset[split], list[Unreadable]()
    batches = read(pictures)
    if batches.unreadable:
        bad = [Unreadable(split, index, error.name, error.why or "") for index, error in batches.unreadable]
        pictures = readable(dataset, bad, "skip" if skip else "error")[split]
        batches = read(pictures)
    return pictures, batches, tuple(one.name for one in bad)


def data_for(
    model: str | Path | Predictor, data: str | Path | None, data_root: str | Path, command: str = "evaluate"
) -> tuple[DataSet, OwnData | None]:
    """The data that are named, else those of the model's own run, which may have changed; `UsageError` with what to
    type after `command` where it has none.
    """
    if data is not None:
        return load_data(data, root=data_root), None
    source = model.source if isinstance(model, Predictor) else str(model)
    folder = RunFolder(source)
    if not folder.is_run():
        hint = f"vitral {command} {shlex.quote(source) if source else 'WEIGHTS'} DATA"
        raise UsageError("weights alone do not say which pictures to read", where=source or None, hint=hint)
    own = own_data(folder.read_plan())
    return own.dataset, own


def in_classes_of(predictor: Predictor, dataset: DataSet) -> DataSet:
    """The data set with labels that count the network's classes; `DataError` for pictures of one that it lacks.

    Classes are the same that have the same name, or are the same class of ImageNet (`n01440764` and `tench`), or differ
    in case alone (`labels.match`). timm and others compare by number and report 0.1 % without a word when the numbering
    differs.
    """
    place = match(dataset.classes, predictor.classes)
    there = {int(label) for split in dataset.splits.values() for label in np.unique(split.labels)}
    if foreign := [name for i, name in enumerate(dataset.classes) if place[i] is None and i in there]:
        few = ", ".join(foreign[:4]) + (" …" if len(foreign) > 4 else "")
        raise DataError(
            f"the data have {len(foreign)} classes that the model does not know: {few}",
            where=dataset.source,
            why=f"the model knows {', '.join(predictor.classes[:6])}{' …' if len(predictor.classes) > 6 else ''}",
            hint=f"rename the folders, or train on this data: {_learning(dataset.source, predictor.source)}",
        )
    number = np.array([-1 if index is None else index for index in place])
    splits = {name: Split(s.names, number[s.labels], s.fetch) for name, s in dataset.splits.items()}
    return dataclasses.replace(dataset, classes=predictor.classes, splits=splits)


def _learning(data: str, weights: str) -> str:
    return shlex.join(["vitral", "train", data, *(["--init", weights] if weights else [])])
