"""A task of another package: ordered grades, of which a mistake by one costs less than one by three."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitral.data.targets.classes import OneClass
from vitral.evaluation.intervals import Groups
from vitral.evaluation.metrics import Evaluation
from vitral.evaluation.report import ReportContent
from vitral.inference.outputs import Output
from vitral.inference.outputs.classes import Classes
from vitral.training.callbacks import Epoch
from vitral.training.objectives.classification import Classification
from vitral.training.objectives.objective import TwoPartObjective, share_of
from vitral.workflows.planning.job import Job
from vitral.workflows.tasks.classes import ClassTask


@dataclasses.dataclass(frozen=True)
class Grades(OneClass):
    task = "ordinal"
    strata_noun = "each grade"


@dataclasses.dataclass(frozen=True)
class GradeOutput(Classes):
    task = "ordinal"
    noun, explained = "grades", "grade was predicted"

    def to_json(self) -> dict[str, Any]:
        return {"task": self.task}

    @classmethod
    def from_json(cls, names: Any, saved: Mapping[str, Any]) -> GradeOutput:
        return cls(tuple(names))


class EarthMover(Classification):
    """The squared difference of cumulated probabilities."""

    def loss(
        self, model: nn.Module, images: Tensor, labels: Tensor, teacher_logits: Tensor | None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        values = model(images).float().softmax(1)
        wanted = (torch.arange(self.classes) >= labels[:, None]).float()
        error = share_of((values.argmax(1) - labels).abs().float().mean())
        return share_of((values.cumsum(1) - wanted).square().sum(1).mean()), {"train_grade_error": error}


class OrdinalTask(ClassTask):
    targets = Grades()
    output_type = GradeOutput
    evaluation = Evaluation
    figures = (("grade_error", "mean error of grades", "{:.2f}"),)

    def objective(self, job: Job) -> TwoPartObjective:
        return EarthMover(job.run.preprocessing, job.run.augmentation, job.config.classes)

    def score(self, line: Epoch) -> tuple[float, float]:
        return -line.get("val_grade_error", 0.0), -line.get("val_loss", 0.0)

    def validate(self, logits: Tensor, labels: np.ndarray, output: Output) -> dict[str, float]:
        values = output.values(logits)
        error = (output.predicted(values).numpy() - np.asarray(labels)).astype(float)
        cumulated = values.cumsum(1).numpy() - (np.arange(values.shape[1]) >= np.asarray(labels)[:, None])
        return {"val_loss": float(np.square(cumulated).sum(1).mean()), "val_grade_error": float(np.abs(error).mean())}

    def page(self, content: ReportContent, *about: Any, **more: Any) -> ReportContent:
        return dataclasses.replace(super().page(content, *about, **more), measured=self.figures)

    def fitted(self, output: Output, logits: Tensor, labels: np.ndarray, groups: Groups = None) -> Output:
        return output


TASK = OrdinalTask()
