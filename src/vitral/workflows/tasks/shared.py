"""Parts that tasks other than one class per image share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vitral.data.targets import targets_of
from vitral.errors import UsageError
from vitral.model.own import is_own
from vitral.training.plan import Choice
from vitral.wording import flag
from vitral.workflows.planning.draft import Draft

if TYPE_CHECKING:
    from vitral.training.options import Run

NEEDS_CLASSES: Mapping[str, Any] = {"sampling": "shuffle", "teacher": None}
"""Options whose other values are defined for one class per image only, and their neutral value."""


def refuse(run: Run, task: str, neutral: Mapping[str, object]) -> None:
    """Raise `UsageError` for an option that a task does not support; `neutral` has the value that it does."""
    for name, value in neutral.items():
        if getattr(run, name) != value and not is_own(getattr(run, name)):
            why, hint = "it is not defined for this task", "leave it out"
            raise UsageError(f"--task {task} does not support {flag(name)} {getattr(run, name)}", why=why, hint=hint)
    if run.recipe == "linear-probe" and not targets_of(task).one_class:
        why, hint = (
            "it fits classes that exclude each other",
            f"--freeze 'blocks.*', which trains the head of --task {task}",
        )
        raise UsageError(f"--recipe linear-probe does not support --task {task}", why=why, hint=hint)


def neutralized(draft: Draft, task: str, neutral: Mapping[str, object]) -> Draft:
    """Refuse what is given for a task that does not support it; set what the recipe proposes to its neutral value."""
    proposed = {name: value for name, value in neutral.items() if name not in draft.given}
    changed = {name: value for name, value in proposed.items() if getattr(draft.run, name) != value}
    choices = [Choice(n.replace("_", " "), "off", f"not defined for --task {task}") for n in changed]
    draft = draft.change(*choices, **changed)
    refuse(draft.run, task, neutral)
    return draft


def task_choice(draft: Draft) -> Draft:
    """Report the task and the reason for it."""
    given = "requested" if "task" in draft.given else ""
    why = "; ".join(filter(None, (given, draft.dataset.reason)))
    return draft.change(Choice("task", draft.run.task, why)) if why else draft
