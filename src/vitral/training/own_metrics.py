"""Metrics of the user: functions of the outputs and the targets of the validation images, by name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral.epoch_metrics import DECLARED, TaskMetric
from vitral.errors import UsageError, type_of
from vitral.model.own import is_own, name_of, own_function

OwnMetric = Callable[[Tensor, Tensor], Any]
"""Outputs (n, K) fp32 of all validation images and their targets, on the CPU → a number."""
_NAMED = re.compile(r"([A-Za-z]\w*)=(.+)")
_HINT = 'metrics={"f1": function}, where function(logits, targets) returns a number'


def names_of(metrics: object) -> tuple[str, ...]:
    """Return `NAME=MODULE:FUNCTION` for each metric of a mapping, a list of functions, or a list of such texts."""
    if isinstance(metrics, Mapping):
        named = dict(metrics)
    elif isinstance(metrics, list | tuple) and not all(isinstance(one, str) for one in metrics):
        named = {_label(one): one for one in metrics}
        if len(named) < len(metrics):
            labels = [_label(one) for one in metrics]
            twice = next(label for label in labels if labels.count(label) > 1)
            raise UsageError(f"two metrics are called {twice}", why="each has a column of its own", hint=_HINT)
    elif isinstance(metrics, list | tuple):
        return tuple(metrics)
    else:
        raise UsageError(f"metrics cannot be {type_of(metrics)}", why="they are functions by name", hint=_HINT)
    for name, function in named.items():
        if not callable(function):
            raise UsageError(f"the metric {name} is {type_of(function)}, not a function", hint=_HINT)
    return tuple(f"{name}={name_of('metrics', function)}" for name, function in named.items())


def _label(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")


def parts_of(metrics: Sequence[str], known: Sequence[TaskMetric] = ()) -> dict[str, str]:
    """Return name → `MODULE:FUNCTION`. Raises `UsageError` for another form, and for names that vitral uses itself."""
    taken = {metric.key for metric in DECLARED} | {f"val_{key}" for key, _, _ in known}
    found: dict[str, str] = {}
    for text in metrics:
        named = _NAMED.fullmatch(text)
        if named is None or not is_own(named[2]):
            raise UsageError(f"--metrics {text} is not NAME=MODULE:FUNCTION", hint=_HINT)
        if f"val_{named[1]}" in taken or named[1] in found:
            raise UsageError(f"a metric is called {named[1]} already", hint="choose another name")
        found[named[1]] = named[2]
    return found


def figures_of(metrics: Sequence[str]) -> tuple[TaskMetric, ...]:
    """Return the metrics as the console and the report list them: key, title, format."""
    return tuple((name, name, "{:.4g}") for name in parts_of(metrics))


def measure_own(metrics: Sequence[str], logits: Tensor, labels: np.ndarray) -> dict[str, float]:
    """Return name → value for logits (n, K) and labels with a row for each image. Values that are not finite are left
    out, as JSON has no such number. Raises `UsageError` for a metric that fails.
    """
    found: dict[str, float] = {}
    for name, part in parts_of(metrics).items():
        targets = torch.from_numpy(np.asarray(labels))
        try:
            value = float(own_function("metrics", part)(logits, targets))
        except Exception as error:  # code of the user may raise anything
            shapes = f"outputs {tuple(logits.shape)} and targets {tuple(targets.shape)}, {targets.dtype}"
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UsageError(f"your metric {name} makes no number of {shapes}", why=why) from error
        if math.isfinite(value):
            found[name] = value
    return found
