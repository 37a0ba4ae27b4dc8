"""The contract of a tracker (`vitral.trackers`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitral.bounded import parse
from vitral.trackers import TRACKERS
from vitral.training.callbacks import Callback, Epoch, RunStart
from vitral.weights.files import read_tensors
from vitral.workflows.train import train

_OPTIONS: dict[str, Any] = {
    "model": "mu/4",
    "dim": 8,
    "depth": 1,
    "heads": 2,
    "mlp_dim": 8,
    "image_size": 8,
    "epochs": 2,
    "optimizer": "adamw",
    "train_share": 0.05,
    "device": "cpu",
    "precision": "fp32",
    "ema": 0.0,
}
"""A run on the embedded digits that takes a moment."""


class TrackerContract:
    """Inherit, and set `tracker` and `name`."""

    tracker: Callable[[], Callback]
    """The class `Tracker` of its module."""
    name: str
    """The name for `vitral train --log NAME`."""

    def check_written(self, folder: Path, history: Sequence[Epoch]) -> None:
        """Check what the tracker wrote for a run with these epochs; overridden by trackers that write files."""

    def test_it_follows_a_run_and_changes_nothing_of_it(self, tmp_path: Path) -> None:
        """With the tracker the weights have the same bits: it draws no random numbers."""
        with_it = self._trained(tmp_path / "with", log=(self.name,))
        without = self._trained(tmp_path / "without")
        weights, others = (read_tensors(folder / "model.safetensors")[0] for folder in (with_it, without))
        assert all(torch.equal(weights[name], others[name]) for name in others)
        lines = (with_it / "metrics.jsonl").read_text("utf-8").splitlines()
        self.check_written(with_it, [parse(line) for line in lines])

    def test_it_continues_a_run_and_ends_with_one_that_failed(self, tmp_path: Path) -> None:
        """A resumed run starts with the epochs that are done; one that was stopped has no result."""
        line: Epoch = {
            "epoch": 1,
            "step": 3,
            "train_loss": 2.0,
            "val_loss": 1.9,
            "val_accuracy": 0.3,
            "lr": 1e-3,
            "seconds": 0.5,
        }
        history: list[Epoch] = [line]
        next_epoch: Epoch = {**history[0], "epoch": 2, "step": 6}
        before = copy.deepcopy((history, next_epoch))
        for past in ([], history):
            tracker = self.tracker()
            tracker.on_run_start(RunStart(tmp_path, {"model": "mu/4", "epochs": 2}, past, _samples, nn.Identity()))
            tracker.on_epoch_start(len(past), 3, 0)
            tracker.on_batch(torch.tensor(1.5))
            tracker.on_epoch_end(next_epoch if past else history[0], best=True)
            tracker.on_stop()
            tracker.on_run_end(None)
        assert (history, next_epoch) == before, "the lines of the run were changed"

    def test_vitral_finds_it(self) -> None:
        """The package is installed, and the name is not one of vitral's own trackers."""
        assert TRACKERS[self.name]

    def _trained(self, folder: Path, **options: Any) -> Path:
        return train("digits", out=str(folder), quiet=True, **_OPTIONS, **options).folder


def _samples(count: int) -> list[tuple[np.ndarray, str]]:
    return [(np.full((8, 8, 1), 10 * number, np.uint8), "a") for number in range(count)]
