"""Several labels an image: sigmoid, thresholds chosen on validation images, mean average precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitral.data import DataSet, Split
from vitral.data.targets import SEVERAL_LABELS
from vitral.evaluation.intervals import Groups
from vitral.evaluation.labels import LabelsEvaluation, average_precision, best_thresholds, measure_labels
from vitral.inference.outputs import Output
from vitral.inference.outputs.labels import Labels
from vitral.inference.predictor import Predictor
from vitral.training.callbacks import Epoch
from vitral.training.objectives.labels import SeveralLabels, presence_weights
from vitral.training.objectives.objective import TwoPartObjective, own_loss
from vitral.training.plan import Choice
from vitral.workflows.planning.draft import Draft
from vitral.workflows.tasks.shared import NEEDS_CLASSES, neutralized, task_choice
from vitral.workflows.tasks.task import Task

if TYPE_CHECKING:
    from vitral.evaluation.report import ReportContent
    from vitral.workflows.planning.job import Job


class LabelsTask(Task):
    """Any number of labels an image."""

    targets, output_type, evaluation = SEVERAL_LABELS, Labels, LabelsEvaluation
    figures = (("map", "mAP", "{:.2%}"), ("label_accuracy", "label accuracy", "{:.2%}"))

    def plan(self, draft: Draft) -> Draft:
        """Report the labels, their balance and their thresholds."""
        draft = neutralized(task_choice(draft), "labels", {**NEEDS_CLASSES, "loss": "mse"})
        run, train = draft.run, draft.dataset["train"]
        counts = SEVERAL_LABELS.counts(train.labels, len(draft.dataset.classes)).tolist()
        mean = train.labels.sum() / len(train)
        without = int((~train.labels.any(axis=1)).sum())
        why = f"{mean:.2f} an image, {without:,} images have none; the loss is binary cross-entropy"
        choices = [Choice("labels", f"{len(counts):,}", why)]
        if "val" in draft.dataset.splits:
            chosen = "of each label, for the best F1 on the validation images; saved with the weights"
            choices.append(Choice("thresholds", "chosen", chosen))
        else:
            why = "there are no validation images to choose them on"
            choices.append(Choice("thresholds", f"{SEVERAL_LABELS.threshold:g}", why))
        if max(counts) > 5 * max(min(counts), 1) and run.class_weights == "none":
            why = f"labels have {min(counts):,} to {max(counts):,} images; --class-weights balanced helps rare ones"
            choices.append(Choice("label balance", "unchanged", why))
        return draft.change(*choices)

    def objective(self, job: Job) -> TwoPartObjective:
        run, weights = job.run, None
        if run.class_weights == "balanced":
            weights = torch.from_numpy(presence_weights(job.dataset["train"].labels)).to(job.machine.device)
        own = own_loss(run.loss, job.machine.device)
        return SeveralLabels(run.preprocessing, run.augmentation, job.config.classes, run.label_smoothing, weights, own)

    def output(self, dataset: DataSet) -> Output:
        return Labels(dataset.classes, (SEVERAL_LABELS.threshold,) * len(dataset.classes))

    def score(self, line: Epoch) -> tuple[float, float]:
        return line.get("val_map", 0.0), -line.get("val_loss", 0.0)

    def validate(self, logits: Tensor, labels: np.ndarray, output: Output) -> dict[str, float]:
        wanted = torch.from_numpy(np.asarray(labels)).float()
        average = average_precision(logits.numpy(), np.asarray(labels, bool))
        known = average[~np.isnan(average)]
        return {
            "val_loss": float(F.binary_cross_entropy_with_logits(logits, wanted)),
            "val_map": float(known.mean()) if len(known) else 0.0,
            "val_label_accuracy": float(((logits > 0) == (wanted > 0)).double().mean()),
        }

    def fitted(self, output: Output, logits: Tensor, labels: np.ndarray, groups: Groups = None) -> Output:
        values = output.values(logits).double().numpy()
        chosen = best_thresholds(values, np.asarray(labels, bool), SEVERAL_LABELS.threshold)
        return Labels(output.names, tuple(chosen.tolist()))

    def measure(
        self, values: np.ndarray, labels: np.ndarray, output: Output, groups: Groups = None
    ) -> LabelsEvaluation:
        assert isinstance(output, Labels)
        return measure_labels(values, labels, output.names, output.thresholds, groups)

    def summary(self, split: str, measured: LabelsEvaluation) -> Mapping[str, float]:
        return {f"{split}_map": measured.mean_average_precision, f"{split}_macro_f1": measured.macro_f1}

    def page(
        self,
        content: ReportContent,
        predictor: Predictor,
        values: np.ndarray,
        images: Split,
        measured: LabelsEvaluation,
        flops: int,
    ) -> ReportContent:
        from vitral.workflows.running.figures import draw_figures
        from vitral.workflows.tasks.labels_page import headline, sections  # importing matplotlib takes a second

        assert isinstance(predictor.output, Labels)
        parts = sections(measured, values, images, predictor.output)
        figures = draw_figures(predictor, [], images, flops)
        return dataclasses.replace(
            content, headline=headline(measured), measured=self.figures, sections=parts, **vars(figures)
        )
