"""Measurements of pretraining while it runs, and its files at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
from torch import nn

from vitral.data import DataSet
from vitral.data.checks.groups import with_copies
from vitral.device import seeded
from vitral.distributed.tensors import has_shards
from vitral.epoch_metrics import FEATURES
from vitral.evaluation.intervals import count_groups, design_effect
from vitral.pretraining.method import kept
from vitral.pretraining.monitor import ENTROPIES, Monitor, check_collapse, monitored
from vitral.weights import native
from vitral.workflows.checks.contact_sheet import contact_sheet
from vitral.workflows.planning.memory import eval_batch_size
from vitral.workflows.running.build import initial_model
from vitral.workflows.running.pretraining_samples import draw_samples
from vitral.workflows.running.records import facts, report_guarded, write_result
from vitral.workflows.running.running import Running

SHEET = "samples.png"
_EVERY = 60.0
"""Least seconds between two drawings of the samples."""

ADVICE: Mapping[str, str] = {
    "mae": "a new run with a lower --lr, or --mask 0.75; the weights of earlier epochs are saved",
    "mpp": "a new run with a lower --lr, or --method mae; the weights of earlier epochs are saved",
    "distill": "a new run with a lower --lr, or another --teacher; the weights of earlier epochs are saved",
    "dino": "a new run with --koleo 0.1, a lower --lr, or a --teacher-momentum closer to 1",
}
"""Method → the hint if its features collapse."""


def measure(running: Running) -> Callable[[nn.Module], dict[str, float]]:
    """Return the function that measures features on rank 0 after an epoch; it refuses features that have collapsed."""
    job = running.job
    monitor = Monitor(job.dataset, job.run.preprocessing, job.machine, eval_batch_size(job.config, job.machine.device))
    drawn = time.monotonic()

    def measured(_: nn.Module) -> dict[str, float]:
        model = whole_model(running)
        return running.ranks.share(lambda: of(model))

    def of(model: Any) -> dict[str, float]:
        nonlocal drawn
        found, sums = monitor(kept(model)), running.state.sums
        entropies = {name: float(sums[name] / sums["count"]) for name in ENTROPIES if name in sums}
        check_collapse({**found, **entropies}, ADVICE[job.run.recipe])
        if time.monotonic() - drawn > _EVERY:
            with suppress(Exception):  # of any kind: a drawing must not end the run, and the report says why
                contact_sheet(draw_samples(running, model), running.folder.path / SHEET)
            drawn = time.monotonic()
        return found

    return measured


def whole_model(running: Running) -> object:
    """Return the trained network on rank 0; of one whose parts are on several ranks, a copy of whole tensors."""
    state = running.state
    if not has_shards(state.model):
        return state.model
    tensors = running.strategy.gathered(state.model.state_dict())
    if not running.ranks.main:
        return None
    with seeded(running.job.run.seed):
        model = initial_model(running.job, measured=False)
    model.load_state_dict(tensors)
    return model.train(state.model.training)


def finish(running: Running) -> None:
    """Write samples, report and result.json, on rank 0."""
    model = whole_model(running)
    running.ranks.share(lambda: _write(running, model))


def _write(running: Running, model: object) -> None:
    folder, state = running.folder, running.state
    weights = native.read(folder.weights)
    last: Mapping[str, object] = state.history[-1] if state.history else {}
    result: dict[str, object] = {
        "method": running.job.run.recipe,
        **facts(running, sum(value.numel() for value in weights.state.values())),
        "train_loss": last.get("train_loss"),
        **{one.key: last[one.key] for one in FEATURES if one.key in last},
    }
    if "knn_accuracy" in last:
        result["probed"] = probed(running.job.dataset)
    write_result(running, result)
    with report_guarded(running):
        _report(running, model, result)


def _report(running: Running, model: object, result: Mapping[str, object]) -> None:
    from vitral.workflows.running.pretraining_page import write_report  # matplotlib takes a second to import

    cells = draw_samples(running, model)
    contact_sheet(cells, running.folder.path / SHEET)
    write_report(running, result, cells)


def probed(dataset: DataSet) -> dict[str, float]:
    """Number of the validation images of the two accuracies, and of independent ones that say as much at least."""
    images = with_copies(monitored(dataset)[-1])
    count, most = len(images), design_effect(np.zeros(len(images)), images.groups)
    return {"images": count, "groups": count_groups(images.groups, count), "independent": count / most}
