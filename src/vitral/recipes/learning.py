"""What a job's network learns by: the objective, with the teacher and the weights of classes that the run asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitral.training.distillation import Teacher
from vitral.training.objective import Objective, balanced_weights, classification

if TYPE_CHECKING:
    from vitral.recipes.planning import Job


def objective_of(job: Job, size: Callable[[], tuple[int, int]] | None = None) -> Objective:
    """The objective of a job; `size` says at which height and width the network sees the next batch."""
    run = job.run
    return classification(
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
    return Teacher.of(
        job.teacher.weights, run.preprocessing, job.dataset.classes, job.machine.device,
        weight=run.distill_weight, temperature=run.distill_temperature,
    )  # fmt: skip
