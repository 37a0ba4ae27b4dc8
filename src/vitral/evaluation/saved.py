"""Read the metrics of a split in result.json, of any task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitral.data.targets import DEFAULT_TASK
from vitral.errors import DataError
from vitral.evaluation.labels import LabelsEvaluation
from vitral.evaluation.metrics import Evaluation
from vitral.evaluation.numbers import NumbersEvaluation
from vitral.evaluation.text import TextEvaluation
from vitral.plugins import Extensible

EVALUATIONS: Mapping[str, Any] = Extensible(
    "vitral.tasks",
    {"class": Evaluation, "labels": LabelsEvaluation, "numbers": NumbersEvaluation, "text": TextEvaluation},
    lambda entry: entry.load().evaluation,
)
"""Task → its metrics."""


def evaluation_of(plain: Mapping[str, Any]) -> Any:
    """Read what `to_json` of any of `EVALUATIONS` returned. Raises `DataError` for anything else."""
    task = plain.get("task", DEFAULT_TASK)
    if task not in EVALUATIONS:
        raise DataError("not an evaluation", why=f"its task is {task!r}")
    return EVALUATIONS[task].from_json(plain)
