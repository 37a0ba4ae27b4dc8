"""Build the model of a job, freeze parameters, and create the objective of its task."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from vitral.data.loader import Batches
from vitral.kernels import reference_ops
from vitral.model import Network, ViTConfig, network
from vitral.model.conv_stem import whiten
from vitral.pretraining.method import Unlabeled
from vitral.pretraining.methods import METHODS
from vitral.training.objectives.flexible import Flexible, FlexibleViT
from vitral.training.objectives.objective import TwoPartObjective
from vitral.training.objectives.packed import Packed
from vitral.training.optimizers import freeze
from vitral.weights import native
from vitral.workflows.planning.initial_reader import InitialReader
from vitral.workflows.tasks import task_of

if TYPE_CHECKING:
    from vitral.workflows.planning.job import Job


def initial_model(job: Job, *, whitened: bool = True) -> Network:
    """Build the network on its device, load the initial weights, and freeze parameters.

    Without `whitened` the first layer stays random even if the run whitens it, which avoids reading images.
    """
    run = job.run
    model: Any = network(job.config).to(job.machine.device)
    if run.plain:
        reference_ops(model)
    if isinstance(job.init, InitialReader):
        job.init.load_into(model)
    elif job.init:
        native.load_state(model, job.init.weights.state)
    if run.whiten and whitened:
        whiten(model.patch_embed.backbone, _some_images(job))
    freeze(model, (*run.freeze, *([WHITENED] if run.whiten else [])))
    if run.recipe in METHODS:
        model = METHODS[run.recipe].build(model, run, optimizer_steps(job)).to(job.machine.device)
    return model


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


def objective_of(job: Job, step: Callable[[], int] = lambda: 0) -> TwoPartObjective:
    """Create the objective of a job; `step` returns the step of the next batch."""
    run = job.run
    if run.recipe in METHODS:
        draw = METHODS[run.recipe].draw(run, job.config)  # type: ignore[arg-type]  # its check refuses a ResNet
        return Unlabeled(run.preprocessing, run.augmentation, draw)
    objective = task_of(run.task).objective(job)
    if run.patch_sizes:
        assert isinstance(job.config, ViTConfig)  # `flex_patches` refuses others
        return Flexible(objective, FlexibleViT(job.config, run.patch_sizes, plain=run.plain))
    if not run.pack:
        return objective
    steps, (first, last) = optimizer_steps(job), run.pack_drop or (0.0, 0.0)
    return Packed(
        objective, run.preprocessing, run.augmentation, run.pack_min_size,
        lambda: first + (last - first) * min(1.0, step() / max(1, steps - 1)),
    )  # fmt: skip
