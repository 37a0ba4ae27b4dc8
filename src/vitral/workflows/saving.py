"""Save metrics, checkpoints and the best weights of a run during training."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from torch import Tensor

from vitral._version import __version__
from vitral.console import command_line
from vitral.data.fingerprint import digest
from vitral.data.loader import Batches
from vitral.distributed.ranks import ALONE, Ranks
from vitral.distributed.strategies import Strategy
from vitral.pretraining.methods import METHODS
from vitral.training.callbacks import Callback
from vitral.training.loop import State
from vitral.training.options import Run
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.weights.read.references import is_included
from vitral.workflows.job import Job
from vitral.workflows.tasks import task_of


def command(given: Mapping[str, Any]) -> str:
    """Return the command line for these options."""
    data = [given["data"]] if "data" in given else []
    options = {name: value for name, value in given.items() if name != "data"}
    if (recipe := given.get("recipe")) in METHODS:
        del options["recipe"]
        return command_line("pretrain", data, {"method": recipe, **options})
    return command_line("train", data, options)


@dataclass(frozen=True)
class Running:
    """A job in execution."""

    job: Job
    folder: RunFolder
    console: Console
    command: str
    batches: Mapping[str, Batches]
    state: State
    callback: Callback
    strategy: Strategy
    ranks: Ranks = ALONE

    @cached_property
    def trained_on(self) -> str:
        """Digest of the names and labels of the readable training images."""
        return digest(self.job.dataset["train"], self.job.dataset.classes)


def open_folder(running: Running) -> None:
    folder, plan = running.folder, running.job.plan
    folder.clear()
    record: dict[str, Any] = {
        "command": running.command,
        "run": plan.run.to_json(),
        "plan": [asdict(choice) for choice in plan.choices],
        "paths": path_entries(plan.run, folder.path),
        "versions": versions(),
    }
    record |= {name: value for name in ("most_epochs", "training_seconds") if (value := getattr(plan, name))}
    if init := running.job.init:
        record["init"] = {**init.account.to_json(), "digest": init.account.digest}
    if teacher := running.job.teacher:
        record["teacher"] = {"reference": teacher.reference, "digest": native.digest(teacher.weights.state)}
    if plan.fingerprint:
        record["data"] = plan.fingerprint.to_json()
    if plan.near:
        record["near"] = [list(one) for one in plan.near]
    folder.write(folder.config, json.dumps(record, indent=2) + "\n")


def path_entries(run: Run, folder: Path) -> dict[str, str]:
    """Return the paths in the options of a run relative to its folder, so that both can be moved together."""
    entries: dict[str, str] = {}
    for name in ("data", "data_root", "init", "teacher"):
        path = os.path.expanduser(getattr(run, name) or "")
        if os.path.exists(path) and not (name in ("init", "teacher") and is_included(getattr(run, name))):
            entries |= path_entry(name, path, folder)
    return entries


def path_entry(name: str, path: str, folder: Path) -> dict[str, str]:
    with contextlib.suppress(ValueError):  # on Windows, another drive has no relative path
        return {name: os.path.relpath(os.path.realpath(path), os.path.realpath(folder))}
    return {}


def circumstances(running: Running) -> dict[str, Any]:
    """Return the fields of result.json on time, machine and program."""
    job, state = running.job, running.state
    rates = [line["images_per_second"] for line in state.history if "images_per_second" in line]
    return {
        "seconds": state.seconds,
        **({"compile_seconds": state.compile_seconds} if state.compile_seconds else {}),
        "images_per_second": median(rates) if rates else None,
        "device": job.machine.name,
        "precision": job.machine.precision,
        "seed": job.run.seed,
        "command": running.command,
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of vitral, Python and the main packages."""
    packages = {name: version(name) for name in ("torch", "torchvision", "numpy", "pillow")}
    return {"vitral": __version__} | packages | {"python": platform.python_version()}


class Saving:
    """Save metrics and the best weights, then the state that refers to them. Of several ranks the first one writes.

    If epochs are short, some are not saved, so that saving takes at most a twentieth of the time. The best weights of
    an epoch that is not saved are kept as a copy on the device.
    """

    def __init__(self, running: Running):
        self.running = running
        self._took, self._last = 0.0, -math.inf
        self._best: tuple[Mapping[str, Any], Mapping[str, Tensor]] | None = None
        self._behind = False

    def __call__(self, state: State, best: bool, must: bool = False) -> None:
        """Save after an epoch if there is time, or in any case with `must`, as when the user stops the run."""
        self._behind = True
        gathered, ranks = self.running.strategy.gathered, self.running.ranks
        weights = gathered(state.evaluated.state_dict()) if best else {}
        if must or ranks.share(lambda: time.perf_counter() - self._last >= self._took / SAVING_SHARE):
            self._write(state.history[-1] if best else None, weights)
        elif best and ranks.main:
            self._best = state.history[-1], {name: value.detach().clone() for name, value in weights.items()}

    def finish(self) -> None:
        """Write what has not been saved yet."""
        if self._behind:
            self._write(None, {})

    def keep_best(self) -> None:
        """Write the best weights and the metrics, without the state, if they have not been saved yet."""
        if self._best:
            save_metrics(self.running)
            save_weights(self.running, *self._best)

    def _write(self, line: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> None:
        started, state = time.perf_counter(), self.running.state
        tensors = self.running.strategy.gathered(state.tensors())
        if not self.running.ranks.main:
            self._behind = False
            return
        save_metrics(self.running)
        if line is not None:
            save_weights(self.running, line, weights)
        else:
            self.keep_best()
        self._best, self._behind = None, False
        identity = {"seed": self.running.job.run.seed, "images": self.running.trained_on}
        _keep_previous(self.running.folder)
        state.save(self.running.folder.last, identity, tensors)
        self._last = time.perf_counter()
        self._took = self._last - started


SAVING_SHARE = 0.05
"""Largest share of a run's time for saving."""


def _keep_previous(folder: RunFolder) -> None:
    """Keep the last checkpoint under a second name before it is replaced; a hard link costs no time."""
    spare = folder.previous.with_name(f".{folder.previous.name}.tmp")
    with contextlib.suppress(OSError):  # no checkpoint yet, or a file system without links
        spare.unlink(missing_ok=True)
        os.link(folder.last, spare)
        os.replace(spare, folder.previous)


def save_metrics(running: Running) -> None:
    folder = running.folder
    folder.write(folder.metrics, "".join(json.dumps(line) + "\n" for line in running.state.history))


def save_weights(running: Running, line: Mapping[str, Any], state: Mapping[str, Tensor]) -> None:
    """Write the best weights with their line of metrics."""
    job = running.job
    about = {"data": job.run.data, "model": job.run.model, "recipe": job.run.recipe}
    sizes = {"patch_sizes": list(job.run.patch_sizes)} if job.run.patch_sizes else {}
    trained = {**about, **sizes, **line, "versions": versions()}
    classes = job.dataset.classes if job.config.classes else ()
    output = task_of(job.run.task).output(job.dataset).to_json() if classes else {}
    weights = native.Weights(job.config, state, job.run.preprocessing, classes, trained, output)
    native.save(running.folder.weights, weights)
