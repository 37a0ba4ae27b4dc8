"""Build the model of a job, freeze parameters, and create the objective of its task."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vitral.data.loader import Batch, Batches
from vitral.kernels import reference_ops
from vitral.model import Network, ViT, ViTConfig, network
from vitral.model.conv_stem import whiten
from vitral.pretraining.distill import FeatureDistillation, FeatureTeacher, Taught
from vitral.pretraining.method import Method, Unlabeled
from vitral.pretraining.methods import METHODS
from vitral.training.objectives.flexible import Flexible, FlexibleViT
from vitral.training.objectives.objective import TwoPartObjective
from vitral.training.objectives.packed import Packed
from vitral.training.optimizer_set import freeze
from vitral.weights import native
from vitral.workflows.planning.initial_reader import InitialReader
from vitral.workflows.running.teaching import measured_features, teacher_of_job
from vitral.workflows.tasks import task_of

if TYPE_CHECKING:
    from vitral.workflows.planning.job import Job


def initial_model(job: Job, *, measured: bool = True) -> Network:
    """Build the network on its device, load the initial weights, and freeze parameters.

    Without `measured` nothing is computed from images: not the first layer of a run that whitens it, and not the
    deviation of a teacher's features.
    """
    run = job.run
    model: Any = network(job.config).to(job.machine.device)
    if run.plain:
        reference_ops(model)
    if isinstance(job.init, InitialReader):
        job.init.load_into(model)
    elif job.init:
        native.load_state(model, job.init.weights.state)
    if run.whiten and measured:
        whiten(model.patch_embed.backbone, _some_images(job))
    freeze(model, (*run.freeze, *([WHITENED] if run.whiten else [])))
    if run.recipe in METHODS:
        model = _method(job, model, measured).to(job.machine.device)
    return model


def _method(job: Job, model: ViT, measured: bool) -> Method:
    """Build a method of pretraining around the network."""
    parts, steps = METHODS[job.run.recipe], optimizer_steps(job)
    if not parts.taught:
        return parts.build(model, job.run, steps)
    teacher = teacher_of_job(job)
    method = parts.build(model, job.run, steps, teacher).to(job.machine.device)
    if measured and isinstance(method, FeatureDistillation):
        method.measure(measured_features(job, teacher))
    return method


def optimizer_steps(job: Job) -> int:
    """Number of optimizer steps of a run."""
    run, images = job.run, len(job.dataset["train"])
    batches = max(1, images // min(run.batch_size, images))
    return run.epochs * math.ceil(batches / run.accumulate)


WHITENED = "patch_embed.backbone.layers.0.conv"
"""The layer that `Run.whiten` initializes."""
_WHITENING_PIXELS = 1 << 21
"""Approximate number of pixels that the whitening is computed from."""


def _some_images(job: Job) -> Tensor:
    """Return standardized training images (n, C, H, W), evenly spread over the split, without augmentation."""
    split, preprocessing = job.dataset["train"], job.run.preprocessing
    count = min(len(split), max(1, _WHITENING_PIXELS // math.prod(job.run.size)))
    some = split.spread(count)
    batches = Batches(some, preprocessing, batch_size=count, device=job.machine.device, residency="memory")
    return preprocessing.standardize(next(batches.epoch()).images)


def _computed(teacher: FeatureTeacher) -> Callable[[Batch], Tensor]:
    """Return a function that computes the features of each batch."""
    return lambda batch: teacher(batch.images)


def objective_of(
    job: Job, step: Callable[[], int] = lambda: 0, features: Callable[[Batch], Tensor] | None = None
) -> TwoPartObjective:
    """Create the objective of a job; `step` returns the step of the next batch, and `features` those of a teacher that
    are kept, instead of computing them in every step.
    """
    run = job.run
    if run.recipe in METHODS:
        draw = METHODS[run.recipe].draw(run, job.config)  # type: ignore[arg-type]  # its check refuses a ResNet
        if not METHODS[run.recipe].taught:
            return Unlabeled(run.preprocessing, run.augmentation, draw)
        return Taught(run.preprocessing, run.augmentation, draw, features or _computed(teacher_of_job(job)))
    objective = task_of(run.task).objective(job)
    if run.patch_sizes:
        assert isinstance(job.config, ViTConfig)  # `flex_patches` refuses others
        return Flexible(objective, FlexibleViT(job.config, run.patch_sizes, plain=run.plain))
    if not run.pack:
        return objective
    steps, (first, last) = optimizer_steps(job), run.pack_drop or (0.0, 0.0)
    return Packed(
        objective,
        run.preprocessing,
        run.augmentation,
        run.pack_min_size,
        lambda: first + (last - first) * min(1.0, step() / max(1, steps - 1)),
    )
