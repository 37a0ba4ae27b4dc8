"""Write a table row by row, and resume it after an interruption.

Rows are appended to `NAME.partial`, which is renamed to `NAME` when it is complete. `NAME.partial.json` has the origin
of the rows: only a command with the same model, images and options resumes them. Rows are kept in whole batches,
because the last bits of a result may depend on the other images of its batch. So the file has the same bytes as without
an interruption.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from vitral import bounded
from vitral.atomic import write_text
from vitral.errors import RunError, UsageError, WriteError
from vitral.filesystem import flush_open, locked, refused
from vitral.workflows.tables.formats import Format, Row, format_of

_RESUME = "repeat the command with --resume"


class Lines(NamedTuple):
    """Rows in the format of a file."""

    text: bytes
    rows: int
    failed: int
    """Number of rows with an error."""


class RowFile:
    """A table that is being written. `kept` rows are from an interrupted command; `failed` rows have an error."""

    def __init__(
        self,
        path: str | Path,
        columns: Sequence[str],
        batch: int,
        format: type[Format] | None = None,
        texts: Collection[str] = (),
    ):
        """`texts` are the columns that hold text (`Format`)."""
        self.path, self.target, self.batch = Path(path), Path(os.path.realpath(path)), batch
        self.columns, self.format = list(columns), (format or format_of(path))(columns, texts)
        self.partial = self.target.with_name(self.target.name + ".partial")
        self.origin_file = self.target.with_name(self.target.name + ".partial.json")
        self.kept = self.failed = 0
        self._descriptor = -1

    @contextlib.contextmanager
    def opened(self, origin: Mapping[str, object], names: Iterable[str], *, resume: bool) -> Iterator[RowFile]:
        """Open and lock the partial file. With `resume` it keeps the rows of `names` that it already has.

        Raises `UsageError` if it has rows of another `origin`, or any rows without `resume`; `RunError` if another
        process writes it; `WriteError` if it cannot be written.
        """
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(os.stat(self.target).st_mode):
                raise UsageError("a table is written to a file", where=self.path, hint="--out predictions.csv")
        with contextlib.ExitStack() as held:
            with self._errors():
                self.target.parent.mkdir(parents=True, exist_ok=True)
                self._lock(held)
                flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
                self._descriptor = os.open(self.partial, flags, 0o666)
            held.callback(self._close)
            self._begin(origin, names, resume)
            yield self

    def lines(self, rows: Sequence[Row]) -> Lines:
        """Format rows for `append`, which another process may call."""
        failed = sum(row[-1] is not None for row in rows)
        return Lines(b"".join(map(self.format.line, rows)), len(rows), failed)

    def append(self, lines: Lines) -> None:
        """Append rows, and hand them to the operating system."""
        self._append(lines.text)
        self.failed += lines.failed

    def finish(self) -> None:
        """Complete the table: convert or rename the partial file."""
        with self._errors():
            flush_open(self._descriptor)
            self._close()  # Windows renames no open file
            self.format.finish(self.partial, self.target)
            self.origin_file.unlink(missing_ok=True)

    def discard(self) -> None:
        """Remove the partial file: none of its rows is of use."""
        self._close()
        for path in (self.partial, self.origin_file):
            path.unlink(missing_ok=True)

    def _lock(self, held: contextlib.ExitStack) -> None:
        try:
            held.enter_context(locked(self.partial.with_name(f"{self.partial.name}.lock")))
        except BlockingIOError:
            hint = "wait until it is done, or another --out"
            raise RunError("another process writes this file", where=self.path, hint=hint) from None

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _begin(self, origin: Mapping[str, object], names: Iterable[str], resume: bool) -> None:
        head, end = self.format.head(), 0
        if os.fstat(self._descriptor).st_size > len(head):
            self._check_origin(origin, resume)
            end = self._whole_batches(head, names)
        with self._errors():
            os.ftruncate(self._descriptor, end)
            os.lseek(self._descriptor, end, os.SEEK_SET)
            if not end:  # the origin before the rows: there are never rows of unknown origin
                write_text(self.origin_file, json.dumps(origin, indent=1) + "\n")
                self._append(head)

    def _check_origin(self, origin: Mapping[str, object], resume: bool) -> None:
        remove = f"rm '{self.partial}', or another --out"
        if not resume:
            why = f"{self.partial.name} has rows of an interrupted command"
            raise UsageError("an unfinished file", where=self.path, why=why, hint=f"--resume, or {remove}")
        try:
            before = bounded.read(self.origin_file, file_names=True)
        except (OSError, ValueError) as error:
            why = f"{self.origin_file.name} cannot be read: {error}"
            raise UsageError("cannot resume", where=self.path, why=why, hint=remove) from None
        if not isinstance(before, dict) or before != bounded.parse(json.dumps(origin), file_names=True):
            before = before if isinstance(before, dict) else {}
            others = [name for name in {**before, **origin} if before.get(name) != origin.get(name)]
            changes = (f"{name} {_short(before.get(name))} then, {_short(origin.get(name))} now" for name in others[:3])
            why = f"its rows have another origin: {'; '.join(changes)}"
            raise UsageError("cannot resume", where=self.path, why=why, hint=remove)

    def _whole_batches(self, head: bytes, names: Iterable[str]) -> int:
        """Count the rows of `names` in whole batches; return the offset of their end."""
        rows = failed = end = 0
        last = object()
        wanted = iter(names)
        with open(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            if file.read(len(head)) != head:
                return 0
            here = len(head)
            for line in file:
                name = next(wanted, last)
                row = self.format.read(line) if line.endswith(b"\n") else None
                if name is last or row is None or row[0] != self.format.path(str(name)):
                    break
                rows, failed, here = rows + 1, failed + row[1], here + len(line)
                if rows % self.batch == 0:
                    self.kept, self.failed, end = rows, failed, here
            else:
                if next(wanted, last) is last:  # complete, with a shorter last batch
                    self.kept, self.failed, end = rows, failed, here
        return end

    def _append(self, data: bytes) -> None:
        with self._errors():
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except WriteError:
            raise
        except OSError as error:
            raise refused(self.path, error, _RESUME) from error


def _short(value: object) -> str:
    text = "none" if value is None else str(value)
    return text if len(text) <= 24 else f"{text[:20]}…"
