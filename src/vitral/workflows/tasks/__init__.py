"""Tasks: what a network learns from the labels of its images. One file each, and one line in `TASKS`.

A run, its plan, its report and the evaluation of its weights ask one object instead of comparing its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitral.data.targets import DEFAULT_TASK
from vitral.errors import DataError, unknown
from vitral.plugins import Extensible
from vitral.workflows.tasks.classes import ClassTask
from vitral.workflows.tasks.labels import LabelsTask
from vitral.workflows.tasks.numbers import NumbersTask
from vitral.workflows.tasks.task import Task
from vitral.workflows.tasks.text import TextTask

__all__ = ["TASKS", "Task", "evaluation_of", "task_of"]

TASKS: Mapping[str, Task] = Extensible(
    "vitral.tasks", {"class": ClassTask(), "labels": LabelsTask(), "numbers": NumbersTask(), "text": TextTask()}
)
"""Name, as in `--task` → the task."""


def evaluation_of(plain: Mapping[str, Any]) -> Any:
    """Read the metrics of a split, as in result.json. Raises `DataError` for anything else."""
    if (task := plain.get("task", DEFAULT_TASK)) not in TASKS:
        raise DataError("not an evaluation", why=f"its task is {task!r}")
    return TASKS[task].evaluation.from_json(plain)


def task_of(name: str) -> Task:
    """Return the task of this name; `UsageError`, which lists them, if there is none."""
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]
