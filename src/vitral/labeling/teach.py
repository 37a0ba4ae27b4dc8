"""Plan and train on the labels: `vitral train labels.csv --minutes M --out RUN`, in a process of its own.

The plan comes from the same command with `--plan-only`. The run is followed through the files of its folder, as any
other program could: `metrics.jsonl` grows by a line per epoch, and `result.json` ends the run. A stop is the signal of
Ctrl-C, after which the run can be resumed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from vitral import bounded
from vitral.errors import UsageError, VitralError
from vitral.labeling.home import Home
from vitral.labeling.process import PROGRAM, Process
from vitral.labeling.session import Session
from vitral.training.progress import place
from vitral.training.run_folder import RunFolder
from vitral.wording import shown

LONGEST = 24 * 60.0
"""Minutes of a run that the page starts."""


class Teacher:
    """The run that the page planned or started last. Use it as a context manager, which stops what is not done."""

    def __init__(self, session: Session, folder: Path = Path("runs"), program: Sequence[str] = PROGRAM):
        """`folder` holds the runs, and `program` is the command."""
        self.session, self.folder, self.program = session, folder.absolute(), tuple(program)
        self.name = session.table.parent.name or "labels"
        self.home = Home(session, self.program, self.folder / f"{self.name}-page")
        self.run: Path | None = None
        """The folder of the run that was started last."""
        self._earlier = self._of_earlier_sessions()
        """The last run before it that ended with a result."""
        self._planning: Process | None = None
        self._training: Process | None = None
        self._begun = self._minutes = 0.0
        self._guard = threading.RLock()

    def __enter__(self) -> Teacher:
        return self

    def __exit__(self, *failed: object) -> None:
        for process in (self._planning, self._training):
            if process is not None:
                process.end()
        self.home.end()

    @property
    def is_running(self) -> bool:
        """True while a run trains."""
        return self._training is not None and self._training.code is None

    @property
    def finished(self) -> Path | None:
        """The last run that ended with a result."""
        if self.run is not None and not self.is_running and RunFolder(self.run).result.is_file():
            return self.run
        return self._earlier

    def plan(self, minutes: float) -> None:
        """Plan a run on the labels of this moment. Raises as `start`."""
        with self._guard:
            words = [*self._words(minutes), "--plan-only", "--format", "json"]
            self._forget_plan()
            self._planning, self._minutes = Process(self.program, words), minutes

    def start(self, minutes: float) -> None:
        """Train on the labels of this moment. Raises `UsageError` if a run is not done yet, `WriteError`."""
        with self._guard:
            words = self._words(minutes)
            self._forget_plan()
            self._earlier = self.finished
            if self._training is not None:
                self._training.end()
            self.run = Path(words[words.index("--out") + 1])
            self._training = Process(self.program, words)
            self._begun, self._minutes = time.monotonic(), minutes

    def stop(self) -> None:
        """Give up planning, or ask the run to save itself and end; it can be resumed."""
        with self._guard:
            self._forget_plan()
            if self._training is not None:
                self._training.interrupt()

    def make(self, kind: str) -> None:
        """Begin to make one of `home.KINDS`, of the finished run. Raises as `Home.make`."""
        with self._guard:
            self.home.make(kind, self.finished)

    def _words(self, minutes: float) -> list[str]:
        """Return the words of a command on the labels as they are now, with a new folder."""
        if self.is_running:
            raise UsageError("a run is not done yet", hint="stop it first")
        if not 0 < minutes <= LONGEST:
            raise UsageError(f"a run takes up to {LONGEST:g} minutes", hint="5")
        self.session.flush()
        run = next(path for path in self._folders() if not path.exists())
        return ["train", str(self.session.table), "--minutes", f"{minutes:g}", "--out", str(run), "--quiet"]

    def _folders(self) -> Iterator[Path]:
        """The folders of runs on this table, in the order in which they are used."""
        return (self.folder / f"{self.name}-{n}" for n in range(1, 100_000))

    def _of_earlier_sessions(self) -> Path | None:
        """The last run that an earlier session trained on this table, with a result."""
        found = None
        for path in itertools.takewhile(Path.exists, self._folders()):
            with contextlib.suppress(VitralError, OSError):
                data = RunFolder(path).read_plan().run.data
                if RunFolder(path).result.is_file() and os.path.realpath(data) == os.path.realpath(self.session.table):
                    found = path
        return found

    def _forget_plan(self) -> None:
        if self._planning is not None:
            self._planning.end()
        self._planning = None

    def to_json(self) -> dict[str, object]:
        """Return the state for the page: of the plan, otherwise of the run; and what is there of a finished run."""
        with self._guard:
            done = self.finished
            plain: dict[str, object] = {"finished": shown(str(done)) if done else "", "home": self.home.to_json(done)}
            if self._planning is not None:
                return plain | self._plan_to_json(self._planning)
            if self._training is not None:
                return plain | self._run_to_json(self._training)
            return plain | {"state": "none"}

    def _plan_to_json(self, process: Process) -> dict[str, object]:
        plain = {"minutes": self._minutes}
        if process.code is None:
            return {**plain, "state": "planning"}
        if process.code:
            return {**plain, "state": "failed", "why": process.error()}
        return {**plain, "state": "planned", "plan": read_plan(process.printed())}

    def _run_to_json(self, process: Process) -> dict[str, object]:
        assert self.run is not None
        folder = RunFolder(self.run)
        plain = {
            "run": shown(str(self.run)),
            "epochs": read_epochs(folder.metrics),
            "seconds_left": max(0.0, 60 * self._minutes - (time.monotonic() - self._begun)),
        }
        if process.code is None:
            return {**plain, "state": "stopping" if process.interrupted else "running"}
        if folder.result.is_file():
            return {**plain, "state": "done", **read_result(folder.result)}
        if process.interrupted:
            return {**plain, "state": "stopped", "next": f"vitral train --out {shlex.quote(str(self.run))} --resume"}
        return {**plain, "state": "failed", "why": process.error()}


def read_plan(printed: bytes) -> list[dict[str, str]]:
    """Return name, value and reason of each choice of a plan in JSON, in the order of `--plan-only`."""
    choices = bounded.parse(printed)["choices"]
    kept = [{name: str(one[name]) for name in ("name", "value", "reason")} for one in choices]
    return sorted(kept, key=lambda one: place(one["name"]))


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


def read_result(file: Path) -> dict[str, object]:
    """Return the accuracy of a run with its interval, on test images or else on validation images."""
    plain = bounded.read(file)
    for split in ("test", "val"):
        if isinstance(measured := plain.get(split), dict) and "accuracy" in measured:
            return {
                "split": split,
                **{name: measured.get(name) for name in ("accuracy", "accuracy_interval", "images")},
            }
    return {}
