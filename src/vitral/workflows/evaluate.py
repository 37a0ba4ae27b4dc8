"""Evaluate a trained network on its own held-out images, or on any data set with the same classes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import shlex
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitral.data import DataSet, Split
from vitral.data import load as load_data
from vitral.data.checks.findings import Unreadable
from vitral.data.checks.groups import with_copies
from vitral.data.checks.validate import drop_unopened, left_out, readable
from vitral.data.images.depth import leveled
from vitral.data.loader import Batches, Progress
from vitral.data.options import DataOptions
from vitral.data.parts import Part
from vitral.data.tables_in_memory import Examples
from vitral.data.targets import Labeling, targets_of
from vitral.device import Machine, choose, plain_modes
from vitral.distributed.ranks import ALONE, Ranks, current, joined
from vitral.errors import DataError, UsageError
from vitral.evaluation.metrics import Evaluation
from vitral.evaluation.rows import rows_of
from vitral.folders import same_path
from vitral.inference.options import InferenceOptions
from vitral.inference.outputs import output_of
from vitral.inference.outputs.classes import Classes, require_head
from vitral.inference.predictor import Engine, Predictor
from vitral.inference.tta import COUNTS, Views
from vitral.kernels import reference_ops
from vitral.kinds import checked
from vitral.model import summarize
from vitral.model.settings import check_head
from vitral.training.options import Run
from vitral.training.run_folder import RunFolder
from vitral.weights.class_names import ORDERS, in_order, match
from vitral.weights.read.references import is_weights
from vitral.workflows.planning.memory import eval_batch_size
from vitral.workflows.planning.run_data import RunData, is_data_of, load_run_data, seen_as, with_known_groups
from vitral.workflows.tasks import TASKS, task_of

REPEAT = "repeat the command: nothing was written"
"""Hint after a rank was lost."""
CAUTION = {
    "train": "The network was trained on these images; expect a lower accuracy on new images.",
    "val": "The weights were selected on these images; expect a slightly lower accuracy on new images.",
}
"""Caveats for the metrics of a run on a split of its own data."""


def caution_of(split: str, run: Run | None) -> str:
    """Return the caveat for the metrics of a run on a split of its own data; "" without one."""
    chosen = run is None or run.keep == "best" or targets_of(run.task).threshold is not None
    return CAUTION.get(split, "") if chosen or split != "val" else ""


@dataclass(frozen=True)
class Comparison:
    """An evaluation with averaged views, compared with the same network without them."""

    views: int
    """Views of each image."""
    accuracy: float
    accuracy_without: float
    agree: float
    """Share of images with the same predicted class."""

    def __str__(self) -> str:
        accuracies = f"accuracy {self.accuracy:.2%}, without {self.accuracy_without:.2%}"
        return (
            f"averaged over {self.views} views of each image: {accuracies}; {self.agree:.1%} of the predictions agree"
        )


_PLAIN_MAPS = "Heat maps explain each image itself, not the average over its views."


@dataclass(frozen=True, eq=False)
class Evaluated:
    """An evaluation with its predictor, images and probabilities."""

    evaluation: Evaluation
    predictor: Predictor
    images: Split
    """In the order of `probabilities` (n, K), labeled with the network's classes; `groups` are counted in intervals."""
    source: str
    split: str
    """ "all" for data without splits."""
    probabilities: np.ndarray
    comparison: Comparison | None = None
    """Comparison with the plain network, if views were averaged."""

    caution: str = ""
    """The reason why the metrics on these images are too optimistic; else empty."""
    changed: str = ""
    """Changes to the run's own images since it was planned."""
    relabeled: int = 0
    """Number of the run's own images with other labels than when it began, of those known by its record."""
    unreadable: tuple[str, ...] = ()
    """Names of unreadable images that were left out."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings for the command line; for training images, with the command to evaluate on others."""
        run = shlex.quote(self.predictor.source)
        other = f" To measure on held-out images, if the run has any: vitral evaluate {run}"
        caution = self.caution + other * (self.caution == CAUTION["train"])
        return tuple(filter(None, (left_out(self.unreadable), self.changed, caution)))

    def write_report(self, path: Path, command: str) -> None:
        """Write a page with the metrics, the confusion matrix and the most confident errors."""
        from vitral.evaluation.report import ReportContent, write_report  # importing matplotlib takes a second

        summary = summarize(self.predictor.network)
        findings = [("Views", f"{self.comparison}.")] if self.comparison else []
        if self.changed:
            findings.insert(0, ("Other images", self.changed))
        if self.unreadable:
            findings.insert(0, ("Unreadable", left_out(self.unreadable)))
        content = ReportContent(
            title=f"{self.predictor.source} on {self.source}",
            run=self.predictor.source,
            command=command,
            evaluated_on="" if self.split == "all" else self.split,
            caution=self.caution,
            findings=findings,
            layers=summary.to_json()["layers"],
        )
        task = task_of(self.predictor.output.task)
        images = self.images.with_levels(self.predictor.preprocessing.levels)
        content = task.page(content, self.predictor, self.probabilities, images, self.evaluation, summary.flops)
        if content.explained and self.comparison:
            content = dataclasses.replace(content, explained_note=f"{content.explained_note} {_PLAIN_MAPS}".strip())
        write_report(path, content)


@partial(checked, but=("data",))  # `as_path` checks it
@plain_modes()
def evaluate(
    model: str | Path | Predictor | nn.Module,
    data: str | Path | DataSet | Examples | None = None,
    *,
    split: str | None = None,
    data_root: str | Path = "data",
    bad_images: str = "error",
    device: str = "auto",
    precision: str = "auto",
    engine: Engine = "auto",
    tta: Views = "none",
    progress: Progress | None = None,
) -> Evaluation:
    """Measure a network on labeled images.

    By default, the plain PyTorch module computes the predictions, so the metrics equal those at the end of its run.
    Classes are matched by name: the data may have fewer classes than the network, but no others. Under torchrun each
    process computes some of the batches, and all processes return the same metrics. Only the first process has
    `predictions`.

    Args:
        model: A run folder, a weights file, a predictor, or a network in memory.
        data: A path, a name, or data in memory, as for `vitral.load_data` (default: the data of the run).
        split: The split to use (default: test, otherwise val, otherwise all images).
        data_root: Folder for data sets that vitral downloads by name, such as `cifar10`.
        bad_images: `error` stops at unreadable images and names them, `skip` leaves them out. A run that left images
            out leaves them out again.
        device: `auto`, `cpu`, `cuda` or `mps`.
        precision: As for `vitral.load`, if `model` is not a predictor.
        engine: As for `vitral.load`, if `model` is not a predictor.
        tta: As for `vitral.load`, if `model` is not a predictor.
        progress: Function that is called with the number of images that are done.

    Returns:
        The metrics of the task of the network, such as `accuracy` for classes.

    Raises:
        DataError: The data have classes that the network does not know, or the data of the run have changed and the
            network may have been trained on some of the images.
        UsageError: There is no such split, device or engine.

    Example:
        found = vitral.evaluate("runs/photos")
        print(found.accuracy, found.images)
    """
    options = InferenceOptions(device, precision, engine, tta)
    found = evaluate_images(model, DataOptions(data, split, data_root, bad_images), options, progress)
    rows = partial(rows_of, found.images, found.probabilities, found.predictor.output)
    object.__setattr__(found.evaluation, "_rows", rows)  # not a field: JSON and equality leave it out
    return found.evaluation


def evaluate_images(
    model: str | Path | Predictor | nn.Module,
    data: DataOptions,
    options: InferenceOptions,
    progress: Progress | None = None,
    check: Callable[[Predictor], None] | None = None,
) -> Evaluated:
    """Evaluate as `evaluate` does, and also return the predictions; of several ranks, only the first one gets them.

    `check` may raise an error for a predictor before an image is read.
    """
    if current().together:  # called by the callback of one rank: the others do something else
        return _evaluate(model, data, options, progress, check, ALONE)
    with joined(options.device, REPEAT) as ranks:
        return _evaluate(model, data, options, progress, check, ranks)


def _evaluate(
    model: str | Path | Predictor | nn.Module,
    data: DataOptions,
    options: InferenceOptions,
    progress: Progress | None,
    check: Callable[[Predictor], None] | None,
    ranks: Ranks,
) -> Evaluated:
    predictor, machine = ranks.agree(lambda: _load(model, options, check))
    dataset, own = ranks.agree(lambda: _grouped(predictor, *data_for(predictor, data)))
    chosen, described = ranks.agree(lambda: _describe(predictor, dataset, own, data))
    dataset = dataclasses.replace(dataset, splits={chosen: dataset[chosen]})
    dataset = ranks.agree(lambda: leveled(dataset, predictor.preprocessing.levels))
    skip = data.skip or (own is not None and left_out_bad(predictor))
    dataset = ranks.agree(lambda: in_classes_of(predictor, dataset))
    images, batches, unreadable = in_batches(predictor, dataset, chosen, skip=skip, progress=progress, ranks=ranks)
    altered = predictor.tta != "none"
    with nullcontext() if machine is predictor.machine else machine.autocast():
        logits = _logits([predictor, predictor.plainly()] if altered else [predictor], batches, ranks)
    left_out = (*dataset.left_out, *unreadable)

    probabilities = np.zeros((0, len(predictor.classes)), np.float32)
    if ranks.main:
        images = with_copies(images)
        probabilities = predictor.output.values(logits[0]).numpy()

    def measured() -> tuple[Any, Comparison | None]:
        output = predictor.output
        if altered and isinstance(output, Classes):  # a mean of probabilities has no logits without the temperature
            output = dataclasses.replace(output, temperature=1.0)
        evaluation = task_of(output.task).measure(probabilities, images.labels, output, images.groups)
        return evaluation, _compare(predictor, logits[0], logits[1], images.labels) if altered else None

    evaluation, comparison = ranks.share(measured)
    return Evaluated(
        evaluation,
        predictor,
        images,
        dataset.source,
        probabilities=probabilities,
        comparison=comparison,
        unreadable=left_out,
        **described,
    )


def _grouped(predictor: Predictor, dataset: DataSet, own: RunData | None) -> tuple[DataSet, RunData | None]:
    """Return the data with the near-duplicates that the predictor's own run found in them."""
    folder = RunFolder(predictor.source)
    known = own is None and folder.is_run()  # a run's own data have theirs
    return with_known_groups(folder.read_plan(), dataset) if known else dataset, own


def _describe(
    predictor: Predictor, dataset: DataSet, own: RunData | None, data: DataOptions
) -> tuple[str, dict[str, Any]]:
    """Return the split to evaluate, and in `Evaluated`'s fields its name and what to know about its images."""
    whole = set(dataset.splits) == {"train"}  # data without splits: not necessarily training images
    chosen = data.split or next(name for name in ("test", "val", "train") if name in dataset.splits)
    chosen = "train" if whole and chosen == "all" else chosen
    folder = RunFolder(predictor.source)
    run = folder.read_plan().run if folder.is_run() else None
    caution = caution_of(chosen if data.data is None else _seen_as(predictor, dataset, chosen), run)
    dataset[chosen]  # raises if the data have no such split
    notes = (own.missing_test(chosen) if data.split is None else "", own.check_split(chosen)) if own else ()
    changed = " ".join(filter(None, notes))
    relabeled = own.again[chosen].relabeled if own and chosen in own.again else 0
    shown = "all" if whole else chosen
    return chosen, {"split": shown, "caution": caution, "changed": changed, "relabeled": relabeled}


def _load(
    model: str | Path | Predictor | nn.Module, options: InferenceOptions, check: Callable[[Predictor], None] | None
) -> tuple[Predictor, Machine]:
    """Return the predictor to evaluate, and the machine that it computes on. A predictor has its own options."""
    predictor, machine = _loaded(model, options)
    if check:
        check(predictor)
    return predictor, machine


def _loaded(model: str | Path | Predictor | nn.Module, options: InferenceOptions) -> tuple[Predictor, Machine]:
    if isinstance(model, Predictor):
        check_head(model.network, len(model.classes))
        return copy.copy(model), model.machine  # whose outputs may be named here
    if options.precision == "int8" or options.engine in ("openvino", "packed", "compiled"):
        predictor = options.load(model)
        return predictor, predictor.machine
    # fp32 weights under autocast, as at the end of training, for the same metrics to the last image
    engine = "plain" if options.engine == "auto" else options.engine
    predictor = dataclasses.replace(options, precision="fp32", engine=engine).load(model)
    folder = RunFolder(predictor.source)
    if engine == "plain" and folder.is_run() and folder.read_plan().run.plain:
        reference_ops(predictor.model)
    return predictor, choose(options.device, options.precision, dim=predictor.network.config.dim)


def _seen_as(predictor: Predictor, dataset: DataSet, split: str) -> str:
    """Return the split of the predictor's own run that has images of this one; "" if none has."""
    folder = RunFolder(predictor.source)
    if not folder.is_run():
        return ""
    plan = folder.read_plan()
    if same_path(plan.located("data"), dataset.source) or is_data_of(plan, dataset):
        return split
    return seen_as(plan, dataset[split])


def left_out_bad(predictor: Predictor) -> bool:
    """True if the predictor's own run left out unreadable images; the same then holds for its data by default."""
    folder = RunFolder(predictor.source)
    return folder.is_run() and folder.read_plan().run.bad_images == "skip"


def _logits(predictors: Sequence[Predictor], batches: Batches, ranks: Ranks) -> list[torch.Tensor]:
    """Return the logits (n, K) of each predictor on the CPU, reading the images once; none on all ranks but the first.

    `batches` are those of this rank.
    """
    rows = []
    for number, batch in enumerate(batches.epoch()):
        ranks.reached(f"batch {number + 1} of {len(batches)}")
        rows.append([predictor.logits(batch.images) for predictor in predictors])
    if ranks.count == 1:
        return [torch.cat(column).cpu() for column in zip(*rows, strict=True)]
    every = ranks.collect_in_turn([[logits.cpu() for logits in row] for row in rows])
    return [] if every is None else [torch.cat(column) for column in zip(*every, strict=True)]


def _compare(predictor: Predictor, logits: torch.Tensor, plain: torch.Tensor, labels: np.ndarray) -> Comparison:
    predicted, reference = logits.argmax(1).numpy(), plain.argmax(1).numpy()
    shares = (float(np.mean(same)) for same in (predicted == labels, reference == labels, predicted == reference))
    return Comparison(COUNTS[predictor.tta], *shares)


def in_batches(
    predictor: Predictor,
    dataset: DataSet,
    split: str,
    *,
    skip: bool,
    batch_size: int | None = None,
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
) -> tuple[Split, Batches, tuple[str, ...]]:
    """Return the readable images of a split, their batches for the predictor, and the names of unreadable images.

    Unreadable images are left out with `skip`; without it they raise a `DataError` that names them. A rank decodes its
    own images only, which are every count-th batch.
    """
    device, beside = predictor.machine.device, Part(beside=ranks.local_count)
    count = ranks.share(lambda: batch_size or eval_batch_size(predictor.network.config, device))

    def read(images: Split) -> tuple[np.ndarray, Batches]:
        every = np.arange(len(images))
        if ranks.count > 1:
            part = Part(ranks.number, ranks.count)
            whole = [every[first : first + count] for first in range(0, len(images), count)]
            every = np.concatenate([every[:0], *part.whole(whole)])
            images = images.select(every)
        return every, Batches(
            images, predictor.preprocessing, batch_size=count, device=device, check=skip, progress=progress, part=beside
        )

    images = dataset[split]
    own, batches = ranks.agree(lambda: read(images))
    found = [Unreadable(split, int(own[i]), error.name, error.why or "") for i, error in batches.unreadable]
    bad = sorted(itertools.chain(*ranks.exchange(found)), key=lambda one: one.index)
    if bad:
        images = ranks.agree(lambda: readable(dataset, bad, "skip" if skip else "error")[split])
        _, batches = ranks.agree(lambda: read(images))
    return images, batches, tuple(one.name for one in bad)


def data_for(
    model: str | Path | Predictor, data: DataOptions, command: str = "evaluate"
) -> tuple[DataSet, RunData | None]:
    """Load the data set, else that of the model's own run, which may have changed.

    With `data.skip` class folders without a file that can be opened are left out. Raises `UsageError`, with the
    `command` to type, if there is no data set and the model is not a run.
    """
    dataset, own = _data_for(model, data, command)
    return drop_unopened(dataset) if data.skip else dataset, own


def _data_for(model: str | Path | Predictor, data: DataOptions, command: str) -> tuple[DataSet, RunData | None]:
    if data.data is not None:
        return load_data(data.data, root=data.data_root, wanted=_wanted(model, data), tasks=tuple(TASKS)), None
    source = model.source if isinstance(model, Predictor) else str(model)
    folder = RunFolder(source)
    if not folder.is_run():
        weights = shlex.quote(source) if is_weights(source) else "WEIGHTS"
        hint = f"vitral {command} {weights} DATA, or data=DATA in Python"
        raise UsageError("weights without a run need DATA", where=source or None, hint=hint)
    own = load_run_data(folder.read_plan())
    return own.dataset, own


def _wanted(model: str | Path | Predictor, data: DataOptions) -> Labeling:
    """Return how labels are read: for the task of a predictor, as its run read them."""
    if not isinstance(model, Predictor):
        return Labeling(separator=data.label_separator, class_folders=data.class_folders or "auto")
    folder, separator, levels = RunFolder(model.source), data.label_separator, data.class_folders
    if folder.is_run():
        run = folder.read_plan().run
        separator, levels = run.label_separator if separator is None else separator, levels or run.class_folders
    return targets_of(model.output.task).labeling(model.classes, separator, levels or "auto")


def in_classes_of(predictor: Predictor, dataset: DataSet) -> DataSet:
    """Renumber the labels of a data set by the network's classes. Raises `DataError` for images of other classes.

    Classes match if they have the same name, are the same class of ImageNet (`n01440764` and `tench`), or differ only
    in case (`labels.match`). timm and others compare by number, and silently report 0.1% if the numbering differs.
    """
    if predictor.output.one_class:
        require_head(predictor.classes)
    _name_outputs(predictor, dataset)
    place = match(dataset.classes, predictor.classes)
    counts = [dataset.targets.counts(split.labels, len(place)) for split in dataset.splits.values()]
    there = set(np.flatnonzero(np.sum(counts, axis=0)).tolist())
    if foreign := [name for i, name in enumerate(dataset.classes) if place[i] is None and i in there]:
        few = ", ".join(foreign[:4]) + (" …" if len(foreign) > 4 else "")
        number = "1 class" if len(foreign) == 1 else f"{len(foreign)} classes"
        what = f"the data have {number} that the model does not have: {few}"
        why = f"the model has {', '.join(predictor.classes[:6])}{' …' if len(predictor.classes) > 6 else ''}"
        start = ["--init", predictor.source] if is_weights(predictor.source) else []
        hint = f"rename the folders, or train on this data: {shlex.join(['vitral', 'train', dataset.source, *start])}"
        raise DataError(what, where=dataset.source, why=why, hint=hint)
    moved, count = dataset.targets.renumbered, len(predictor.classes)
    splits = {name: dataclasses.replace(s, labels=moved(s.labels, place, count)) for name, s in dataset.splits.items()}
    return dataclasses.replace(dataset, classes=predictor.classes, splits=splits)


def _name_outputs(predictor: Predictor, dataset: DataSet) -> None:
    """Name the outputs of weights without names by the classes of the data, in the order that the user stated."""
    account, classes = predictor.account, dataset.classes
    if account is None or not account.nameless or len(classes) != len(predictor.classes):
        return
    if any(place is not None for place in match(classes, predictor.classes)):
        return
    if account.class_order not in ORDERS:
        raise DataError(
            "the weights state no names for their classes",
            where=dataset.source,
            why=f"they have {len(classes)} outputs, and the data have as many classes",
            hint="--class-order natural (2 before 10) or text (as torchvision's ImageFolder), or a file of names",
        )
    predictor.classes = in_order(classes, account.class_order)
    predictor.output = output_of(predictor.classes, predictor.output.to_json())
