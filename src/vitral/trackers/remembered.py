"""A tracker's own note in the run folder: the identifier of its run there, and the last epoch that it has."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from vitral import bounded
from vitral.atomic import write_text
from vitral.training.callbacks import Callback, Epoch, RunStart


@dataclass
class Remembered:
    """The identifier and last epoch that a tracker needs to resume a run without repeating epochs."""

    path: Path
    run: str = ""
    epoch: int = 0

    @classmethod
    def read(cls, path: Path) -> Remembered:
        """Read the note; a new one if there is none, or none that can be read."""
        try:
            found = bounded.parse(path.read_bytes())
            return cls(path, str(found["run"]), int(found["epoch"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(path)

    def write(self, epoch: int) -> None:
        """Note that the tracker has all epochs up to this one."""
        self.epoch = epoch
        write_text(self.path, json.dumps({"run": self.run, "epoch": epoch}) + "\n")


class EpochOnce(Callback):
    """A tracker that only accepts new epochs: each is logged once, although a killed run repeats the latest ones."""

    noted: Remembered

    def log(self, line: Epoch) -> None:
        """Send one epoch to the tool."""
        raise NotImplementedError

    def catch_up(self, run: RunStart) -> None:
        """Log the epochs of a resumed run that the tool does not have yet."""
        for line in run.history:
            self._log_once(line)

    def on_epoch_end(self, line: Epoch, best: bool) -> None:
        self._log_once(line)

    def _log_once(self, line: Epoch) -> None:
        if line["epoch"] > self.noted.epoch:
            self.log(line)
            self.noted.write(line["epoch"])
