"""Weights & Biases. Project, entity and mode are wandb's own settings (`WANDB_PROJECT`, `WANDB_MODE=offline`, …)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Any

import wandb

from vitral.trackers import results, scalars
from vitral.trackers.remembered import EpochOnce, Remembered
from vitral.training.callbacks import Epoch, RunStart

_SAMPLES = 16


class Tracker(EpochOnce):
    """Log epochs, options and sample images. A run that continues keeps its identifier, and logs no epoch twice."""

    def __init__(self) -> None:
        self.run: Any = None
        self.noted: Remembered

    def on_run_start(self, run: RunStart) -> None:
        self.noted = Remembered.read(run.folder / "wandb" / "vitral.json")
        self.noted.run = self.noted.run or secrets.token_hex(4)
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "vitral"),
            name=run.folder.name,
            dir=str(run.folder),
            id=self.noted.run,
            resume="allow",
            config=dict(run.options),
            settings=wandb.Settings(console="off"),
        )
        if not self.noted.epoch and (samples := run.samples(_SAMPLES)):
            gray = samples[0][0].shape[-1] == 1  # then wandb wants (H, W)
            images = [wandb.Image(image[..., 0] if gray else image, caption=label) for image, label in samples]
            self.run.log({"training images": images}, step=0)
        self.catch_up(run)

    def on_run_end(self, result: Mapping[str, object] | None) -> None:
        if self.run is not None:
            self.run.summary.update({f"result/{name}": value for name, value in results(result or {}).items()})
            self.run.finish(exit_code=0 if result is not None else 1)

    def log(self, line: Epoch) -> None:
        self.run.log(scalars(line), step=line["epoch"])
