"""Parity check of an export: compare its results, in the target's runtime, with the results of its network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass

import numpy as np
import torch
from rich.console import Console

from vitral.console import expect, table
from vitral.data.loader import Progress
from vitral.errors import UsageError
from vitral.export.sample import Sample
from vitral.export.target import Job, Precision, Runtime
from vitral.inference.outputs.output import Output
from vitral.model.summary import binary_size
from vitral.wording import count

AT_ONCE = 16
"""Batch size. The first batch is one image, so two batch sizes are tested."""


@dataclass(frozen=True)
class Bar:
    """Limits of the parity check for one precision."""

    difference: float = math.inf
    """Largest difference of probabilities."""
    agreement: float = 0.0
    """Least share of images with the same predicted class."""
    lost: float = math.inf
    """Largest loss of accuracy, as a fraction."""

    def __str__(self) -> str:
        parts = (
            (f"differences of at most {self.difference:g}", math.isfinite(self.difference)),
            (f"{self.agreement:.0%} agreement", self.agreement > 0),
            (f"at most {100 * self.lost:g} points of accuracy lost", math.isfinite(self.lost)),
        )
        return ", ".join(text for text, is_limit in parts if is_limit)


BARS: Mapping[Precision, Bar] = {
    "fp32": Bar(difference=1e-4, agreement=1.0),
    "fp16": Bar(difference=0.02),
    "int8": Bar(lost=0.005),
}
"""Limits by precision. fp16 rounds to 11 bits: each rounding changes logits of 20 by 0.01, and probabilities by a
quarter of that."""


@dataclass(frozen=True)
class Differing:
    """An image with different results."""

    image: str
    network: str
    """Predicted class of the network."""
    export: str
    """Predicted class of the export."""
    difference: float
    """Largest difference of its probabilities."""

    def __str__(self) -> str:
        return f"{self.image}: {self.network} by the network, {self.export} by the export, {self.difference:.2g} apart"


@dataclass(frozen=True)
class Proof:
    """Comparison of an export with its network, on the same images."""

    runtime: str
    images: int
    on: str
    """Origin of the images."""
    bar: Bar
    difference: float
    """Largest difference of probabilities."""
    agreement: float
    """Share of images with the same predicted class."""
    labeled: int
    """Images on which accuracy is measured: the labeled held-out ones, or without any all that have a label."""
    held_out: bool
    """True if all of these images are held out."""
    accuracy: float | None
    """Accuracy of the network; None without labeled images."""
    accuracy_export: float | None
    lost: float | None
    """Accuracy of the network minus accuracy of the export, on all images with a label; None without any."""
    speed: float
    """Images per second of the network in its fastest batch: other programs on the machine slow the others down."""
    speed_export: float
    size: int
    """Bytes of the export."""
    first: Differing | None
    """The first image with another answer, or with values that exceed the limit."""
    compared: str = "probabilities"
    """The values that are compared: probabilities, or standardized numbers."""

    @property
    def failure(self) -> str:
        """The exceeded limits; empty for an export that passes."""
        failed = []
        if not self.difference <= self.bar.difference:
            failed.append(
                f"{self.compared} differ by up to {self.difference:.2g}, the limit is {self.bar.difference:g}"
            )
        if self.agreement < self.bar.agreement:
            failed.append(f"{self.agreement:.2%} of images get the same class, the limit is {self.bar.agreement:.0%}")
        if math.isfinite(self.bar.lost):
            if self.lost is None:
                failed.append("no image has a label, so the loss of accuracy is unknown")
            elif self.lost > self.bar.lost + 1e-9:
                failed.append(
                    f"{100 * self.lost:.2f} points of accuracy are lost, the limit is {100 * self.bar.lost:g}"
                )
        return "; ".join(failed)

    def to_json(self) -> dict[str, object]:
        """Return plain data; values that are not finite are None."""
        bar = {name: limit for name, limit in asdict(self.bar).items() if math.isfinite(limit)}
        difference = self.difference if math.isfinite(self.difference) else None
        first = asdict(self.first) if self.first else None
        if first and not math.isfinite(first["difference"]):
            first["difference"] = None
        passed = {"passed": not self.failure, "failure": self.failure}
        return {**asdict(self), "bar": bar, "difference": difference, "first": first, **passed}

    def print_table(self, console: Console) -> None:
        """Print accuracy and speed of the network and the export, and the limits."""
        speeds = table(f"Export and network, {self.on}")
        measured = count(self.labeled, f"{'held-out' if self.held_out else 'labeled'} image")
        for name in ("", f"accuracy on {measured}" if self.labeled else "accuracy", "images/s"):
            speeds.add_column(name, justify="right" if name else "left")
        for name, accuracy, speed in (
            ("network: PyTorch, fp32", self.accuracy, self.speed),
            (f"export: {self.runtime}", self.accuracy_export, self.speed_export),
        ):
            speeds.add_row(name, "–" if accuracy is None else f"{accuracy:.2%}", f"{speed:,.1f}")
        speeds.min_width = len(str(speeds.title)) + 2
        console.print(speeds)
        figures = f"largest difference of {self.compared} {self.difference:.2g}, {self.agreement:.2%} agreement"
        console.print(f"{figures}, {binary_size(self.size)}; limits: {self.bar}", highlight=False, markup=False)


def prove(
    job: Job, runtime: Runtime, sample: Sample, output: Output, size: int, progress: Progress | None = None
) -> Proof:
    """Compare the export with its network on every image of the sample."""
    step = _per_image if job.with_preprocessing else _per_batch
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    seconds: list[tuple[float, float]] = []
    expect(progress, len(sample))
    for number, network, export in step(job, runtime, sample, output):
        order = (network, export) if len(rows) % 2 else (export, network)  # neither always has a warm cache
        results = {one: _timed(one) for one in order}
        rows.append((results[network][0], results[export][0]))
        seconds.append((results[network][1] / number, results[export][1] / number))
        if progress:
            progress(number)
    wanted, found = (np.concatenate(column) for column in zip(*rows, strict=True))
    if not np.isfinite(wanted).all():
        raise UsageError(f"the network itself gives {output.compared} that are not finite", hint="vitral verify RUN")
    speed, speed_export = (1 / min(column) for column in zip(*seconds, strict=True))
    return _proof(wanted, found, sample, output, BARS[job.precision], runtime.name, speed, speed_export, size)


def _proof(
    wanted: np.ndarray,
    found: np.ndarray,
    sample: Sample,
    output: Output,
    bar: Bar,
    runtime: str,
    speed: float,
    speed_export: float,
    size: int,
) -> Proof:
    """Compare both arrays of comparable values (n, K), in the terms of the task."""
    difference = np.nan_to_num(output.distances(wanted, found), nan=math.inf)
    answers, answers_export = output.answers(wanted), output.answers(found)
    same = _same(answers, answers_export)
    differing = np.flatnonzero(~same | (difference > bar.difference))
    first = None
    if len(differing):
        i = int(differing[0])
        own, others = output.describe(answers[i]), output.describe(answers_export[i])
        first = Differing(sample.names[i], own, others, float(difference[i]))
    known = np.zeros(len(sample), bool)  # numbers have no accuracy
    if sample.labels.shape == answers.shape:
        known = _same(sample.labels, np.maximum(sample.labels, 0))
    held_out = known & (np.arange(len(sample)) < sample.held_out)
    measured = held_out if held_out.any() else known
    right = [_same(one, sample.labels) if known.any() else known for one in (answers, answers_export)]
    accuracies = [float(one[measured].mean()) if measured.any() else None for one in right]
    lost = float(right[0][known].mean() - right[1][known].mean()) if known.any() else None
    return Proof(
        runtime,
        len(sample),
        sample.about,
        bar,
        float(difference.max()),
        float(same.mean()),
        int(measured.sum()),
        bool(held_out.any()),
        accuracies[0],
        accuracies[1],
        lost,
        speed,
        speed_export,
        size,
        first,
        output.compared,
    )


def _same(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """True for each image (n,) of which two answers are equal."""
    return np.asarray((one == other).reshape(len(one), math.prod(one.shape[1:])).all(1))


Step = tuple[int, Callable[[], np.ndarray], Callable[[], np.ndarray]]
"""A number of images, and functions that return their probabilities (n, K): of the network and of the export."""


def _per_batch(job: Job, runtime: Runtime, sample: Sample, output: Output) -> Iterator[Step]:
    """Yield standardized batches; the first one has one image."""
    channels = job.preprocessing.channels
    for start, stop in _batches(len(sample)):
        pixels = [job.preprocessing.geometry(sample.image(i, channels)) for i in range(start, stop)]
        images = job.preprocessing.standardize(torch.stack(pixels))
        given = images.numpy()
        yield (
            stop - start,
            lambda images=images: _network(job, images, output),  # type: ignore[misc]  # bind now
            lambda given=given: output.comparable(torch.from_numpy(runtime.run(given)).float()).numpy(),  # type: ignore[misc]
        )


def _per_image(job: Job, runtime: Runtime, sample: Sample, output: Output) -> Iterator[Step]:
    """Yield decoded images of any size, one by one; the network gets them through its preprocessing."""
    for index in range(len(sample)):
        pixels = sample.image(index, job.preprocessing.channels)

        def network(pixels: np.ndarray = pixels) -> np.ndarray:
            prepared = job.preprocessing.geometry(pixels)[None]
            return _network(job, job.preprocessing.standardize(prepared), output)

        yield 1, network, lambda pixels=pixels: runtime.run(np.ascontiguousarray(pixels))[None]  # type: ignore[misc]


@torch.inference_mode()
def _network(job: Job, images: torch.Tensor, output: Output) -> np.ndarray:
    values: np.ndarray = output.comparable(job.network(images).float()).numpy()
    return values


def _batches(count: int) -> list[tuple[int, int]]:
    starts = [0, *range(1, count, AT_ONCE)]
    return list(zip(starts, [*starts[1:], count], strict=True))


def _timed(compute: Callable[[], np.ndarray]) -> tuple[np.ndarray, float]:
    started = time.perf_counter()
    result = compute()
    return result, time.perf_counter() - started
