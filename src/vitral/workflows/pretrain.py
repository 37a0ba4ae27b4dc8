"""Pretrain: from images without labels to a run folder with weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitral.data import DataSet
from vitral.data.tables_in_memory import Examples, as_path
from vitral.errors import unknown
from vitral.kinds import checked
from vitral.pretraining.methods import METHODS
from vitral.training.callbacks import Callback
from vitral.training.signatures import PRETRAIN_OPTIONS, with_listing
from vitral.workflows.running.trained import TrainedRun
from vitral.workflows.train import folder_of, no_data, train


@with_listing
@partial(checked, but=("callbacks", "data"), options=PRETRAIN_OPTIONS)
def pretrain(
    data: str | Path | DataSet | Examples | None = None,
    method: str | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    began: float | None = None,
    **options: Any,
) -> TrainedRun:
    """Train a network on the images of `data`, whose labels are not read, and return the run.

    `method` is a name in `METHODS`, by default mae, and of a resumed run its own. `data` may be a folder of images
    without class folders. With class folders, the accuracy of simple classifiers on held-out images is measured after
    each epoch. The run folder is by default runs/NAME-pretrain. All else is as in `vitral.train`; the weights have no
    head.
    """
    default = checked_method(method)
    if data is None and not (resume and options.get("out")):
        raise no_data("pretrain")
    if method is None and not resume:
        method = default
    if method is None and not options.get("out"):
        given = {"data": None if data is None else as_path(data), **options, "recipe": default}
        options["out"] = str(folder_of({name: value for name, value in given.items() if value is not None}).path)
    return train(
        data,
        resume=resume,
        overwrite=overwrite,
        quiet=quiet,
        callbacks=callbacks,
        recipe=method,
        began=began,
        **options,
    )


def checked_method(method: str | None) -> str:
    """Return the name of a method, by default mae. Raises `UsageError` for an unknown one."""
    if method is not None and method not in METHODS:
        raise unknown("method", method, METHODS)
    return method or next(iter(METHODS))
