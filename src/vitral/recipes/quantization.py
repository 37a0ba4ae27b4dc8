"""Integers for a trained network: ranges from its own pictures, and whether they pay, in accuracy and in time."""

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
from vitral.data.dataset import SPLITS
from vitral.data.loader import Progress
from vitral.errors import UsageError
from vitral.model.quantized import observe
from vitral.predict import Predictor, integers_by, load
from vitral.recipes.evaluation import data_for, in_batches, in_classes_of, left_out_bad, skips
from vitral.weights.load import locate
from vitral.weights.ranges import Measured, ranges_file, write_ranges
from vitral.weights.references import is_demo

FEW_TO_JUDGE = 100
"""Pictures below which a share of them that is right tells too little."""
AT_ONCE = 32
"""Pictures computed together."""


@dataclass(frozen=True)
class Quantized:
    """What became of a network whose dense layers are integers, beside what it is without."""

    file: Path
    pictures: int
    """That the ranges were measured on."""
    judged: int
    """Pictures that accuracies are of."""
    judged_on: str
    """Which pictures accuracies are of: "1,000 test pictures"."""
    plain: str
    """What computes without integers: bf16 or fp32."""
    accuracy: float
    accuracy_int8: float
    agree: float
    """The share of pictures that are answered alike."""
    speed: float
    """How many times as fast it is with integers: the ratio of the medians of batches in turn."""
    changed: str = ""
    """How the run's own pictures that judged differ from those that it began with."""

    @property
    def pays(self) -> bool:
        """Whether it is faster by more than clocks are wrong, and loses no more than 0.3 points."""
        return self.speed > 1.05 and self.accuracy_int8 >= self.accuracy - 0.003

    @property
    def warning(self) -> str:
        """What to tell whoever asks for integers that do not pay."""
        if self.pays:
            return ""
        found = f"{self.speed:.2f} times as fast as {self.plain}, {self.accuracy_int8:.2%} right instead of "
        return f"integers did not pay: {found}{self.accuracy:.2%} of {self.judged_on}"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {**asdict(self), "file": str(self.file), "pays": self.pays}

    def print_table(self, console: Console) -> None:
        """Both ways, and what follows."""
        found = table(f"Integers, ranges from {self.pictures:,} pictures")
        for name in ("", "accuracy", "speed"):
            found.add_column(name, justify="right" if name else "left")
        found.add_row(self.plain, f"{self.accuracy:.2%}", "1.00 ×")
        found.add_row("int8", f"{self.accuracy_int8:.2%}", f"{self.speed:.2f} ×")
        found.min_width = len(str(found.title)) + 2
        console.print(found)
        verdict = "it pays: --precision int8" if self.pays else f"it does not pay: stay with --precision {self.plain}"
        console.print(f"of {self.judged_on}, {self.agree:.1%} answered alike; {verdict}", highlight=False)
        if self.judged < FEW_TO_JUDGE:
            few = f"{self.judged} pictures are too few to tell what integers cost in accuracy"
            console.print(f"{few}: name more, vitral quantize RUN DATA", highlight=False)
        if self.changed:
            console.print(f"note: {self.changed}", highlight=False, markup=False)


def quantize(
    model: str | Path,
    data: str | Path | None = None,
    *,
    pictures: int = 256,
    judged: int = 1000,
    data_root: str | Path = "data",
    bad_images: str = "error",
    progress: Progress | None = None,
) -> Quantized:
    """Measure the ranges of `model` (a run folder or weights file) on `pictures` of `data`, by default of the run's own
    training pictures, and write them beside the weights, for `vitral.load(model, precision="int8")`. Then compare with
    and without them on at most `judged` labelled pictures that are furthest from training. Unreadable pictures are an
    error that names them, or are left out: with `bad_images="skip"`, and of a run's own data where the run did so.

    Raises `UsageError` for a network or a machine that integers are not for, and the errors of data and weights.
    """
    if is_demo(model):
        hint = "vitral convert demo COPY, then vitral quantize COPY DATA"
        raise UsageError("ranges are kept beside the weights, and these lie in the package", where=model, hint=hint)
    if pictures < 1 or judged < 1:
        raise UsageError("there must be at least one picture to measure on, and one to judge by")
    skip = skips(bad_images)
    exact, plain = load(model, device="cpu", precision="fp32"), load(model, device="cpu")
    instead = f"vitral predict {shlex.quote(str(model))} IMAGE"
    integers_by(exact.model, where=model, hint=instead)  # what cannot be is said before pictures are read
    named, own = data_for(model, data, data_root, "quantize")
    dataset = in_classes_of(exact, named)
    skip = skip or (own is not None and left_out_bad(exact))
    first, last = (next(name for name in order if name in dataset.splits) for order in (SPLITS, SPLITS[::-1]))
    changed = own.measured_on(last) if own else ""

    def read(count: int, split: str) -> tuple[Split, Iterator[Tensor]]:
        """So many pictures of a split, and their batches."""
        some = dataclasses.replace(dataset, splits={split: _spread(dataset[split], count)})
        found, batches, _ = in_batches(exact, some, split, skip=skip, batch_size=AT_ONCE, progress=progress)
        return found, (batch.images for batch in batches.epoch())

    (training, seen), (held_out, asked) = read(pictures, first), read(judged, last)
    network: Any = exact.model
    ranges = observe(network, map(exact.preprocessing.standardise, seen))
    file = ranges_file(locate(model)[0])
    measured_on = f"{len(training)} pictures of {dataset.source}"
    write_ranges(file, network, Measured(ranges), measured_on=measured_on)
    integers = load(model, precision="int8")
    answers, seconds = _in_turn((plain, integers), asked)
    right = [float((answer == held_out.labels).mean()) for answer in answers]
    found = Quantized(
        file, len(training), len(held_out), f"{len(held_out):,} {last} pictures", plain.machine.precision,
        right[0], right[1], float((answers[0] == answers[1]).mean()),
        float(np.median(seconds[0]) / np.median(seconds[1])), changed,
    )  # fmt: skip
    write_ranges(file, network, Measured(ranges, found.warning), measured_on=measured_on)
    return found


def _spread(split: Split, count: int) -> Split:
    """At most so many pictures, evenly spaced: class folders come class by class."""
    return split.select(np.unique(np.linspace(0, len(split) - 1, min(count, len(split))).round().astype(int)))


_FEW, _AGAIN = 5, 5
"""So many batches are timed so often: the times of a few, once each, would be chance."""


def _in_turn(
    predictors: tuple[Predictor, ...], batches: Iterable[Tensor]
) -> tuple[list[np.ndarray], list[list[float]]]:
    """What each predictor answers, and how long each batch takes it; every batch begins with another of them."""
    answers: list[list[Tensor]] = [[] for _ in predictors]
    seconds: list[list[float]] = [[] for _ in predictors]
    for number, images in enumerate(batches):
        for turn in range(len(predictors)):
            which = (number + turn) % len(predictors)
            if not number:
                predictors[which].logits(images)  # the first time weights are laid out
            for _ in range(_AGAIN if number < _FEW else 1):
                started = time.perf_counter()
                found = predictors[which].logits(images).argmax(1)
                seconds[which].append((time.perf_counter() - started) / len(images))
            answers[which].append(found)
    return [torch.cat(one).numpy() for one in answers], seconds
