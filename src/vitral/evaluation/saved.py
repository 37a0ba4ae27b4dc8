"""Read the metrics of a split in result.json, of any task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitral.errors import DataError
from vitral.evaluation.labels import LabelsEvaluation
from vitral.evaluation.metrics import Evaluation
from vitral.evaluation.numbers import NumbersEvaluation
from vitral.evaluation.text import TextEvaluation

EVALUATIONS: Mapping[str, Any] = {
    "class": Evaluation,
    "labels": LabelsEvaluation,
    "numbers": NumbersEvaluation,
    "text": TextEvaluation,
}
"""Task → its metrics."""


def evaluation_of(plain: Mapping[str, Any]) -> Any:
    """Read what `to_json` of any of `EVALUATIONS` returned. Raises `DataError` for anything else."""
    task = plain.get("task", "class")
    if task not in EVALUATIONS:
        raise DataError("not an evaluation", why=f"its task is {task!r}")
    return EVALUATIONS[task].from_json(plain)
