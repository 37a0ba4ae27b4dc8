"""A journal: one line of JSON for each entry, on the disk before the entry counts.

A process that is killed leaves whole lines, and at most a part of the last one, which the next reader cuts off.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

from vitral import bounded
from vitral.errors import DataError
from vitral.filesystem import flush, flush_open, refused

MOST_BYTES = 1 << 30
_MOST_LINE_BYTES, _MOST_VALUES = 256 << 20, 20_000_000


class Journal:
    """Entries in a file, which exists from the first entry on."""

    def __init__(self, path: Path):
        self.path = path
        self._file: IO[bytes] | None = None
        self._size = 0
        """Bytes of whole lines."""

    def read(self) -> list[dict[str, Any]]:
        """Return all entries. Raises `DataError` for a line that is damaged, and if the file cannot be read."""
        try:
            if self.path.stat().st_size > MOST_BYTES:
                raise self.damaged(f"it has more than {MOST_BYTES:,} bytes")
            text = self.path.read_bytes()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self.damaged(error.strerror or str(error)) from error
        self._size = text.rfind(b"\n") + 1
        return [self._entry(line, i + 1) for i, line in enumerate(text[: self._size].split(b"\n")[:-1])]

    def _entry(self, line: bytes, number: int) -> dict[str, object]:
        try:
            entry = bounded.parse(line, most_bytes=_MOST_LINE_BYTES, most_values=_MOST_VALUES)
        except ValueError as error:
            raise self.damaged(f"line {number}: {error}") from error
        if not isinstance(entry, dict):
            raise self.damaged(f"line {number} is not an object")
        return entry

    def damaged(self, why: str) -> DataError:
        """Return the error of a journal that cannot be read."""
        hint = "rename it; the labels in the table remain, and undo begins anew"
        return DataError("the journal of this table cannot be read", where=self.path, why=why, hint=hint)

    def append(self, entries: Iterable[Mapping[str, object]]) -> None:
        """Write entries, all of them or none, and wait until the disk has them. Raises `WriteError`."""
        lines = b"".join(json.dumps(one, ensure_ascii=False).encode() + b"\n" for one in entries)
        try:
            file = self._opened()
            try:
                rest = memoryview(lines)
                while rest:
                    rest = rest[file.write(rest) :]
                flush_open(file.fileno())
            except OSError:
                file.truncate(self._size)
                raise
        except OSError as error:
            raise refused(self.path, error) from error
        self._size += len(lines)

    def _opened(self) -> IO[bytes]:
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - until close
            self._file.truncate(self._size)  # without the part of a line that a killed process left
            flush(self.path.parent)
        return self._file

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Remove the file, if it exists."""
        self.close()
        self.path.unlink(missing_ok=True)
