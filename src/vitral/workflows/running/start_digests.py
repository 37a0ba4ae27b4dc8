"""Digests of the weights that a run starts from, in config.json, and the check that they are still the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vitral.errors import RunError
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.weights.loaded import Loaded
from vitral.workflows.planning.job import Job

WHAT = {"init": "initial weights", "teacher": "teacher"}
"""Option of a run → the weights that it names."""


def start_entries(job: Job) -> dict[str, object]:
    """Return the entries of config.json about the initial weights and the teacher."""
    entries: dict[str, object] = {}
    if init := job.init:
        entries["init"] = {**init.account.to_json(), "digest": init.account.digest, "tensors": _digest(init)}
    if teacher := job.teacher:
        entries["teacher"] = {"reference": teacher.reference, "digest": _digest(teacher)}
    return entries


def changed_starts(job: Job, folder: RunFolder) -> Iterator[tuple[str, RunError]]:
    """Yield `init` or `teacher`, with its error, for each whose weights are not those that the run began with.

    A record of an earlier version may have no digest of the initial weights; then they are not compared.
    """
    record = folder.read_config()
    for option, loaded in (("init", job.init), ("teacher", job.teacher)):
        if loaded is not None and not _same(loaded, record.get(option, {})):
            what = WHAT[option]
            why = "the run began with different weights at this path"
            hint = f"restore them, or {job.plan.restart_hint}"
            error = RunError(
                f"the {what} {'have' if what.endswith('s') else 'has'} changed",
                where=getattr(job.run, option),
                why=why,
                hint=hint,
            )
            yield option, error


def _same(loaded: Loaded, record: Mapping[str, object]) -> bool:
    """True if the tensors, or in an older record the file, have the recorded digest."""
    if "reference" in record or "tensors" in record:
        return bool(record.get("tensors", record.get("digest")) == _digest(loaded))
    return record.get("digest", "") in ("", loaded.account.digest)


def _digest(loaded: Loaded) -> str:
    """Digest of the tensors: a file may change in its metadata, such as by a threshold for unknown images."""
    return native.digest(loaded.weights.state)
