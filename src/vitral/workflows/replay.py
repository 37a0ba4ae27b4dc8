"""`vitral replay`: a batch as the network saw it, made again from the run folder alone.

Everything random in a step is a function of seed, epoch and batch, so a batch of any epoch can be made again. The
weights before it can too, by training up to it (`exact`); otherwise losses are those of the run's best weights.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

from vitral.console import stderr
from vitral.data.loader import Batch, Batches
from vitral.device import cpu_threads, global_generators, seed_everything
from vitral.errors import UsageError
from vitral.folders import same_path
from vitral.kinds import checked
from vitral.pretraining.methods import METHODS
from vitral.training.callbacks import Callback, Epoch
from vitral.training.loop import EpochEnd, State, fit
from vitral.training.objectives.classification import Classification, image_losses
from vitral.training.optimizer_set import OptimizerSet, train_mode
from vitral.training.run_folder import RunFolder
from vitral.training.schedule import as_planned
from vitral.training.step import Step
from vitral.weights import native
from vitral.weights.load import locate
from vitral.wording import some
from vitral.workflows.planning.job import Job
from vitral.workflows.planning.plan import job_on
from vitral.workflows.planning.run_data import load_run_data
from vitral.workflows.running.build import initial_model, objective_of
from vitral.workflows.running.execute import TRAINERS, _readable_batches
from vitral.workflows.running.start_digests import changed_starts


@dataclass(frozen=True, eq=False)
class Replayed:
    """One batch of a run: the network's input, and its losses."""

    run: str
    epoch: int
    """From 1."""
    batch: int
    """From 1, within the epoch."""
    step: int
    """Optimizer step that the batch is a part of, from 1."""
    images: Tensor
    """Augmented, mixed and standardized, (B, C, H, W) fp32: the network's input."""
    pixels: np.ndarray
    """The same as uint8 (B, H, W, C)."""
    names: tuple[str, ...]
    """Files of the images; of a mixed one, that of its first part, which need not be the larger."""
    targets: Tensor
    """Class probabilities (B, K), without label smoothing."""
    losses: Tensor
    """Loss of each image (B,), with the run's label smoothing and class weights."""
    probabilities: Tensor
    """(B, K)."""
    classes: tuple[str, ...]
    exact: bool
    """True if the weights are those before the step; else they are the run's best ones."""

    def label(self, index: int) -> str:
        """The label of an image: "cat", or "cat 70% + dog 30%"."""
        shares = [(float(share), k) for k, share in enumerate(self.targets[index]) if share > 0]
        ranked = sorted(shares, reverse=True)
        if len(ranked) == 1:
            return self.classes[ranked[0][1]]
        return " + ".join(f"{self.classes[k]} {share:.0%}" for share, k in ranked)

    def predicted(self, index: int) -> tuple[str, float]:
        """The predicted class of an image, and its probability."""
        confidence, number = self.probabilities[index].max(0)
        return self.classes[int(number)], float(confidence)

    def caption(self, index: int) -> str:
        """The text below an image of a contact sheet: label, prediction, loss and file."""
        predicted, confidence = self.predicted(index)
        loss = float(self.losses[index])
        verdict = "predicted" if self.probabilities[index].argmax() == self.targets[index].argmax() else "wrong:"
        return f"{self.label(index)}\n{verdict} {predicted} {confidence:.0%}\nloss {loss:.3f}\n{self.names[index]}"

    def to_json(self) -> dict[str, object]:
        rows = [
            {
                "image": name,
                "label": self.label(i),
                "loss": float(self.losses[i]),
                "predicted": self.predicted(i)[0],
                "probability": self.predicted(i)[1],
            }
            for i, name in enumerate(self.names)
        ]
        return {
            "run": self.run,
            "epoch": self.epoch,
            "batch": self.batch,
            "step": self.step,
            "exact": self.exact,
            "loss": float(self.losses.mean()),
            "images": rows,
        }


@checked
def replay(
    run: str | Path,
    *,
    step: int | None = None,
    epoch: int | None = None,
    image: str | None = None,
    exact: bool = False,
    console: Console | None = None,
) -> Replayed:
    """Make the batch of an optimizer `step` again, or that of `epoch` with `image`; steps and epochs count from 1.

    With gradient accumulation a step is its first micro-batch. `exact` trains from the beginning up to the batch, so
    that losses are those of training, dropout included; on a CPU they have the same bits. Raises `UsageError` for a
    step, epoch or image that the run does not have, `DataError` if the run's data have changed, and with `exact`
    `RunError` if the initial weights or the teacher have changed.
    """
    if (step is None) == (epoch is None) or (epoch is None) != (image is None):
        raise UsageError(
            "select a batch by its step, or by epoch and image", hint="--step 1, or --epoch 1 --image FILE"
        )
    folder = RunFolder(run)
    plan = folder.read_plan()
    if plan.run.pack or plan.run.patch_sizes:
        name, why = ("--pack", "its images have no common size") if plan.run.pack else ("--patch-sizes", "not done yet")
        raise UsageError(f"replay does not support {name}", where=folder.path, why=why)
    if plan.run.recipe in TRAINERS:
        raise UsageError(f"{plan.run.recipe} trains in no steps", where=folder.path, why="there is no batch to replay")
    console = console or stderr(quiet=True)
    own = load_run_data(plan)
    if not own.trains_alike:
        raise own.changed("restore them: every training image has to be there, under the name and in the class it had")
    for note in (found.describe(split) for split, found in own.again.items()):
        if note:
            console.print(f"note: {note}", highlight=False, soft_wrap=True, markup=False)
    job = job_on(plan, own)
    for _, error in changed_starts(job, folder):
        if exact:
            raise error
        console.print(f"note: {error.what} since the run; these losses are by its own weights", highlight=False)
    job, every = _readable_batches(job, console)
    batches = every["train"]
    try:
        again = [line for line in folder.read_history() if "epochs" in line]  # these planned the epochs again
        last = as_planned(job.run, again)
        ended = dataclasses.replace(job, plan=dataclasses.replace(job.plan, run=last))
        at = _of_step(ended, batches, step) if step is not None else _of_image(ended, batches, epoch or 0, image or "")
        with global_generators(), cpu_threads(job.run.threads):
            return _replayed(job, batches, folder, again, *at, exact=exact)
    finally:
        for one in every.values():
            one.close()


def _steps(job: Job, batches: Batches) -> int:
    return math.ceil(len(batches) / job.run.accumulate)


def _of_step(job: Job, batches: Batches, step: int) -> tuple[int, int]:
    """Epoch and batch, from 0, at which an optimizer step begins."""
    steps = _steps(job, batches)
    if not 1 <= step <= steps * job.run.epochs:
        why = f"it has {steps * job.run.epochs:,}: {job.run.epochs} epochs of {steps:,}"
        raise UsageError(f"the run has no step {step}", why=why, hint="--step 1")
    return (step - 1) // steps, (step - 1) % steps * job.run.accumulate


def _of_image(job: Job, batches: Batches, epoch: int, image: str) -> tuple[int, int]:
    """Epoch and batch, from 0, that show an image."""
    if not 1 <= epoch <= job.run.epochs:
        raise UsageError(f"the run has no epoch {epoch}", why=f"it has {job.run.epochs}", hint="--epoch 1")
    names = batches.split.names
    found = [
        n for n, name in enumerate(names) if name == image or name.endswith(f"/{image}") or image.endswith(f"/{name}")
    ]
    if not found and os.path.exists(image):  # a path to the same file, such as by a link
        base = os.path.basename(image)
        found = [n for n, name in enumerate(names) if os.path.basename(name) == base and same_path(name, image)]
    if len(found) != 1:
        why = f"it may be {some([names[n] for n in found])}" if found else "it is not among those that it trains on"
        hint = "its class folder and name: --image cat/1.jpg"
        raise UsageError(
            "the run has no such training image" if not found else "several images have this name",
            where=image,
            why=why,
            hint=hint,
        )
    places = np.flatnonzero(batches.order(epoch - 1)[: len(batches) * batches.batch_size] == found[0])
    if not len(places):
        why = "the last images of an epoch that fill no batch are left out, and balanced sampling draws some only"
        raise UsageError(f"epoch {epoch} does not show this image", where=image, why=why, hint="choose another --epoch")
    return epoch - 1, int(places[0]) // batches.batch_size


def _replayed(
    job: Job, batches: Batches, folder: RunFolder, again: Sequence[Epoch], epoch: int, number: int, *, exact: bool
) -> Replayed:
    run, steps = job.run, _steps(job, batches)
    step = epoch * steps + number // run.accumulate
    objective = objective_of(job)
    if not isinstance(objective, Classification):
        why = "vitral pretrain made this run" if run.recipe in METHODS else f"this run is of --task {run.task}"
        hint = "its report.html shows images"
        raise UsageError("only runs of one class per image can be replayed", why=why, hint=hint)
    if exact:
        model: nn.Module = _trained_up_to(job, batches, again, epoch * len(batches) + number)
        train_mode(model)
    else:
        model = native.build(native.read(locate(folder.path)[0])).to(job.machine.device)
    batch = next(batches.epoch(epoch, start=number))
    seed_everything(run.seed, epoch, number)
    with torch.no_grad(), job.machine.autocast():
        images, labels, _ = objective.prepare(batch)
        logits = model(images).float()
    return _shown(job, folder, batches, batch, objective, images, labels, logits, (epoch, number, step), exact)


def _shown(
    job: Job,
    folder: RunFolder,
    batches: Batches,
    batch: Batch,
    objective: Classification,
    images: Tensor,
    labels: Tensor,
    logits: Tensor,
    at: tuple[int, int, int],
    exact: bool,
) -> Replayed:
    losses = image_losses(logits, labels, objective.class_weights, objective.label_smoothing)
    targets = labels if labels.ndim == 2 else F.one_hot(labels, objective.classes).float()
    epoch, number, step = at
    return Replayed(
        str(folder.path),
        epoch + 1,
        number + 1,
        step + 1,
        images.cpu(),
        _pixels(images.cpu(), job),
        tuple(batches.split.names[int(i)] for i in batch.indices),
        targets.cpu(),
        losses.cpu(),
        logits.softmax(1).cpu(),
        job.dataset.classes,
        exact,
    )


def _pixels(images: Tensor, job: Job) -> np.ndarray:
    """Standardized images as uint8 (B, H, W, C); values beyond black and white, as of random erasing, are cut."""
    preprocessing = job.run.preprocessing
    mean, std = (torch.tensor(values)[:, None, None] for values in (preprocessing.mean, preprocessing.std))
    pixels = ((images * std + mean).clamp(0, 1) * 255).round().byte()
    return pixels.permute(0, 2, 3, 1).numpy()


class _Reached(Exception):  # noqa: N818 - not an error
    """Training has reached the batch."""


class _StopAfter(Callback):
    def __init__(self, batches: int):
        self.left = batches

    def on_batch(self, loss: Tensor) -> None:
        self.left -= 1
        if not self.left:
            raise _Reached


def _trained_up_to(job: Job, batches: Batches, again: Sequence[Epoch], count: int) -> nn.Module:
    """Train from the beginning for `count` batches, without validation and without saving."""
    seed_everything(job.run.seed)
    model = initial_model(job)
    model.checkpointing = job.run.checkpointing
    if not count:
        return model
    state, numbers = State(model, OptimizerSet(model, job.run)), {line["epoch"]: line["epochs"] for line in again}
    objective = objective_of(job)
    try:
        fit(
            state,
            job.run,
            batches,
            Step(model, state.optimizer, objective, job.machine, job.run),
            EpochEnd(plan_again=lambda state: numbers.get(state.epoch)),
            listener=_StopAfter(count),
        )
    except _Reached:
        return model
    raise UsageError("the run ends before this batch", hint="--step 1")
