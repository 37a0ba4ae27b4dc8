"""Measure the throughput of a run on this machine, for `--minutes` and to detect slow decoding."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vitral.data import DataSet
from vitral.data.images.canvas import on_canvas
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batch, labels_on
from vitral.device import Machine, cpu_threads
from vitral.distributed.ranks import current
from vitral.errors import DataError
from vitral.inference.own_sizes import network_logits
from vitral.model import Network, summarize
from vitral.pretraining.distill import blank_features
from vitral.pretraining.method import kept
from vitral.pretraining.methods import METHODS
from vitral.pretraining.monitor import monitored
from vitral.recipes.linear_probe import FIRST_IMAGES
from vitral.system import keep_freed_memory
from vitral.training.loop import State
from vitral.training.optimizer_set import OptimizerSet, train_mode
from vitral.training.plan import Choice
from vitral.training.schedule import planned_epochs
from vitral.training.step import WARM_UP, NoMonitor, step_of
from vitral.training.timing import plan_again
from vitral.wording import count, duration
from vitral.workflows.planning.teacher import seconds_of_teacher
from vitral.workflows.running.build import initial_model, objective_of
from vitral.workflows.tables.features import features_of

if TYPE_CHECKING:
    from vitral.workflows.planning.job import Job
    from vitral.workflows.running.running import Running

RESERVED_SHARE = 0.05
"""Share of the time reserved for what the trial does not measure: saving, a machine that slows down."""
_REPORT, _LEAST_SHARE = 5.0, 0.5
"""Seconds of a report, and the share of the time that is for training in any case."""
SUFFICIENT_SHARE = 0.95
"""Share of the full training speed at which decoding counts as fast enough."""
_STEP_FLOPS = 1e12
"""Most FLOPs of a trial step on a CPU when checking the decoding rate, which limits it to some seconds."""
_STEPS, _SECONDS = 12, 3.0  # most steps and seconds of a trial
_FIRST = 2  # first steps, which are not counted
_FEATURES = 16  # images of a trial of features
_DECODED = 2.0  # times the seconds of a network that its features take, with decoding
_FITTED = 3.0  # seconds of fitting a probe


class Fit(NamedTuple):
    """A number of epochs for `--minutes`."""

    epochs: int
    why: str
    seconds: float
    """Those of training and validation."""


def epochs_within(job: Job, began: float | None = None) -> Fit:
    """Return the number of epochs that fit into the run's minutes, at least one.

    The minutes are for training and validation. Counted from `began`, of `time.monotonic()`, they are also for all that
    was done since then, for the images that the best weights are measured on, and for the report.
    """
    training, validation = seconds_per_image(job)
    whole = seconds = 60.0 * (job.run.minutes or 0)
    counts = {name: len(split) for name, split in job.dataset.splits.items()}
    validated = counts.get("val", 0) if job.run.recipe not in METHODS else sum(map(len, monitored(job.dataset)))
    epoch = (counts["train"] * training + validated * validation) / current().count
    taught = counts["train"] * seconds_of_teacher(job) / current().count if job.run.teacher_views else 0.0
    why = f"an epoch takes {epoch:.3g} s on this machine, measured over a few steps"
    if epoch > whole:
        why = f"even one epoch takes {epoch / 60:.3g} minutes on this machine, measured over a few steps"
    if began is not None:
        last = (counts.get("val", 0) + counts.get("test", 0)) * validation / current().count + _REPORT
        if job.run.probe:
            last += _DECODED * (min(FIRST_IMAGES, counts["train"]) + validated) * validation + _FITTED
        seconds = max(_LEAST_SHARE * whole, whole - (time.monotonic() - began) - last)
        why += (
            f"; {duration(whole - seconds)} of {duration(whole)} are reserved for planning, evaluation, and the report"
        )
    return Fit(max(1, _epochs(seconds * (1 - RESERVED_SHARE), epoch, taught, job.run.teacher_views)), why, seconds)


def _epochs(seconds: float, epoch: float, taught: float, views: int) -> int:
    """Return the epochs that fit if each of the first `views` takes `taught` seconds more, for a teacher."""
    if seconds < views * (epoch + taught):
        return int(seconds / (epoch + taught))
    return int((seconds - views * taught) / epoch)


def decoding_suffices(job: Job, decoding_rate: float) -> tuple[bool, str]:
    """Return True if decoding images every epoch leaves `SUFFICIENT_SHARE` of the training speed, and a sentence on it.

    `decoding_rate` is in images per second, with all cores.
    """
    on_cpu = job.machine.device.type == "cpu"
    at_most = max(1, int(_STEP_FLOPS / (3 * summarize(job.config).flops))) if on_cpu else None
    rate = 1 / seconds_per_image(job, at_most)[0]
    if on_cpu:  # the same cores decode and train
        reached = 1 / (1 / rate + 1 / decoding_rate)
    else:
        reached = min(rate, decoding_rate)
    measured = f"training reaches {rate:,.3g} images/s, measured over a few steps"
    if reached >= SUFFICIENT_SHARE * rate:
        return True, f"{measured}: decoding is fast enough"
    return False, f"{measured}; decoding limits it to {reached / rate:.0%} of that"


def seconds_per_image(job: Job, at_most: int | None = None) -> tuple[float, float]:
    """Return the seconds per image of training and validation: medians over steps with random images and weights.

    Network, batch, augmentation, precision and device are the run's; `at_most` limits the batch.
    """
    run, machine = job.run, job.machine
    with _trial(job, at_most) as trial:

        @torch.inference_mode()
        def validate() -> None:
            with machine.autocast():
                network_logits(kept(trial.model), run.preprocessing, trial.batch.images).sum().item()

        training = _median(trial.step, WARM_UP + 1 if run.graphs else _FIRST)  # until the CUDA graph is captured
        trial.model.eval()
        count = len(trial.batch.indices)
        return training / count, _median(validate) / count


def features_seconds(model: Network, images: DataSet, preprocessing: Preprocessing, machine: Machine) -> float:
    """Return the seconds in which this machine decodes all images and computes their features, by a trial of a few.

    Infinite if one of these cannot be read: the run reports it.
    """
    every = sum(map(len, images.splits.values()))
    some = images["train"].spread(_FEATURES)

    def trial() -> float:
        started = time.perf_counter()
        features_of(model, some, preprocessing, machine)
        return time.perf_counter() - started

    try:
        trial()  # the first call of a network takes longer
        return every * trial() / len(some)
    except DataError:
        return math.inf


def probe_within(job: Job) -> Job:
    """Add the time of the features to the plan of a run that fits its head to them, beside its minutes."""
    images = sum(map(len, job.dataset.splits.values()))
    seconds = features_seconds(initial_model(job), job.dataset, job.run.preprocessing, job.machine)
    asked = 60 * (job.run.minutes or 0)
    why = f"computing the features of {count(images, 'image')} takes about {duration(seconds)} on this machine"
    if seconds > asked:
        why += ", longer than requested; --train-share 0.5 uses half of the training images"
    choices = {choice.name: choice for choice in (*job.plan.choices, Choice("minutes", f"{job.run.minutes:g}", why))}
    return dataclasses.replace(job, plan=dataclasses.replace(job.plan, choices=tuple(choices.values())))


class _Trial(NamedTuple):
    """A training step to repeat, of a network with random weights and a batch of noise."""

    step: Callable[[], None]
    model: Network
    batch: Batch


@contextmanager
def _trial(job: Job, at_most: int | None) -> Iterator[_Trial]:
    """A trial of the run, in training mode."""
    run, machine = job.run, job.machine
    if machine.device.type == "cpu":
        keep_freed_memory()
    with torch.random.fork_rng([machine.device] if machine.device.type == "cuda" else []):
        model = initial_model(job, measured=False)
        optimizer = OptimizerSet(model, run)
        objective = objective_of(job, features=blank_features(model) if run.teacher_views else None)
        learn, batch = step_of(model, optimizer, objective, machine, run), _noise(job, at_most)

        def step() -> None:
            loss, _ = learn(batch, NoMonitor(), lr=0.0)
            loss.item()  # waits for the device

        train_mode(model)
        yield _Trial(step, model, batch)


def step_seconds(job: Job, threads: Sequence[int], at_most: int) -> list[float]:
    """Return the median seconds of a training step with each number of CPU threads, of at most so many images."""
    found = []
    with _trial(job, at_most) as trial:
        for count in threads:
            with cpu_threads(count):
                found.append(_median(trial.step))
    return found


def _noise(job: Job, at_most: int | None) -> Batch:
    count = min(job.run.batch_size, len(job.dataset["train"]), at_most or job.run.batch_size)
    pixels = torch.randint(0, 256, (count, job.run.channels, *job.run.size), dtype=torch.uint8)
    if job.run.pack:
        pixels = torch.stack([on_canvas(image, job.run.size) for image in pixels])
    device = job.machine.device
    labels = labels_on(device, job.dataset["train"].labels[:count])
    return Batch(pixels.to(device), labels, np.arange(count))


def _median(program: Callable[[], None], first: int = _FIRST) -> float:
    """Return the median seconds of a call, over as many calls as a trial has time for, after the `first` ones.

    Calls that are far too slow, beside other programs, are not waited for: the last one counts.
    """
    taken: list[float] = []
    while (len(taken) < first + 1 and sum(taken) < 2 * _SECONDS) or (len(taken) < _STEPS and sum(taken) < _SECONDS):
        started = time.perf_counter()
        program()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[min(first, len(taken) - 1) :])


def replanning(running: Running) -> Callable[[State], int | None]:
    """Return the function that plans the epochs again for `--minutes`, and prints it."""
    job, run = running.job, running.job.run
    if run.minutes is None or run.recipe in METHODS:  # the schedules of pretraining are fixed when it begins
        return lambda state: None
    time = duration(60 * run.minutes)

    def again(state: State) -> int | None:
        epochs = plan_again(run, state.history, job.plan.most_epochs, job.plan.training_seconds)
        if epochs is not None and epochs != (before := planned_epochs(run, state.history)):
            line = f"planned again: {epochs} epochs instead of {before}, for {time}"
            running.console.print(line, highlight=False, soft_wrap=True)
        return epochs

    return again


def planned_again(state: State) -> tuple[Choice, ...]:
    """Return the choices of epochs that were made during training."""
    return tuple(
        Choice("epochs, planned again", str(line["epochs"]), f"measured until the end of epoch {line['epoch']}")
        for line in state.history
        if "epochs" in line
    )
