"""The first answer of a run: a linear probe of its initial weights, seconds after it starts."""

from __future__ import annotations

import copy
import time

import numpy as np

from vitral.data.loader import Batches
from vitral.evaluation.enough import TO_CHOOSE_AN_EPOCH
from vitral.evaluation.intervals import count_groups
from vitral.recipes.linear_probe import FIRST_IMAGES
from vitral.training.callbacks import Epoch
from vitral.wording import count, duration
from vitral.workflows.planning.memory import eval_batch_size
from vitral.workflows.running.linear_probe import fit_probe
from vitral.workflows.running.running import Running
from vitral.workflows.running.saving import save_weights
from vitral.workflows.tables.features import FeatureCache


def first_answer(running: Running) -> Epoch | None:
    """Fit a linear probe to the initial weights, save it as the weights of the run, and return its line of epoch 0.

    It stays the best until an epoch is better. With few validation images, which cannot choose, the first epoch
    replaces it: on few images, training all layers was better in every experiment (docs/log/start.md). Returns None for
    a run that does not begin, that has no `Run.probe`, or whose images do not allow one.
    """
    job, state = running.job, running.state
    train = job.dataset["train"].spread(FIRST_IMAGES)
    begins = not state.step and not state.history
    if not (job.run.probe and begins) or getattr(state.model, "head", None) is None:
        return None
    if len(np.unique(train.labels)) < 2:
        return None
    started = time.perf_counter()
    model = copy.deepcopy(state.model)
    batches = Batches(
        train,
        job.run.preprocessing,
        batch_size=eval_batch_size(job.config, job.machine.device),
        device=job.machine.device,
        workers=job.run.workers,
    )
    try:
        probe = fit_probe(
            model,
            batches,
            running.batches["val"],
            len(job.dataset.classes),
            job.machine,
            balanced=job.run.class_weights == "balanced",
            cache=FeatureCache(),
        )
    finally:
        batches.close()
    probe.write_into(model)
    line: Epoch = {
        "epoch": 0,
        "step": 0,
        "val_loss": probe.best["val_loss"],
        "val_accuracy": probe.best["val_accuracy"],
    }
    val = running.batches["val"].split
    if job.run.keep == "best" and count_groups(val.groups, len(val)) >= TO_CHOOSE_AN_EPOCH:
        state.best = line
    save_weights(running, line, model.state_dict())
    held_out = count(len(val), "held-out image")
    said = f"a linear probe of the initial weights classifies {line['val_accuracy']:.1%} of {held_out} correctly"
    running.console.print(f"After {duration(time.perf_counter() - started)}: {said}", highlight=False, soft_wrap=True)
    return line
