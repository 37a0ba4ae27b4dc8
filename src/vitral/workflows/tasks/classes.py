"""One class an image: cross-entropy, accuracy, the confusion matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data import Split
from vitral.data.targets import ONE_CLASS
from vitral.evaluation.calibration import conformal_scores, cuts_of, fit_temperature
from vitral.evaluation.intervals import Groups, count_groups
from vitral.evaluation.metrics import Evaluation, measure
from vitral.inference.outputs import Output
from vitral.inference.outputs.classes import Classes
from vitral.inference.predictor import Predictor
from vitral.kernels import reference_ops
from vitral.training.callbacks import Epoch
from vitral.training.distillation import Teacher
from vitral.training.loop import best_accuracy
from vitral.training.objectives.classification import Classification, balanced_weights
from vitral.training.objectives.objective import TwoPartObjective, own_loss
from vitral.training.plan import Choice
from vitral.workflows.planning.draft import Draft
from vitral.workflows.tasks.shared import neutralized, task_choice
from vitral.workflows.tasks.task import Task

if TYPE_CHECKING:
    from vitral.evaluation.report import ReportContent
    from vitral.workflows.planning.job import Job


class ClassTask(Task):
    """One class an image."""

    targets, output_type, evaluation = ONE_CLASS, Classes, Evaluation
    figures = (("accuracy", "accuracy", "{:.2%}"),)

    def plan(self, draft: Draft) -> Draft:
        """Report the task of a table, and class imbalance."""
        draft = neutralized(task_choice(draft), self.targets.task, {"loss": "mse"})
        run, targets = draft.run, draft.dataset.targets
        counts = targets.counts(draft.dataset["train"].labels, len(draft.dataset.classes)).tolist()
        if max(counts) > 5 * max(min(counts), 1) and run.class_weights == "none" and run.sampling == "shuffle":
            why = f"classes have {min(counts):,} to {max(counts):,} images; try --sampling balanced if rare ones matter"
            return draft.change(Choice("class balance", "unchanged", why))
        return draft

    def objective(self, job: Job) -> TwoPartObjective:
        run = job.run
        return Classification(
            run.preprocessing,
            run.augmentation,
            job.config.classes,
            run.label_smoothing,
            _loss_weights(job),
            teacher=_teacher(job),
            own=own_loss(run.loss, job.machine.device),
        )

    def score(self, line: Epoch) -> tuple[float, float]:
        return best_accuracy(line)

    def validate(self, logits: Tensor, labels: np.ndarray, output: Output) -> dict[str, float]:
        wanted = torch.from_numpy(np.asarray(labels))
        accuracy = (logits.argmax(1) == wanted).double().mean()
        return {"val_loss": float(F.cross_entropy(logits, wanted)), "val_accuracy": float(accuracy)}

    def fitted(self, output: Output, logits: Tensor, labels: np.ndarray, groups: Groups = None) -> Output:
        """Calibrate: fit the temperature, and keep the scores for conformal sets and the cuts of sure answers."""
        assert isinstance(output, Classes)
        labels = np.asarray(labels)
        number = count_groups(groups, len(labels))
        calibrated = Classes(output.names, fit_temperature(logits.numpy(), labels, number))
        probabilities = calibrated.values(logits).numpy()
        scores, cuts = conformal_scores(probabilities, labels), cuts_of(probabilities, labels, groups)
        groups_of_them = number if number < len(scores) else None
        return dataclasses.replace(calibrated, scores=scores, groups=groups_of_them, cuts=cuts)

    def measure(self, values: np.ndarray, labels: np.ndarray, output: Output, groups: Groups = None) -> Evaluation:
        found = measure(values, labels, output.names, groups)
        temperature = getattr(output, "temperature", 1.0)
        if temperature == 1:
            return found
        raw = (torch.from_numpy(values).double().clamp_min(1e-300).log() * temperature).softmax(1).numpy()
        return dataclasses.replace(found, temperature=temperature, raw_ece=measure(raw, labels, output.names).ece)

    def summary(self, split: str, measured: Evaluation) -> Mapping[str, float]:
        return {f"{split}_accuracy": measured.accuracy}

    def page(
        self,
        content: ReportContent,
        predictor: Predictor,
        values: np.ndarray,
        images: Split,
        measured: Evaluation,
        flops: int,
    ) -> ReportContent:
        from vitral.workflows.running.figures import confident_mistakes, draw_figures  # importing matplotlib: a second

        mistakes = confident_mistakes(values, images, predictor.classes)
        figures = draw_figures(predictor, mistakes, images, flops)
        return dataclasses.replace(content, evaluation=measured, mistakes=mistakes, **vars(figures))


def _loss_weights(job: Job) -> Tensor | None:
    if job.run.class_weights == "none":
        return None
    weights = balanced_weights(job.dataset["train"].labels, len(job.dataset.classes))
    if job.run.sampling == "balanced":  # each class is drawn equally often: a mean of 1 over the images drawn
        weights /= weights[weights > 0].mean()
    return torch.from_numpy(weights).to(job.machine.device)


def _teacher(job: Job) -> Teacher | None:
    """Build the teacher network, if the job has one."""
    if job.teacher is None:
        return None
    run = job.run
    teacher = Teacher.of(
        job.teacher.weights,
        run.preprocessing,
        job.dataset.classes,
        job.machine.device,
        weight=run.distill_weight,
        temperature=run.distill_temperature,
    )
    if run.plain:
        reference_ops(teacher.network)
    return teacher
