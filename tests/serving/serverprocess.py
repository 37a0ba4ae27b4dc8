"""A server in a process of its own, for tests that speak to it over HTTP."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx

from running import fork
from vitral.cli.main import main

PATIENCE = 60.0
"""Seconds for a server to start or to end on a busy machine."""


class ServerProcess:
    """A running server: `url`, `client`, and `log`, which grows.

    A fork: no time is lost to importing torch again. Its standard error is a pipe.
    """

    def __init__(self, work: Callable[[], int]):
        reading, writing = os.pipe()
        self.pid = fork(lambda: _with_log(work, writing))
        os.close(writing)
        self.code: int | None = None
        self.lines: list[str] = []
        self.url = ""
        self._started = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(reading,), daemon=True)
        self._reader.start()
        if not self._started.wait(PATIENCE) or not self.url:
            self.kill()
            raise AssertionError(f"the server did not start:\n{self.log}")
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, trust_env=False)

    def _read(self, descriptor: int) -> None:
        with open(descriptor, errors="replace") as lines:
            for line in lines:
                self.lines.append(line)
                if found := re.match(r"(?:Serving|Page)  +(http://\S+)", line):
                    self.url = found[1]
                    self._started.set()
        self._started.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def logged(self, text: str) -> bool:
        """True as soon as a line of the log holds `text`."""
        return eventually(lambda: any(text in line for line in list(self.lines)))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> bool:
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def wait(self, seconds: float = PATIENCE) -> int | None:
        """The exit code; None if it still runs after these seconds."""
        eventually(self.ended, seconds)
        if self.code is not None:
            self._reader.join(5)
        return self.code

    def kill(self) -> None:
        if not self.ended():
            self.signal(signal.SIGKILL)
            self.wait()

    def metric(self, name: str) -> float:
        """The value of a metric, with its labels as Prometheus writes them; 0 if it is not there."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        return 0.0


def _with_log(work: Callable[[], int], writing: int) -> int:
    """Run `work` with the pipe as its standard error."""
    os.dup2(writing, 2)
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - it lives as long as the process
    warnings.resetwarnings()
    return work()


@contextmanager
def serving(*words: str) -> Iterator[ServerProcess]:
    """Run `vitral serve` with these words on a free port; it is killed at the end if it still runs."""
    with running(lambda: main(["serve", *words, "--port", "0"])) as server:
        yield server


@contextmanager
def running(work: Callable[[], int]) -> Iterator[ServerProcess]:
    """Run a function that serves in a process of its own."""
    server = ServerProcess(work)
    try:
        yield server
    finally:
        server.client.close()
        server.kill()


def eventually(true: Callable[[], bool], seconds: float = 20) -> bool:
    """Ask until the answer is true, for some seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.02)
    return true()
