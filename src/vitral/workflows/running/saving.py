"""Save metrics, checkpoints and the best weights of a run during training."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping

from torch import Tensor

from vitral.filesystem import move, second_name
from vitral.training.loop import State
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.workflows.running.records import versions
from vitral.workflows.running.running import Running
from vitral.workflows.tasks import task_of


class Saving:
    """Save metrics and the best weights, then the state that refers to them. Of several ranks the first one writes.

    If epochs are short, some are not saved, so that saving takes at most a twentieth of the time. The best weights of
    an epoch that is not saved are kept as a copy on the device.
    """

    def __init__(self, running: Running):
        self.running = running
        self._took, self._last = 0.0, -math.inf
        self._best: tuple[Mapping[str, object], Mapping[str, Tensor]] | None = None
        self._behind = False

    def __call__(self, state: State, best: bool, must: bool = False) -> None:
        """Save after an epoch if there is time; with `must`, as at a stop or a new number of epochs, in any case."""
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

    def _write(self, line: Mapping[str, object] | None, weights: Mapping[str, Tensor]) -> None:
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
    """Keep the last checkpoint under a second name before it is replaced."""
    spare = folder.previous.with_name(f".{folder.previous.name}.tmp")
    with contextlib.suppress(OSError):  # there is no checkpoint yet, or no space for two
        spare.unlink(missing_ok=True)
        second_name(folder.last, spare)
        move(spare, folder.previous)


def save_metrics(running: Running) -> None:
    folder = running.folder
    folder.write(folder.metrics, "".join(json.dumps(line) + "\n" for line in running.state.history))


def save_weights(running: Running, line: Mapping[str, object], state: Mapping[str, Tensor]) -> None:
    """Write the best weights with their line of metrics."""
    job = running.job
    about = {"data": job.run.data, "model": job.run.model, "recipe": job.run.recipe}
    sizes = {"patch_sizes": list(job.run.patch_sizes)} if job.run.patch_sizes else {}
    trained = {**about, **sizes, **line, "versions": versions()}
    classes = job.dataset.classes if job.config.classes else ()
    output = task_of(job.run.task).output(job.dataset).to_json() if classes else {}
    weights = native.Weights(job.config, state, job.run.preprocessing, classes, trained, output)
    native.save(running.folder.weights, weights)
