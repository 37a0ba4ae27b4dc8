"""Trackers: write a run's metrics where other tools show them, one file a tool (`vitral train --log NAME`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from vitral.data.loader import Batch
from vitral.errors import MissingExtraError, unknown
from vitral.plugins import Extensible
from vitral.training.callbacks import Callback, Callbacks, Epoch, RunStart

_BUILT_IN = {
    "csv": "vitral.trackers.csv_file",
    "tensorboard": "vitral.trackers.tensorboard",
    "wandb": "vitral.trackers.wandb",
    "mlflow": "vitral.trackers.mlflow",
}
TRACKERS: Mapping[str, str] = Extensible("vitral.trackers", _BUILT_IN, lambda entry: entry.value)
"""Name → the module whose `Tracker` it is, imported when it is used."""


def create_trackers(names: Sequence[str], warn: Callable[[str], None]) -> list[Callback]:
    """Make the trackers of these names; one that fails later is reported by `warn` and left out, and the run continues.

    Raises `UsageError` for an unknown name and `MissingExtraError` if its package is not installed.
    """
    return [_Guarded(name, _tracker(name), warn) for name in dict.fromkeys(names)]


def _tracker(name: str) -> Callback:
    if name not in TRACKERS:
        raise unknown("tracker", name, TRACKERS)
    try:
        tracker: Callback = importlib.import_module(TRACKERS[name]).Tracker()
    except ImportError as error:
        hint = f"pip install 'vitral[{name}]', or leave out --log {name}"
        raise MissingExtraError(f"{name} is not installed", why=str(error), hint=hint) from error
    return tracker


def scalars(line: Epoch) -> dict[str, float]:
    """Name an epoch's numbers as trackers group them: `train/loss`, `val/accuracy`, `lr`, `images_per_second`, …"""
    numbers = {name: float(value) for name, value in line.items() if isinstance(value, int | float)}
    return {_grouped(name): value for name, value in numbers.items() if name not in ("epoch", "step")}


def results(result: Mapping[str, Any]) -> dict[str, float]:
    """The figures of the splits in result.json, such as accuracy, named as in `scalars`."""
    names = [name for name in result if name.startswith(("val_", "test_"))]
    return {_grouped(name): float(result[name]) for name in names}


def _grouped(name: str) -> str:
    split, _, rest = name.partition("_")
    return f"{split}/{rest}" if split in ("train", "val", "test") else name


class _Guarded(Callbacks):
    """A tracker whose failure does not end the run: a broken connection must not cost hours of training."""

    def __init__(self, name: str, tracker: Callback, warn: Callable[[str], None]):
        super().__init__([tracker])
        self.name, self.warn = name, warn

    def on_run_start(self, run: RunStart) -> None:
        self._guard(super().on_run_start, run)

    def on_epoch_start(self, epoch: int, batches: int, done: int) -> None:
        self._guard(super().on_epoch_start, epoch, batches, done)

    def on_logits(self, batch: Batch, logits: Tensor) -> None:
        self._guard(super().on_logits, batch, logits)

    def on_batch(self, loss: Tensor) -> None:
        self._guard(super().on_batch, loss)

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        self._guard(super().on_epoch_end, line, best)

    def on_stop(self) -> None:
        self._guard(super().on_stop)

    def on_run_end(self, result: Mapping[str, object] | None) -> None:
        self._guard(super().on_run_end, result)

    def _guard(self, method: Callable[..., None], *given: object) -> None:
        try:
            method(*given)
        except Exception as error:
            self.callbacks = ()
            self.warn(f"--log {self.name} failed, and the run continues without it: {type(error).__name__}: {error}")
