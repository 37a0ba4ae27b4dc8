"""Calibrate a trained network for int8 on its own images, and compare accuracy and speed with and without int8."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from vitral.console import table
from vitral.data import Split
from vitral.data.checks.groups import with_copies
from vitral.data.dataset import SPLITS
from vitral.data.images.depth import leveled
from vitral.data.loader import Progress
from vitral.data.options import OWN_DATA, DataOptions
from vitral.errors import UsageError, WriteError, check_positive
from vitral.evaluation.enough import FOR_RATES
from vitral.evaluation.intervals import count_groups
from vitral.folders import can_write
from vitral.inference.engines.int8 import observe
from vitral.inference.engines.int8_ranges import Calibration, ranges_file, write_ranges
from vitral.inference.options import InferenceOptions
from vitral.inference.outputs.output import require_classes
from vitral.inference.predictor import Predictor, int8_engine
from vitral.kinds import checked
from vitral.system import cpu_name
from vitral.weights.load import locate
from vitral.weights.read.references import is_included
from vitral.wording import count, in_groups
from vitral.workflows.evaluate import data_for, in_batches, in_classes_of, left_out_bad
from vitral.workflows.tasks import task_of

BATCH_SIZE = 32
"""Batch size."""


@dataclass(frozen=True)
class Quantized:
    """A comparison of a network in int8 with the same network in floating point."""

    file: Path
    """The file of ranges."""
    images: int
    """Number of calibration images."""
    judged: int
    """Number of images for the accuracies."""
    judged_on: str
    """Description of these images: "1,000 test images", "1,000 test images in 200 groups"."""
    plain: str
    """The floating-point precision to compare with: bf16 or fp32."""
    accuracy: float
    accuracy_int8: float
    agree: float
    """Share of images with the same predicted class."""
    speed: float
    """Speed-up by int8: the ratio of the median times of interleaved batches."""
    changed: str = ""
    """Changes to the run's own held-out images since it was planned."""
    judged_groups: int | None = None
    """Groups of the judged images that belong together; None if each is on its own."""

    @property
    def independent(self) -> int:
        """Number of groups, among which an image alone is one."""
        return self.judged if self.judged_groups is None else self.judged_groups

    @property
    def is_worthwhile(self) -> bool:
        """True if the speed-up exceeds timing noise and the accuracy drops by at most 0.3 points."""
        return self.speed > 1.05 and self.accuracy_int8 >= self.accuracy - 0.003

    @property
    def warning(self) -> str:
        """A warning for users of int8 if it is not worthwhile; else empty."""
        if self.is_worthwhile:
            return ""
        accuracies = f"accuracy {self.accuracy_int8:.2%} instead of {self.accuracy:.2%} on {self.judged_on}"
        speed = f"{self.speed:.2f} times the speed of {self.plain}"
        return f"int8 was not worthwhile on {cpu_name()}: {speed}, {accuracies}"

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {**asdict(self), "file": str(self.file), "judged_groups": self.independent, "pays": self.is_worthwhile}

    def print_table(self, console: Console) -> None:
        """Print accuracy and speed of both precisions, and a recommendation."""
        rows = table(f"int8, calibrated on {count(self.images, 'image')}")
        for name in ("", "accuracy", "speed"):
            rows.add_column(name, justify="right" if name else "left")
        rows.add_row(self.plain, f"{self.accuracy:.2%}", "1.00 ×")
        rows.add_row("int8", f"{self.accuracy_int8:.2%}", f"{self.speed:.2f} ×")
        rows.min_width = len(str(rows.title)) + 2
        console.print(rows)
        advice = f"recommended: --precision {'int8' if self.is_worthwhile else self.plain}"
        console.print(f"{self.agree:.1%} of the predictions agree on {self.judged_on}; {advice}", highlight=False)
        if self.independent < FOR_RATES:
            few = f"{in_groups(self.judged, self.independent)} are too few to measure a loss of accuracy"
            console.print(f"{few}; use more: vitral quantize RUN DATA", highlight=False)
        if self.changed:
            console.print(f"note: {self.changed}", highlight=False, markup=False)


@checked
def quantize(
    model: str | Path,
    data: DataOptions = OWN_DATA,
    *,
    images: int = 256,
    judged: int = 1000,
    progress: Progress | None = None,
) -> Quantized:
    """Calibrate `model` (a run folder or weights file) for `vitral.load(model, precision="int8")`.

    The ranges are measured on `images` images of `data`, by default on the run's own training images, and written next
    to the weights, with a temperature and scores of sets that are fitted in int8 to at most `judged` of a run's
    validation images. Then accuracy and speed with and without int8 are compared on at most `judged` labeled images of
    test, else val, else train. Unreadable images are an error that names them; they are left out with
    `bad_images="skip"`, and for a run's own data if the run left them out.

    Raises `UsageError` for a network or a machine that does not support int8, and for a split in `data`; and the errors
    of data and weights.
    """
    if is_included(model):
        hint = f"vitral convert {model} COPY, then vitral quantize COPY DATA"
        raise UsageError("cannot write ranges next to a built-in model", where=model, hint=hint)
    check_positive(images=(images, 256), judged=(judged, 1000))
    file = ranges_file(locate(model)[0])
    if not can_write(file.parent):  # before the images are read
        hint = f"cp -r {shlex.quote(str(model))} COPY, then vitral quantize COPY"
        raise WriteError("cannot write the ranges beside the weights", where=file, why="no permission", hint=hint)
    if data.split is not None:
        raise UsageError("int8 is calibrated on one split and compared on another", hint="leave out the split")
    exact, plain = (InferenceOptions("cpu", precision).load(model) for precision in ("fp32", "auto"))
    instead = f"vitral predict {shlex.quote(str(model))} IMAGE"
    require_classes(exact.output, "vitral quantize", instead)
    int8_engine(exact.model, where=model, hint=instead)  # refuse an unsupported network before reading images
    named, own = data_for(model, data, "quantize")
    dataset = leveled(in_classes_of(exact, named), exact.preprocessing.levels)
    skip = data.skip or (own is not None and left_out_bad(exact))
    first, last = (next(name for name in order if name in dataset.splits) for order in (SPLITS, SPLITS[::-1]))
    changed = own.check_split(last) if own else ""

    def read(count: int, split: str) -> tuple[Split, Iterator[Tensor]]:
        """Return `count` images of a split, and their batches."""
        some = dataclasses.replace(dataset, splits={split: dataset[split].spread(count)})
        readable, batches, _ = in_batches(exact, some, split, skip=skip, batch_size=BATCH_SIZE, progress=progress)
        return readable, (batch.images for batch in batches.epoch())

    (training, calibration), (held_out, evaluation) = read(images, first), read(judged, last)
    network: Any = exact.model
    ranges = observe(network, map(exact.preprocessing.standardize, calibration))
    measured_on = f"{len(training)} images of {dataset.source}"
    integers = Predictor(
        network,
        exact.preprocessing,
        exact.classes,
        machine=plain.machine,
        source=exact.source,
        ranges=ranges,
        output=exact.output,
    )
    refitted = _fitted(integers, *read(judged, "val")) if own and "val" in dataset.splits else {}
    predictions, seconds = _compare((plain, integers), evaluation)
    accuracy = [float((predicted == held_out.labels).mean()) for predicted in predictions]
    groups = count_groups(with_copies(held_out).groups, len(held_out))
    result = Quantized(
        file,
        len(training),
        len(held_out),
        in_groups(len(held_out), groups, f"{last} image"),
        plain.machine.precision,
        accuracy[0],
        accuracy[1],
        float((predictions[0] == predictions[1]).mean()),
        float(np.median(seconds[0]) / np.median(seconds[1])),
        changed,
        groups,
    )
    write_ranges(file, network, Calibration(ranges, result.warning, refitted), measured_on=measured_on)
    return result


def _fitted(integers: Predictor, images: Split, batches: Iterable[Tensor]) -> dict[str, object]:
    """Fit the temperature and the scores of sets in int8, on validation images; return the fields of the output."""
    logits = torch.cat([integers.logits(batch).cpu() for batch in batches])
    output = task_of(integers.output.task).fitted(integers.output, logits, images.labels, images.groups)
    return {"temperature": 1.0, **output.to_json(), "integers": True}


_FEW, _REPEATS = 5, 5
"""The first `_FEW` batches are timed `_REPEATS` times each, since single times of few batches would be too noisy."""


def _compare(
    predictors: tuple[Predictor, ...], batches: Iterable[Tensor]
) -> tuple[list[np.ndarray], list[list[float]]]:
    """Return each predictor's classes and seconds per image of each batch; the order alternates between batches."""
    predictions: list[list[Tensor]] = [[] for _ in predictors]
    seconds: list[list[float]] = [[] for _ in predictors]
    for number, images in enumerate(batches):
        for turn in range(len(predictors)):
            index = (number + turn) % len(predictors)
            if not number:
                predictors[index].logits(images)  # warm-up: the first call prepares the weights
            for _ in range(_REPEATS if number < _FEW else 1):
                started = time.perf_counter()
                predicted = predictors[index].logits(images).argmax(1)
                seconds[index].append((time.perf_counter() - started) / len(images))
            predictions[index].append(predicted)
    return [torch.cat(one).numpy() for one in predictions], seconds
