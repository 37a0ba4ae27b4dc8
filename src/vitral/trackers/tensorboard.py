"""`RUN/tensorboard/`: event files for `tensorboard --logdir runs`."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.tensorboard import SummaryWriter

from vitral.trackers import results, scalars
from vitral.training.callbacks import Callback, Epoch, RunStart

_SAMPLES = 16


class Tracker(Callback):
    """Write scalars by epoch, options and sample images; flush after each epoch.

    Event files can only grow, and a killed run repeats the epochs since its last checkpoint. So a run that continues
    writes the epochs of its checkpoint again, at their approximate times: no gap, and no epoch twice.
    """

    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None

    def on_run_start(self, run: RunStart) -> None:
        folder = run.folder / "tensorboard"
        shutil.rmtree(folder, ignore_errors=True)
        self.writer = SummaryWriter(str(folder))
        options = json.dumps(dict(run.options), indent=2)
        self.writer.add_text("options", "    " + options.replace("\n", "\n    "))
        if samples := run.samples(_SAMPLES):
            self.writer.add_image("training images", contact_sheet([image for image, _ in samples]), dataformats="HWC")
        began = time.time() - sum(line["seconds"] for line in run.history)
        for line in run.history:
            began += line["seconds"]
            self._write(line, began)
        self.writer.flush()

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        assert self.writer
        self._write(line, time.time())
        self.writer.flush()

    def on_run_end(self, result: Mapping[str, Any] | None) -> None:
        assert self.writer
        for name, value in results(result or {}).items():
            self.writer.add_scalar(f"result/{name}", value, int((result or {}).get("best_epoch") or 0))
        self.writer.close()

    def _write(self, line: Epoch, now: float) -> None:
        assert self.writer
        for name, value in scalars(line).items():
            self.writer.add_scalar(name, value, line["epoch"], walltime=now)


def contact_sheet(images: Sequence[np.ndarray]) -> np.ndarray:
    """Lay out images (H, W, C) of one size, uint8, in a square as wide as four of them."""
    height, width, channels = images[0].shape
    columns = min(4, len(images))
    rows = -(-len(images) // columns)
    sheet = np.zeros((rows * height, columns * width, channels), np.uint8)
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        sheet[row * height : (row + 1) * height, column * width : (column + 1) * width] = image
    return sheet
