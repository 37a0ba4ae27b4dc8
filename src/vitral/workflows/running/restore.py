"""Restore a stopped run from its checkpoint, or say how to go on without one."""

from __future__ import annotations

import contextlib
import shlex

import torch
from torch import Tensor

from vitral.errors import RunError, VitralError, WeightsError
from vitral.training.plan import Plan
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.weights.files import read_tensors
from vitral.workflows.running.running import Running


def restore(running: Running, *, by_steps: bool) -> None:
    """Restore the state of a stopped run on all ranks. One that has saved nothing starts at the beginning."""
    state, folder, plan = running.state, running.folder, running.job.plan
    if not running.ranks.share(lambda: _has_checkpoint(running, by_steps)):
        return
    try:
        identity = state.restore(*running.ranks.share_tensors(lambda: _read_checkpoint(folder)))
    except WeightsError as error:
        what = f"the checkpoint cannot be read: {error.what}"
        hint = (
            _recovery_hint(folder, plan)
            if error.where == folder.last
            else f"restore it from a copy, or {plan.restart_hint}"
        )
        raise RunError(what, where=error.where, why=error.why, hint=hint) from error
    except (KeyError, RuntimeError) as error:
        hint = f"restore the original config.json, or {plan.restart_hint}"
        raise RunError(
            "the checkpoint does not fit the run", where=folder.last, why=str(error)[:200], hint=hint
        ) from error
    if not running.ranks.main:  # the first rank has the sums of all
        state.sums = {name: torch.zeros_like(value) for name, value in state.sums.items()}
    if plan.fingerprint and identity.get("images", running.trained_on) != running.trained_on:
        why = "it skips unreadable images, and others are unreadable now"
        hint = f"restore the images, or {plan.restart_hint}"
        raise RunError("the run's training images have changed", where=folder.path, why=why, hint=hint)
    running.console.print(f"resuming from epoch {state.epoch + 1}, batch {state.batch}")


def _has_checkpoint(running: Running, by_steps: bool) -> bool:
    """True if the run has saved something. Raises `RunError` if that is missing."""
    folder, plan = running.folder, running.job.plan
    if folder.last.is_file():
        return True
    if by_steps and (done := len(folder.read_history())) > 1:  # epoch 1 may end before it is saved
        hint = _recovery_hint(folder, plan)
        why = f"the run finished {done} epochs"
        raise RunError("the checkpoint is missing", where=folder.last, why=why, hint=hint)
    return False


def _read_checkpoint(folder: RunFolder) -> tuple[dict[str, Tensor], dict[str, object]]:
    tensors, header = read_tensors(folder.last)
    if header["best"]:  # the checkpoint does not contain the best weights: fail now rather than at the end
        native.read(folder.weights)
    return tensors, header


def _recovery_hint(folder: RunFolder, plan: Plan) -> str:
    """Return how to continue without the last checkpoint: from the previous one if it is intact, or the best weights.

    This is only a suggestion, because the run would not continue from where it stopped.
    """
    last, previous, run = (shlex.quote(str(path)) for path in (folder.last, folder.previous, folder.path))
    with contextlib.suppress(VitralError, KeyError, TypeError):
        header = read_tensors(folder.previous)[1]
        at = f"epoch {int(header['epoch']) + 1}, batch {int(header['batch'])}"
        resume = f"mv {previous} {last} && vitral train --out {run} --resume"
        return f"resume from the intact previous checkpoint ({at}): {resume}; or {plan.restart_hint}"
    with contextlib.suppress(VitralError):
        native.read(folder.weights)
        data, other = shlex.quote(plan.run.data), shlex.quote(f"{folder.path}-2")
        best = f"train from its best weights: vitral train {data} --init {run} --out {other}"
        return f"restore it from a copy; {best}; or {plan.restart_hint}"
    return f"restore it from a copy, or {plan.restart_hint}"
