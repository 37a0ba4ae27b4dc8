"""Handle the signals that ask a run to save and stop."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

STOPS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name))
"""Signals that ask a run to save and stop: Ctrl-C, the end of a job, a closed terminal, a scheduler's warning."""


Handler = Callable[[int, FrameType | None], object]


@contextmanager
def stop_requested(tell: Callable[[], None] = lambda: None) -> Iterator[threading.Event]:
    """Yield an event that each of `STOPS` sets, so that the current step finishes before the run stops.

    The first signal calls `tell`; the second one raises `KeyboardInterrupt` immediately.
    """
    event = threading.Event()

    def request() -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        tell()

    with _on_stop(request):
        yield event


@contextmanager
def stop_raises() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for each of `STOPS`, not only for Ctrl-C."""

    def stop() -> None:
        raise KeyboardInterrupt

    with _on_stop(stop):
        yield


@contextmanager
def no_stops() -> Iterator[None]:
    """Ignore `STOPS`."""
    with _on_stop(lambda: None):
        yield


@contextmanager
def _on_stop(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on `STOPS`; an ignored hang-up stays ignored, as under nohup."""

    def handler(number: int, frame: object) -> None:
        if number not in (signal.SIGINT, signal.SIGTERM):
            leave_terminal()
        act()

    handled = [n for n in STOPS if n in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(n) is not signal.SIG_IGN]
    with handling(dict.fromkeys(handled, handler)):
        yield


@contextmanager
def handling(handlers: Mapping[int, Handler]) -> Iterator[None]:
    """Handle signals by number, and restore their handlers at the end. No other than the main thread can set any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def leave_terminal() -> None:
    """Discard further output if the terminal is gone, so that a failing print does not keep the run from saving."""
    try:
        import termios
    except ImportError:  # Windows
        return
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, descriptor)
                os.close(nothing)
