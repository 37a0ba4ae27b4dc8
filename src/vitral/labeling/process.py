"""A command of vitral in a process of its own, with what it printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from vitral.wording import shown

PROGRAM = (sys.executable, "-m", "vitral")
"""The command: this Python's vitral."""
_MOST_ERROR = 4000  # bytes at the end of the standard error in which its last error stands
_PATIENCE = 60.0  # seconds that a process has to end after the signal of Ctrl-C


class Process:
    """`program` with `words`, running since it was made. Call `end` at last."""

    def __init__(self, program: Sequence[str], words: Sequence[str]):
        self.interrupted = False
        self._out, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115 - until `end`
        self._process = subprocess.Popen(
            [*program, *words], stdin=subprocess.DEVNULL, stdout=self._out, stderr=self._errors
        )

    @property
    def code(self) -> int | None:
        """The exit code; None while the process runs."""
        return self._process.poll()

    def interrupt(self) -> None:
        """Send the signal of Ctrl-C, unless the process has ended."""
        if self.code is None:
            self.interrupted = True
            self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Interrupt the process, wait until it has ended, and forget what it printed."""
        self.interrupt()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()
        self._errors.close()

    def printed(self) -> bytes:
        """Return the standard output so far."""
        self._out.seek(0)
        return self._out.read()

    def error(self) -> str:
        """Return the last error on the standard error with its hint, otherwise the last line, in one line."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - _MOST_ERROR))
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        places = [i for i, line in enumerate(lines) if line.startswith("error: ")]
        first = places[-1] if places else max(0, len(lines) - 1)
        return shown(" ".join(line.strip() for line in lines[first:]))
