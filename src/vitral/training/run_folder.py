"""Run folder: file names, reading, writing, locking."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

from vitral import bounded
from vitral.atomic import is_temporary, remove_left
from vitral.data.checks.fingerprint import Fingerprint
from vitral.data.checks.groups import read_sets
from vitral.data.held_out import HeldOut
from vitral.errors import RunError
from vitral.filesystem import is_locked, locked, refused
from vitral.folders import can_write, is_run
from vitral.training.callbacks import Epoch
from vitral.training.manifest import Manifest
from vitral.training.options import Run
from vitral.training.plan import Choice, Plan


class RunFolder:
    """The files of a run, and the only place with their names."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.held_out = self.path / "held-out.jsonl"
        self.metrics = self.path / "metrics.jsonl"
        self.result = self.path / "result.json"
        self.weights = self.path / "model.safetensors"
        self.last = self.path / "checkpoints" / "last.safetensors"
        self.previous = self.last.with_name("previous.safetensors")
        self.report = self.path / "report.html"
        self.manifest = Manifest(self.path)
        self._lock = self.path / ".lock"

    @property
    def texts(self) -> tuple[Path, ...]:
        """Files whose digests are in the manifest."""
        return self.config, self.result, self.metrics, self.held_out

    def write(self, file: Path, text: str) -> None:
        """Replace one of the `texts` atomically; `RunError` for a damaged manifest."""
        try:
            self.manifest.write(file, text)
        except ValueError as error:
            raise RunError("cannot write", where=self.manifest.path, why=str(error), hint=self._accepting) from error

    def accept(self) -> None:
        """Accept the current content of the `texts`; `RunError` for a configuration or result that is not JSON."""
        for file in (self.config, self.result):
            try:
                if file.is_file():
                    dict(bounded.parse(file.read_bytes(), file_names=True))
            except (ValueError, TypeError) as error:
                hint = f"put a copy of it back, or correct it: {error}"
                raise RunError(
                    "cannot accept a file that is not JSON", where=file, why=str(error), hint=hint
                ) from error
        self.manifest.accept(self.texts)

    @property
    def _accepting(self) -> str:
        return f"if you changed it on purpose, vitral verify {shlex.quote(str(self.path))} --accept"

    def next_free(self) -> str:
        """Return the first path of this name with a number that does not exist: `runs/photos-2`."""
        return next(path for n in range(2, 10_000) if not RunFolder(path := f"{self.path}-{n}").exists())

    def exists(self) -> bool:
        """True if the folder has files that a new run would overwrite.

        Remnants of a process killed at its start do not count: a lock, a manifest, temporary files, empty folders.
        """
        return os.path.lexists(self.path) and (not self.path.is_dir() or any(map(self._counts, self.path.iterdir())))

    def _counts(self, inside: Path) -> bool:
        if inside.is_dir() and not inside.is_symlink():
            return any(map(self._counts, inside.iterdir()))
        return inside not in (self._lock, self.manifest.path) and not is_temporary(inside.name)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock while this process trains the run.

        `RunError` if another process holds it, `WriteError` if nothing can be written. The system releases the lock
        when the process ends for any reason. On disks without locks there is no exclusion.
        """
        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(self._lock))
            except BlockingIOError:
                raise self._in_use() from None
            except OSError as error:
                raise refused(self.path, error) from error
            remove_left(self.path)
            yield

    def is_training(self) -> bool:
        """True while a process trains the run."""
        return is_locked(self._lock)

    def check_unlocked(self) -> None:
        """Raise `RunError` if another process is training the run."""
        if self.is_training():
            raise self._in_use()

    def _in_use(self) -> RunError:
        hint = "wait until it is done, or stop it, or train a separate run with --out …"
        return RunError("another process is training this run", where=self.path, hint=hint)

    def clear(self) -> None:
        """Remove all files of a run that is `held`, except the lock."""
        for inside in self.path.iterdir():
            if inside.is_dir() and not inside.is_symlink():
                shutil.rmtree(inside)
            elif inside != self._lock:
                inside.unlink()

    def is_run(self) -> bool:
        """True for the folder of a run."""
        return is_run(self.path)

    def is_finished(self) -> bool:
        """True if the run has its result, and its report unless the checkpoint to write that from is gone."""
        return self.result.is_file() and (self.report.is_file() or not self.last.is_file())

    def place_for(self, kind: str) -> Path | None:
        """Return the folder in a run for files about it, such as heat maps; None if it is no run, or cannot be written,
        such as that of another user.
        """
        return place if self.is_run() and can_write(place := self.path / kind) else None

    def read_history(self) -> list[Epoch]:
        """Read the metrics of each epoch, empty before the first one; `RunError` if they are damaged."""
        if not self.metrics.is_file():
            return []
        try:
            return [cast(Epoch, dict(bounded.parse(line))) for line in self.manifest.read(self.metrics).splitlines()]
        except (ValueError, TypeError) as error:
            hint = f"put a copy of it back; {self._accepting}"
            raise RunError("cannot read the run's metrics", where=self.metrics, why=str(error), hint=hint) from error

    def read_result(self) -> dict[str, Any]:
        """Read the result.json of a finished run; `RunError` if it is damaged."""
        try:
            return dict(bounded.parse(self.manifest.read(self.result), file_names=True))
        except (ValueError, TypeError) as error:
            hint = f"vitral evaluate {self.path} measures it again; delete it and --resume finishes the run again; "
            hint += self._accepting
            raise RunError("cannot read the run's result", where=self.result, why=str(error), hint=hint) from error

    def read_config(self) -> dict[str, Any]:
        """Read config.json; `RunError` if it is missing, changed or damaged."""
        if not self.config.is_file():
            why = "there is no config.json in it" if self.path.is_dir() else "there is no such folder"
            raise RunError("not a run folder", where=self.path, why=why, hint="vitral train makes runs, in runs/")
        try:
            return dict(bounded.parse(self.manifest.read(self.config), file_names=True))
        except (ValueError, TypeError) as error:
            raise self._no_config(str(error)) from error

    def read_held_out(self) -> HeldOut | None:
        """Read the record of the held-out images; None for a run without it, `RunError` for a damaged one."""
        if not self.held_out.is_file():
            return None
        try:
            return HeldOut.from_lines(self.manifest.read(self.held_out))
        except (ValueError, KeyError, TypeError) as error:
            hint = f"put a copy of it back, or restore the run's data as they were; {self._accepting}"
            where, why = self.held_out, str(error)
            raise RunError("cannot read the record of held-out images", where=where, why=why, hint=hint) from error

    def _no_config(self, why: str) -> RunError:
        hint = f"put a copy of it back; vitral predict {self.path} IMAGE works without it; {self._accepting}"
        return RunError("cannot read the run's configuration", where=self.config, why=why, hint=hint)

    def read_plan(self) -> Plan:
        """Read the run and its plan; `RunError` if they are missing or damaged."""
        data = self.read_config()
        try:
            start = os.path.realpath(self.path)
            paths = {name: os.path.normpath(os.path.join(start, path)) for name, path in data.get("paths", {}).items()}
            choices = tuple(Choice(**choice) for choice in data["plan"])
            fingerprint = Fingerprint.from_json(data["data"]) if "data" in data else None
            near = read_sets(data.get("near", ()))
            held_out = {name: read_sets(sets) for name, sets in data.get("near_held_out", {}).items()}
            run, time = Run.from_json(data["run"]), (data.get("most_epochs"), data.get("training_seconds"))
            command, folder = data.get("command", ""), Path(start)
            kept = tuple(map(int, data.get("kept", "").split()))
            return Plan(run, choices, paths, fingerprint, near, held_out, command, *time, kept=kept, folder=folder)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._no_config(f"{error} is missing" if isinstance(error, KeyError) else str(error)) from error


def unfinished(reference: str | Path) -> str:
    """Make the note on a run that has weights but is not finished; empty for all others."""
    from vitral.weights.read.hub import is_reference  # reads need no hub

    folder = RunFolder(reference)
    if is_reference(str(reference)) or not (folder.path.is_dir() and folder.is_run()) or folder.result.is_file():
        return ""
    if folder.is_training():
        return "the run is still training; these are its best weights so far"
    more = f"vitral train --out {shlex.quote(str(folder.path))} --resume"
    return f"the run is not finished; these are its best weights so far: {more}"
