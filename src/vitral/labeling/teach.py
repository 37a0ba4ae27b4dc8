"""Train on the labels as a process of its own: `vitral train labels.csv --minutes M --out RUN`.

The process is followed through the files of its run folder, as any other program could: `metrics.jsonl` grows by a line
per epoch, and `result.json` ends the run. A stop is the signal of Ctrl-C, after which the run can be resumed.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from vitral import bounded
from vitral.errors import UsageError
from vitral.labeling.session import Session
from vitral.training.run_folder import RunFolder
from vitral.wording import shown

LONGEST = 24 * 60.0
"""Minutes of a run that the page starts."""
_FIGURES = ("accuracy", "accuracy_interval", "images")
_PATIENCE = 60.0  # seconds that a run has to save itself


class Teacher:
    """The run that the page started last. Use it as a context manager, which stops a run that is not done."""

    def __init__(self, session: Session, folder: Path = Path("runs"), program: Sequence[str] = ()):
        """`folder` holds the runs, and `program` is the command (default: this Python with `-m vitral`)."""
        self.session, self.folder = session, folder.absolute()
        self.program = tuple(program) or (sys.executable, "-m", "vitral")
        self.run: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._begun = self._minutes = 0.0
        self._stopped = False

    def __enter__(self) -> Teacher:
        return self

    def __exit__(self, *failed: object) -> None:
        self.stop()
        if self._process is not None:
            try:
                self._process.wait(_PATIENCE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._log is not None:
            self._log.close()

    @property
    def is_running(self) -> bool:
        """True while the process lives."""
        return self._process is not None and self._process.poll() is None

    def start(self, minutes: float) -> None:
        """Train on the labels of this moment. Raises `UsageError` if a run is not done yet, `WriteError`."""
        if self.is_running:
            raise UsageError("a run is not done yet", hint="stop it first")
        if not 0 < minutes <= LONGEST:
            raise UsageError(f"a run takes up to {LONGEST:g} minutes", hint="5")
        self.session.flush()
        name = self.session.table.parent.name or "labels"
        self.run = next(path for n in range(1, 100_000) if not (path := self.folder / f"{name}-{n}").exists())
        words = ["train", str(self.session.table), "--minutes", f"{minutes:g}", "--out", str(self.run), "--quiet"]
        if self._log is not None:
            self._log.close()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - until the next run
        self._process = subprocess.Popen(
            [*self.program, *words], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._log
        )
        self._begun, self._minutes, self._stopped = time.monotonic(), minutes, False

    def stop(self) -> None:
        """Ask the run to save itself and end; it can be resumed."""
        if self._process is not None and self.is_running:
            self._stopped = True
            self._process.send_signal(signal.SIGINT)

    def to_json(self) -> dict[str, Any]:
        """Return the state of the run for the page."""
        if self.run is None or self._process is None:
            return {"state": "none"}
        code = self._process.poll()
        folder = RunFolder(self.run)
        plain = {
            "run": shown(str(self.run)),
            "epochs": read_epochs(folder.metrics),
            "seconds_left": max(0.0, 60 * self._minutes - (time.monotonic() - self._begun)),
        }
        if code is None:
            return {**plain, "state": "stopping" if self._stopped else "running"}
        if folder.result.is_file():
            return {**plain, "state": "done", **read_result(folder.result)}
        if self._stopped:
            return {**plain, "state": "stopped", "next": f"vitral train --out {shlex.quote(str(self.run))} --resume"}
        return {**plain, "state": "failed", "why": self._said()}

    def _said(self) -> str:
        """Return the error that the process printed last."""
        assert self._log is not None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4000))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        first = next(
            (i for i in range(len(lines) - 1, -1, -1) if lines[i].startswith("error: ")), max(0, len(lines) - 1)
        )
        return shown(" ".join(line.strip() for line in lines[first:]))


def read_epochs(metrics: Path) -> list[dict[str, float]]:
    """Return number, training loss and validation accuracy of each epoch so far."""
    try:
        lines = metrics.read_bytes().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            plain = bounded.parse(line)
        except ValueError:  # a line that is being written
            continue
        if isinstance(plain, dict):
            found.append({name: plain[name] for name in ("epoch", "train_loss", "val_accuracy") if name in plain})
    return found


def read_result(file: Path) -> dict[str, Any]:
    """Return the accuracy of a run with its interval, on test images or else on validation images."""
    plain = bounded.read(file)
    for split in ("test", "val"):
        if isinstance(measured := plain.get(split), dict) and "accuracy" in measured:
            return {
                "split": split,
                **{name: measured.get(name) for name in ("accuracy", "accuracy_interval", "images")},
            }
    return {}
