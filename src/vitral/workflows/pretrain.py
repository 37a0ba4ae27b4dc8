"""Pretrain: from images without labels to a run folder with weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from vitral.data import DataSet
from vitral.data.tables_in_memory import Examples, as_path
from vitral.errors import unknown
from vitral.kinds import checked
from vitral.pretraining.methods import METHODS
from vitral.recipes.pretrain import UNSUPPORTED
from vitral.training.callbacks import Callback
from vitral.training.options import LABEL_OPTIONS
from vitral.training.other_words import ALSO
from vitral.training.signatures import PRETRAIN_OPTIONS, with_listing
from vitral.workflows.running.trained import TrainedRun
from vitral.workflows.train import folder_of, no_data, train

_REFUSED = (*LABEL_OPTIONS, *UNSUPPORTED)
"""Options that no method supports. Their errors say so."""


@with_listing
@partial(
    checked,
    but=("callbacks", "data"),
    options=PRETRAIN_OPTIONS,
    unlisted=[name for name in PRETRAIN_OPTIONS if ALSO.get(name, name) in _REFUSED],
)
def pretrain(
    data: str | Path | DataSet | Examples | None = None,
    method: str | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    callbacks: Sequence[Callback] = (),
    began: float | None = None,
    **options: object,
) -> TrainedRun:
    """Train a network on images without labels and return the run, whose weights have no head.

    With class folders, the accuracy of simple classifiers on held-out images is measured after each epoch. Labels are
    used for nothing else.

    Args:
        data: As for `vitral.train`; a folder of images needs no class folders.
        method: Name of the method: mae (the default), mpp, dino or distill. A resumed run keeps its own.
        resume: Continue the stopped run in `out`.
        overwrite: Replace an existing run.
        quiet: Print nothing.
        callbacks: Objects that follow the run, as for `vitral.train`.
        began: Time of `time.monotonic()` from which `minutes` is counted.
        options: Fields of `vitral.Run`, which are listed below. The folder `out` is by default runs/NAME-pretrain.

    Returns:
        The finished run.

    Raises:
        UsageError: An option or the method has a wrong name or value.
        DataError: The images cannot be read.
        RunError: The run folder exists already, or there is no run to resume.
        Interrupted: You stopped the run. Its text says how to go on.

    Example:
        run = vitral.pretrain("photos/", "mae", model="Ti/16", epochs=2, out="pretrained")
        vitral.train("photos/", init=run.folder, epochs=2, out="runs/tuned")
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
