"""Outputs of a network, a file for each task: the way from logits to a prediction that is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from vitral.data.targets import DEFAULT_TASK
from vitral.errors import UsageError, WeightsError
from vitral.inference.outputs.classes import Classes
from vitral.inference.outputs.labels import Labels
from vitral.inference.outputs.numbers import Numbers
from vitral.inference.outputs.output import Output
from vitral.inference.outputs.text import TextOutput
from vitral.plugins import Extensible
from vitral.weights import fitted

__all__ = ["OUTPUTS", "Output", "holding", "output_of"]

OUTPUTS: Mapping[str, type[Any]] = Extensible(
    "vitral.tasks",
    {"class": Classes, "labels": Labels, "numbers": Numbers, "text": TextOutput},
    lambda entry: entry.load().output_type,
)
"""Task → the class of its output, which `from_json` makes from the names and the fields saved with the weights."""


def output_of(names: Sequence[str], saved: Mapping[str, Any], statistics: Mapping[str, Tensor] | None = None) -> Output:
    """Return the output that weights state, with its tensors; without one they are a classifier's.

    Raises `UsageError` for an unknown one, `WeightsError` for one that lacks fields.
    """
    task = saved.get("task", DEFAULT_TASK)
    if task not in OUTPUTS:
        raise UsageError(
            f"unknown task '{task}' of weights", why=f"known: {', '.join(OUTPUTS)}", hint="install a newer vitral"
        )
    try:
        output: Output = OUTPUTS[task].from_json(names, {**saved, "statistics": statistics or {}})
        return output
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"damaged header in weights file: its task {task}", why=str(error)) from error


def holding(output: Output, changes: Sequence[str]) -> tuple[Output, list[str]]:
    """Return the output without the numbers that do not hold after these changes (`vitral.weights.fitted`), and notes.

    Raises `UsageError` if one of them has been put to use: sets of classes with a coverage, or a cut of sure answers.
    """
    if not changes:
        return output, []
    fields: Mapping[str, object] = output.to_json()
    notes: list[str] = []
    for change in changes:
        still, said = fitted.kept(fields, change)
        for number, in_use in (("scores", "threshold"), ("cuts", "cut")):
            if getattr(output, in_use, None) is not None and number in fields.keys() - still.keys():
                raise fitted.not_fitted(number, change)
        fields, notes = still, notes + said
    if fields == output.to_json():
        return output, notes
    statistics = output.unknown.statistics if isinstance(output, Classes) and output.unknown else {}
    return output_of(output.names, fields, statistics), notes
