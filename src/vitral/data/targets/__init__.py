"""Targets: the meaning of a split's labels in each task, a file each. A data set has one of these beside its labels."""

from __future__ import annotations

from collections.abc import Mapping

from vitral.data.targets.classes import ONE_CLASS, require_one_class
from vitral.data.targets.labels import SEVERAL_LABELS
from vitral.data.targets.numbers import NUMBERS
from vitral.data.targets.target import ANY, ClassFolders, Labeling, Targets
from vitral.data.targets.text import TEXT
from vitral.errors import unknown
from vitral.plugins import Extensible

__all__ = [
    "ANY",
    "DEFAULT_TASK",
    "NUMBERS",
    "ONE_CLASS",
    "SEVERAL_LABELS",
    "TARGETS",
    "TEXT",
    "ClassFolders",
    "Labeling",
    "Targets",
    "require_one_class",
    "targets_of",
]

TARGETS: Mapping[str, Targets] = Extensible(
    "vitral.tasks",
    {one.task: one for one in (ONE_CLASS, SEVERAL_LABELS, NUMBERS, TEXT)},
    lambda entry: entry.load().targets,
)
"""Name of a task, as in `--task` → its targets."""


DEFAULT_TASK = ONE_CLASS.task
"""The task of weights and results that state none."""


def targets_of(task: str) -> Targets:
    """Return the targets of a task; `UsageError`, which lists the tasks, if there is none of this name."""
    if task not in TARGETS:
        raise unknown("task", task, TARGETS)
    return TARGETS[task]
