"""A tracker: `RUN/lines.txt` has one line an epoch."""

from __future__ import annotations

from pathlib import Path

from vitral.training.callbacks import Callback, Epoch, RunStart


class Tracker(Callback):
    """Append a line after each epoch."""

    def on_run_start(self, run: RunStart) -> None:
        self.path = Path(run.folder) / "lines.txt"

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"epoch {line['epoch']}: loss {line['train_loss']:.3f}\n")
