"""Planning step about parts of a run that the user wrote, such as its loss, its optimizer or its network."""

from __future__ import annotations

import dataclasses
import json

from torch import nn

from vitral import bounded
from vitral.atomic import write_text
from vitral.data.targets import targets_of
from vitral.errors import UsageError
from vitral.model.foreign import is_function
from vitral.model.own import OWN_PARTS, folder_to_import, is_here, is_own, own_function, own_part, trusted
from vitral.training.optimizers.own import defaults_of
from vitral.training.own_metrics import parts_of
from vitral.training.plan import Choice
from vitral.wording import flag, some
from vitral.workflows.planning.draft import Draft
from vitral.workflows.tasks import task_of

_PART_OF_LOSS = {"label_smoothing": 0.0, "class_weights": "none", "teacher": None}
"""Options of vitral's own losses, and the value that turns each off."""
_RECORDED = {"compile": False, "graphs": False}
"""Ways to record a step ahead, which code of others may not allow."""


def own_parts(draft: Draft) -> Draft:
    """Find the user's parts, remember that they were named here, and report which of them a file can name."""
    parts = {name: draft.given[name] for name in OWN_PARTS if is_own(draft.given.get(name))}
    draft = _with_metrics(_with_data(draft))
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


def _with_data(draft: Draft) -> Draft:
    """Report data that only this process has."""
    if not is_here(data := str(draft.given.get("data", ""))):
        return draft
    why = "they exist only in this Python process; in another one, pass data again to resume, evaluate or compare"
    return draft.change(Choice("your data", data.partition(":")[2].removeprefix("data_"), why))


def _with_metrics(draft: Draft) -> Draft:
    """Find the user's metrics, and report them. Raises `UsageError` for a task that does not have them."""
    task = targets_of(draft.given.get("task") or draft.whole.targets.task)
    metrics = draft.given.get("metrics", ())
    if metrics and task.sequence:
        raise UsageError(f"--task {task.task} does not support metrics of your own", hint="leave out --metrics")
    for name, value in parts_of(metrics, task_of(task.task).figures).items():
        if not is_here(value):
            _trust(value)
        own_part("metrics", value)
        draft = draft.change(dataclasses.replace(_report("metrics", value), name=f"your metric {name}"))
    return draft


def _report(name: str, value: str) -> Choice:
    label = value.partition(":")[2].removeprefix(f"{name}_")
    if not is_here(value):
        return Choice(f"your {name}", value, f"imported from {folder_to_import(value)}; a resumed run imports it again")
    more = "; other programs cannot load the network" if name == "model" else ""
    why = f"it exists only in this Python process: pass {name}= again to resume{more}"
    return Choice(f"your {name}", label, why)


def _with_own_loss(draft: Draft) -> Draft:
    """Turn off what a loss of the user replaces. Raises `UsageError` for a stated option that it would not follow."""
    task = draft.given.get("task") or draft.whole.targets.task
    if targets_of(task).sequence:
        raise UsageError(f"--task {task} does not support a loss of your own", hint="leave out --loss")
    _check_parameters(own_function("loss", draft.given["loss"]))
    off: dict[str, object] = {}
    for name, value in _PART_OF_LOSS.items():
        if name not in draft.given:
            off[name] = value
        elif draft.given[name] != value:
            why = "your function computes the whole loss"
            raise UsageError(f"{flag(name)} has no effect with a loss of your own", why=why, hint="leave it out")
    return draft.change(**off)


def _check_parameters(loss: object) -> None:
    """Raise `UsageError` for a loss with parameters to train, because the optimizer has those of the network only."""
    names = [name for name, one in loss.named_parameters() if one.requires_grad] if isinstance(loss, nn.Module) else []
    if names:
        what, why = f"your loss has parameters to train: {some(names)}", "only the network's parameters are trained"
        hint = "loss.requires_grad_(False) if they are fixed, or train them in a loop of your own with vitral.plan"
        raise UsageError(what, why=why, hint=hint)


_NOT_OF_OTHERS = ("momentum", "beta2")
"""Options of vitral's own optimizers."""


def own_rates(draft: Draft) -> Draft:
    """Take the learning rate and the weight decay that an optimizer of the user has, unless options state them.

    Raises `UsageError` for an optimizer that cannot be used, and for options that it would not follow.
    """
    if stated := [name for name in _NOT_OF_OTHERS if name in draft.given]:
        what = f"{flag(stated[0])} has no effect with an optimizer of your own"
        raise UsageError(what, why="your function sets it", hint="leave it out")
    own, why = defaults_of(draft.given["optimizer"]), "of your optimizer"
    if "lr" not in draft.given:
        lr_batch = draft.given.get("lr_batch")
        draft = draft.change(
            Choice("lr", f"{own.lr:g}", f"{why}; the schedule scales it"), lr=own.lr, lr_batch=lr_batch
        )
    if "weight_decay" not in draft.given:
        decay = own.weight_decay or 0.0
        draft = draft.change(Choice("weight decay", f"{decay:g}", why), weight_decay=decay)
    return draft


def _trust(function: str) -> None:
    """Record a function that the user named, so that its run resumes and its network loads again on this machine."""
    folder = {function: folder_to_import(function)}
    try:
        folder = {**bounded.read(trusted()), **folder}
    except (OSError, ValueError, TypeError):
        trusted().parent.mkdir(parents=True, exist_ok=True)
    write_text(trusted(), json.dumps(folder, indent=2) + "\n")
