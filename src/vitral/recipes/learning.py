"""What a job's network learns by, and what of it: parameters that stay, and the objective, with the teacher and the
weights of classes that the run asks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitral.data.loader import Batches
from vitral.model import Network, network
from vitral.model.conv_stem import whiten
from vitral.model.linear import plainly
from vitral.training.distillation import Teacher
from vitral.training.objective import Classification, balanced_weights
from vitral.training.optimizers import freeze
from vitral.weights import native

if TYPE_CHECKING:
    from vitral.recipes.planning import Job


def begin(job: Job, *, whitened: bool = True) -> Network:
    """The network as its training begins, on its device: with the weights to start from, and what stays frozen. Without
    `whitened` the first layer that the run would whiten is random, which needs no look at the pictures.
    """
    run = job.run
    model: Any = network(job.config).to(job.machine.device)
    if run.plain:
        plainly(model)
    if job.init:
        native.load_state(model, job.init.weights.state)
    if run.whiten and whitened:
        whiten(model.patch_embed.backbone, _some_pictures(job))
    freeze(model, (*run.freeze, *([WHITENED] if run.whiten else [])))
    return model


WHITENED = "patch_embed.backbone.layers.0.conv"
"""The layer that `Run.whiten` is about."""
_SEEN = 1 << 21
"""Pixels that it is made for, about."""


def _some_pictures(job: Job) -> Tensor:
    """Training pictures (n, C, H, W), standardised, evenly spread over the split, as they are evaluated."""
    split, preprocessing = job.dataset["train"], job.run.preprocessing
    count = min(len(split), max(1, _SEEN // math.prod(job.run.size)))
    some = split.select(np.unique(np.linspace(0, len(split) - 1, count).round().astype(int)))
    batches = Batches(some, preprocessing, batch_size=count, device=job.machine.device, residency="memory")
    return preprocessing.standardise(next(batches.epoch()).images)


def objective_of(job: Job, size: Callable[[], tuple[int, int]] | None = None) -> Classification:
    """The objective of a job; `size` says at which height and width the network sees the next batch."""
    run = job.run
    return Classification(
        run.preprocessing, run.augmentation, job.config.classes, run.label_smoothing, _loss_weights(job),
        size=size, teacher=_teacher(job),
    )  # fmt: skip


def _loss_weights(job: Job) -> Tensor | None:
    if job.run.class_weights == "none":
        return None
    weights = balanced_weights(job.dataset["train"].labels, len(job.dataset.classes))
    return torch.from_numpy(weights).to(job.machine.device)


def _teacher(job: Job) -> Teacher | None:
    """The network to learn from, ready to answer."""
    if job.teacher is None:
        return None
    run = job.run
    teacher = Teacher.of(
        job.teacher.weights, run.preprocessing, job.dataset.classes, job.machine.device,
        weight=run.distill_weight, temperature=run.distill_temperature,
    )  # fmt: skip
    if run.plain:
        plainly(teacher.network)
    return teacher
