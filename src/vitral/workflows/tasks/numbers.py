"""Numbers an image: standardized targets, R² and mean absolute error."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vitral.data import DataSet, Split
from vitral.data.targets import NUMBERS
from vitral.device import widest
from vitral.errors import DataError
from vitral.evaluation.intervals import Groups
from vitral.evaluation.numbers import NumbersEvaluation, measure_numbers
from vitral.inference.outputs import Output
from vitral.inference.outputs.numbers import Numbers
from vitral.inference.predictor import Predictor
from vitral.training.callbacks import Epoch
from vitral.training.objectives.numbers import NumberError
from vitral.training.objectives.objective import TwoPartObjective, own_loss
from vitral.training.plan import Choice
from vitral.workflows.planning.draft import Draft
from vitral.workflows.tasks.shared import NEEDS_CLASSES, neutralized, task_choice
from vitral.workflows.tasks.task import Task

if TYPE_CHECKING:
    from vitral.evaluation.report import ReportContent
    from vitral.workflows.planning.job import Job


class NumbersTask(Task):
    """One or more numbers an image."""

    targets, output_type, evaluation = NUMBERS, Numbers, NumbersEvaluation
    figures = (("r2", "R²", "{:.3f}"),)

    def plan(self, draft: Draft) -> Draft:
        """Report the numbers with their mean and deviation, and the loss."""
        off = {"label_smoothing": 0.0, "mixup": 0.0, "cutmix": 0.0, "class_weights": "none"}
        draft = neutralized(task_choice(draft), "numbers", {**NEEDS_CLASSES, **off})
        output = self.output(draft.dataset)
        names = zip(output.names, output.mean, output.deviation, strict=True)
        values = ", ".join(f"{name} {mean:.4g} ± {deviation:.3g}" for name, mean, deviation in names)
        why = "mean and deviation of the training images, by which targets are standardized; predictions undo it"
        errors = {
            "mse": "squared error; --loss huber if a few images have extreme numbers",
            "huber": "squared error up to one deviation and linear beyond it: outliers count less",
        }
        draft = draft.change(Choice("numbers", values, why))
        loss = draft.run.loss
        return draft.change(Choice("loss", loss, errors[loss])) if loss in errors else draft

    def objective(self, job: Job) -> TwoPartObjective:
        run, output, device = job.run, self.output(job.dataset), job.machine.device
        mean, deviation = (
            torch.tensor(one, dtype=widest(device), device=device) for one in (output.mean, output.deviation)
        )
        own = own_loss(run.loss, device)
        return NumberError(run.preprocessing, run.augmentation, mean, deviation, run.loss, own)

    def output(self, dataset: DataSet) -> Numbers:
        numbers = dataset["train"].labels
        deviation = numbers.std(axis=0)
        if constant := [name for name, one in zip(dataset.classes, deviation, strict=True) if not one > 0]:
            why = "all training images have the same"
            hint = "other columns: --targets COLUMN COLUMN"
            raise DataError(f"nothing to learn in {', '.join(constant)}", where=dataset.source, why=why, hint=hint)
        return Numbers(dataset.classes, tuple(numbers.mean(axis=0).tolist()), tuple(deviation.tolist()))

    def score(self, line: Epoch) -> tuple[float, float]:
        return 0.0, -line.get("val_loss", 0.0)

    def validate(self, logits: Tensor, labels: np.ndarray, output: Output) -> dict[str, float]:
        assert isinstance(output, Numbers)
        standardized = (labels - np.array(output.mean)) / np.array(output.deviation)
        r2 = (
            measure_numbers(logits.double().numpy(), standardized, output.names).r2 if logits.isfinite().all() else None
        )
        error = float(np.square(logits.double().numpy() - standardized).mean())
        return {"val_loss": error, **({} if r2 is None else {"val_r2": r2})}

    def answers(self, logits: Tensor, output: Output) -> Tensor:
        return output.values(logits)

    def measure(
        self, values: np.ndarray, labels: np.ndarray, output: Output, groups: Groups = None
    ) -> NumbersEvaluation:
        return measure_numbers(values, labels, output.names, groups)

    def summary(self, split: str, measured: NumbersEvaluation) -> Mapping[str, float]:
        errors = {f"{split}_mae_{one.name}": one.mae for one in measured.per_number}
        return ({} if measured.r2 is None else {f"{split}_r2": measured.r2}) | errors

    def page(
        self,
        content: ReportContent,
        predictor: Predictor,
        values: np.ndarray,
        images: Split,
        measured: NumbersEvaluation,
        flops: int,
    ) -> ReportContent:
        from vitral.workflows.running.figures import draw_figures
        from vitral.workflows.tasks.numbers_page import headline, sections  # importing matplotlib takes a second

        parts = sections(measured, values, images)
        figures = draw_figures(predictor, [], images, flops)
        return dataclasses.replace(
            content, headline=headline(measured), measured=self.figures, sections=parts, **vars(figures)
        )
