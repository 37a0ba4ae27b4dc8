"""Several processes on one listening socket, and the supervisor that starts, watches, replaces and ends them.

Workers are forks of a process that has imported everything and computed nothing: a new one answers as soon as it has
loaded its models. A connection in the queue of the socket belongs to no worker, so the end of one loses only what it
had accepted.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from vitral import bounded
from vitral.console import printable
from vitral.data.lazy_torchvision import torchvision
from vitral.errors import UsageError, VitralError
from vitral.serving.accepting import Shares
from vitral.serving.logs import log
from vitral.serving.metrics import Part, forget_gauges
from vitral.stopping import handling

SILENT = 30.0
"""Seconds without a sign of a worker's event loop, after which it is replaced."""
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
_ENDING = {signal.SIGTERM, signal.SIGINT}
_READY, _BEAT, _ERROR = b"r", b".", b"e"  # on the pipe from a worker; the error is JSON up to the end
_STEADY = 10.0  # seconds after which a worker that ends is replaced at once
_SLOWEST = 30.0  # seconds between starts of a worker that ends again and again


@dataclass(frozen=True)
class Seat:
    """One worker's side of what it shares with the supervisor: a pipe, and the numbers of connections."""

    part: Part
    writing: int
    shares: Shares

    def ready(self) -> None:
        """Report that requests are answered."""
        self._write(_READY)

    def beat(self) -> None:
        """Report that the event loop runs. A worker whose supervisor is gone drains."""
        self._write(_BEAT)

    def _write(self, message: bytes) -> None:
        try:
            os.write(self.writing, message)
        except BlockingIOError:  # nobody reads for now
            pass
        except BrokenPipeError:
            os.kill(os.getpid(), signal.SIGTERM)


Work = Callable[[Seat], int]
"""Serve until a signal ends it, and return the exit code: the life of a worker."""


@dataclass
class _Worker:
    index: int
    pid: int
    reading: int
    began: float
    heard: float
    ready: bool = False
    output: bytes = b""
    """Bytes from the pipe, without beats."""


def supervise(
    bound: socket.socket, count: int, work: Work, *, grace: float, started: Callable[[], None] = lambda: None
) -> int:
    """Run `count` workers until a signal ends them: SIGTERM or Ctrl-C drain, SIGHUP is passed on.

    `started` is called once all of them answer. Returns 0 after SIGTERM, 130 after Ctrl-C. Raises `VitralError` if a
    worker ends before all of them have answered; later, one that ends is replaced.
    """
    if not hasattr(os, "fork"):
        raise UsageError("this system has no workers", why="they need fork", hint="--workers 1, several times")
    torchvision()  # every worker needs it
    with tempfile.TemporaryDirectory(prefix="vitral-metrics-") as folder:
        return _Supervisor(bound, count, work, grace, started, Path(folder)).run()


class _Supervisor:
    def __init__(
        self, bound: socket.socket, count: int, work: Work, grace: float, started: Callable[[], None], folder: Path
    ):
        self.bound, self.count, self.work, self.grace, self.started = bound, count, work, grace, started
        self.folder, self.shares = folder, Shares(count)
        self.workers: dict[int, _Worker] = {}
        self.due = dict.fromkeys(range(count), 0.0)
        """Workers to start → time."""
        self.failures = dict.fromkeys(range(count), 0)
        self.all_answered = False
        self.received: list[int] = []
        """Signals, which the loop handles."""

    def run(self) -> int:
        with handling(dict.fromkeys(_SIGNALS, self._note)):
            try:
                while not _ENDING.intersection(self.received):
                    self._start_due()
                    self._listen()
                    self._reap()
                    self._pass_on_hangup()
                return self._end()
            finally:
                for worker in self.workers.values():  # after an error; else there is none
                    os.kill(worker.pid, signal.SIGKILL)
                    os.waitpid(worker.pid, 0)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def _start_due(self) -> None:
        now = time.monotonic()
        for index in [index for index, due in self.due.items() if due <= now]:
            del self.due[index]
            self._start(index)

    def _start(self, index: int) -> None:
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # none may meet the supervisor's handlers in the worker
        pid = os.fork()
        if pid == 0:
            self._become(Seat(Part(index, self.count, self.folder), writing, self.shares), reading)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        os.close(writing)
        now = time.monotonic()
        self.workers[index] = _Worker(index, pid, reading, now, now)

    def _become(self, seat: Seat, reading: int) -> None:
        """Work, in the new process, to its end."""
        code = 1
        try:
            for descriptor in (reading, *(worker.reading for worker in self.workers.values())):
                os.close(descriptor)
            for number in _SIGNALS:  # until it serves: SIGTERM ends it, the others wait for the supervisor
                signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            code = self.work(seat)
        except VitralError as error:
            names = ("what", "where", "why", "hint")
            parts = {name: printable(str(value)) for name in names if (value := getattr(error, name))}
            with suppress(OSError):
                os.write(seat.writing, _ERROR + json.dumps(parts).encode()[:4000])
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _listen(self, seconds: float = 0.1) -> None:
        """Read what workers report, for at most these seconds."""
        by_pipe = {worker.reading: worker for worker in self.workers.values()}
        for reading in select.select(list(by_pipe), [], [], seconds)[0]:
            worker, data = by_pipe[reading], os.read(reading, 1 << 16)
            worker.heard = time.monotonic()
            worker.output += data.replace(_BEAT, b"") if worker.ready else data
            if not worker.ready and _READY in data and not worker.output.startswith(_ERROR):
                worker.ready, worker.output = True, b""
                log("a worker answers", worker=worker.index, pid=worker.pid)
            if not data:  # it is ending
                time.sleep(0.01)
        if not self.all_answered and len(self.workers) == self.count and all(w.ready for w in self.workers.values()):
            self.all_answered = True
            self.started()

    def _reap(self) -> None:
        """Note workers that have ended, and end those that are stuck."""
        now = time.monotonic()
        for worker in list(self.workers.values()):
            if worker.ready and now - worker.heard > SILENT:
                log("a worker is stuck", logging.ERROR, worker=worker.index, pid=worker.pid)
                os.kill(worker.pid, signal.SIGKILL)
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                self._ended(worker, os.waitstatus_to_exitcode(status))

    def _ended(self, worker: _Worker, code: int) -> None:
        error = _error(worker, code)
        os.close(worker.reading)
        del self.workers[worker.index]
        forget_gauges(self.folder, worker.index)
        self.shares.remove(worker.index)
        if _ENDING.intersection(self.received):
            return
        if not self.all_answered:
            raise error
        now = time.monotonic()
        steady = worker.ready and now - worker.began > _STEADY
        self.failures[worker.index] = 0 if steady else self.failures[worker.index] + 1
        wait = min(_SLOWEST, 0.5 * 2 ** (self.failures[worker.index] - 2)) if self.failures[worker.index] > 1 else 0.0
        why = " ".join(str(error).split())
        log("a worker ended", logging.ERROR, worker=worker.index, pid=worker.pid, why=why, again_in=wait)
        self.due[worker.index] = now + wait

    def _pass_on_hangup(self) -> None:
        if (hangup := getattr(signal, "SIGHUP", None)) in self.received:
            self.received.remove(hangup)
            self._send(hangup, ready=True)

    def _send(self, number: int, *, ready: bool = False) -> None:
        for worker in self.workers.values():
            if worker.ready or not ready:
                os.kill(worker.pid, number)  # not reaped, so it is no other process

    def _end(self) -> int:
        """Drain all workers, at most for `grace` seconds; a second Ctrl-C ends them at once."""
        self.bound.close()
        self._send(signal.SIGTERM)
        end = time.monotonic() + self.grace + 1
        while self.workers and time.monotonic() < end and self.received.count(signal.SIGINT) < 2:
            self._listen()
            self._reap()
        return 130 if signal.SIGINT in self.received else 0


def _error(worker: _Worker, code: int) -> VitralError:
    """The reason that a worker gave before it ended, else its exit code."""
    os.set_blocking(worker.reading, False)
    with suppress(BlockingIOError):
        worker.output += os.read(worker.reading, 1 << 16)
    _, failed, text = worker.output.partition(_ERROR + b"{")
    if failed:
        with suppress(ValueError):
            return VitralError(**bounded.parse(b"{" + text))
    ended = f"signal {-code}" if code < 0 else f"exit code {code}"
    return VitralError("a worker ended", why=ended, hint="its log is above")
