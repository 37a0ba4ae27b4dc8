"""One text an image: teacher forcing, lines exactly right, character and word error rates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vitral.data import DataSet, Split
from vitral.data.targets import TEXT
from vitral.data.tokens import END, PADDING, START, decode
from vitral.errors import UsageError
from vitral.evaluation.intervals import Groups
from vitral.evaluation.metrics import GROUPED
from vitral.evaluation.text import TextEvaluation, measure_texts
from vitral.inference.outputs import Output
from vitral.inference.outputs.text import TextOutput
from vitral.inference.predictor import Predictor
from vitral.model import DecoderConfig, EncoderDecoderConfig, ModelConfig, ViTConfig
from vitral.training.callbacks import Epoch
from vitral.training.objectives.objective import TwoPartObjective
from vitral.training.objectives.text import ReadingText
from vitral.training.options import Run
from vitral.workflows.tasks.task import Task

if TYPE_CHECKING:
    from vitral.evaluation.report import ReportContent
    from vitral.workflows.planning.job import Job


class TextTask(Task):
    """One text an image."""

    targets, output_type, evaluation = TEXT, TextOutput, TextEvaluation
    figures = (("accuracy", "exact lines", "{:.2%}"), ("cer", "character errors", "{:.2%}"))

    def objective(self, job: Job) -> TwoPartObjective:
        run = job.run
        return ReadingText(run.preprocessing, run.augmentation, START, PADDING, run.label_smoothing)

    def score(self, line: Epoch) -> tuple[float, float]:
        return line.get("val_accuracy", 0.0), -line.get("val_cer", 0.0)

    def validate(self, logits: Tensor, labels: np.ndarray, output: Output) -> dict[str, float]:
        measured = self.measure(logits.numpy(), labels, output)
        return {"val_accuracy": measured.accuracy, "val_cer": measured.cer}

    def measure(self, values: np.ndarray, labels: np.ndarray, output: Output, groups: Groups = None) -> TextEvaluation:
        found = [output.prediction("", row) for row in values]
        right = [decode(row, output.names) for row in labels]
        return measure_texts([one.text for one in found], right, [one.confidence for one in found], groups)

    def summary(self, split: str, measured: TextEvaluation) -> Mapping[str, float]:
        return {f"{split}_accuracy": measured.accuracy, f"{split}_cer": measured.cer}

    def page(
        self,
        content: ReportContent,
        predictor: Predictor,
        values: np.ndarray,
        images: Split,
        measured: Any,
        flops: int,
    ) -> ReportContent:
        from vitral.evaluation.report import GALLERY_IMAGES, Mistake

        found = [predictor.output.prediction("", row) for row in values]
        right = [decode(row, predictor.output.names) for row in images.labels]
        wrong = [i for i, one in enumerate(found) if one.text != right[i]]
        wrong.sort(key=lambda i: -found[i].confidence)
        mistakes = [
            Mistake(images.image(i, 3), images.names[i], right[i], found[i].text, found[i].confidence)
            for i in wrong[:GALLERY_IMAGES]
        ]
        return dataclasses.replace(content, findings=[*content.findings, *_findings(measured)], mistakes=mistakes)


def _findings(measured: TextEvaluation) -> list[tuple[str, str]]:
    """Headings and sentences for the report."""
    (low, high), (least, most) = measured.accuracy_interval, measured.cer_interval
    lines = f"{measured.accuracy:.2%} of {measured.counted('line')} (95% interval {low:.2%} to {high:.2%})"
    errors = f"{measured.cer:.2%} of {measured.characters:,} characters (95% interval {least:.2%} to {most:.2%})"
    alike = f" {GROUPED.capitalize()}." if measured.widened else ""
    return [("Exactly right", f"{lines}.{alike}"), ("Characters to correct", f"{errors}; words: {measured.wer:.2%}.")]


def text_config(
    run: Run, dataset: DataSet, encoder: ModelConfig, decoder: DecoderConfig | None = None, *, project: bool = False
) -> EncoderDecoderConfig:
    """The configuration of a run's network: the encoder, and a decoder for the data's tokens, by default a new one."""
    if not isinstance(encoder, ViTConfig):
        raise UsageError(f"{run.model} cannot read text", why="the decoder attends to the tokens of a ViT")
    if decoder is not None:
        return EncoderDecoderConfig(encoder, decoder, project)
    dim, width = run.decoder_dim or encoder.dim, encoder.dim // encoder.heads
    heads = dim // width if dim % width == 0 else 1  # as wide as the encoder's, if they divide the width
    decoder = DecoderConfig(
        vocabulary=len(dataset.classes),
        length=int(dataset["train"].labels.shape[1]),
        start_token=START,
        end_token=END,
        pad_token=PADDING,
        dim=dim,
        depth=run.decoder_depth,
        heads=heads,
        mlp_dim=4 * dim,
        memory_dim=encoder.dim,
        dropout=encoder.dropout,
    )
    return EncoderDecoderConfig(encoder, decoder)
