"""Planning step about parts of a run that the user wrote: its loss, its augmentation, its network."""

from __future__ import annotations

import json
from typing import Any

from vitral import bounded
from vitral.atomic import write_text
from vitral.data.targets import targets_of
from vitral.errors import UsageError
from vitral.model.foreign import is_function
from vitral.model.own import OWN_PARTS, folder_to_import, is_here, is_own, own_part, trusted
from vitral.training.plan import Choice
from vitral.wording import flag
from vitral.workflows.planning.draft import Draft

_PART_OF_LOSS = {"label_smoothing": 0.0, "class_weights": "none", "teacher": None}
"""Options of vitral's own losses, and the value that turns each off."""
_RECORDED = {"compile": False, "graphs": False}
"""Ways to record a step ahead, which code of others may not allow."""


def own_parts(draft: Draft) -> Draft:
    """Find the user's parts, remember that they were named here, and report which of them a file can name."""
    parts = {name: draft.given[name] for name in OWN_PARTS if is_own(draft.given.get(name))}
    for name, value in parts.items():
        if name == "model" and not is_function(value):
            continue
        if not is_here(value):
            _trust(value)
        own_part(name, value)
        draft = draft.change(_report(name, value))
    if "loss" in parts:
        draft = _with_own_loss(draft)
    if "loss" in parts or "augment" in parts:
        draft = draft.change(**{name: value for name, value in _RECORDED.items() if name not in draft.given})
    return draft


def _report(name: str, value: str) -> Choice:
    label = value.partition(":")[2].removeprefix(f"{name}_")
    if not is_here(value):
        return Choice(f"your {name}", value, f"imported from {folder_to_import(value)}; a resumed run imports it again")
    more = "; other programs cannot load the network" if name == "model" else ""
    why = f"only this Python process has it: pass {name}= again to resume{more}"
    return Choice(f"your {name}", label, why)


def _with_own_loss(draft: Draft) -> Draft:
    """Turn off what a loss of the user replaces. Raises `UsageError` for a stated option that it would not follow."""
    task = draft.given.get("task") or draft.whole.targets.task
    if targets_of(task).sequence:
        raise UsageError(f"--task {task} does not support a loss of your own", hint="leave out --loss")
    off: dict[str, Any] = {}
    for name, value in _PART_OF_LOSS.items():
        if name not in draft.given:
            off[name] = value
        elif draft.given[name] != value:
            why = "the whole loss is yours"
            raise UsageError(f"{flag(name)} has no effect with a loss of your own", why=why, hint="leave it out")
    return draft.change(**off)


def _trust(function: str) -> None:
    """Record a function that the user named, so that its run resumes and its network loads again on this machine."""
    folder = {function: folder_to_import(function)}
    try:
        folder = {**bounded.read(trusted()), **folder}
    except (OSError, ValueError, TypeError):
        trusted().parent.mkdir(parents=True, exist_ok=True)
    write_text(trusted(), json.dumps(folder, indent=2) + "\n")
