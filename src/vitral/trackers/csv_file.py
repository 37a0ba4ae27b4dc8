"""`RUN/metrics.csv`: the lines of metrics.jsonl as a table for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from vitral.atomic import write_text
from vitral.training.callbacks import Callback, Epoch, RunStart


class Tracker(Callback):
    """Write the whole table after each epoch, atomically: columns may be added, and a kill leaves no torn line."""

    def __init__(self) -> None:
        self.lines: list[Epoch] = []
        self.path = Path()

    def on_run_start(self, run: RunStart) -> None:
        self.path, self.lines = run.folder / "metrics.csv", list(run.history)

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        self.lines.append(line)
        columns = list(dict.fromkeys(name for one in self.lines for name in one))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        for one in self.lines:  # an image size as height×width
            writer.writerow({k: "×".join(map(str, v)) if isinstance(v, list) else v for k, v in one.items()})
        write_text(self.path, text.getvalue())
