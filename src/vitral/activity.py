"""The line that says what a command is doing until it prints: half a second after it began.

On a terminal it vanishes when something is printed. Elsewhere (a log, a pipe) each text becomes a line that stays.

    begin("vitral train")        by the command line, for a command
    tell("reading the images")   by whatever takes long
    end()                        by whatever prints; the next `tell` shows the line again

Nothing is shown without `begin`: a library says nothing.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

_DELAY = 0.5
"""Seconds after which a line is worth its flicker."""


class _Line:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.enabled = self.drawn = False
        self.text = ""
        self.timer: threading.Timer | None = None
        self.spinner: Spinner | None = None
        self.live: Live | None = None

    def show(self) -> None:
        if not self.drawn:
            with self.lock:
                if self.timer:
                    self.timer = None  # the next text has a line of its own
                    print(self.text, file=sys.stderr, flush=True)
            return
        from rich.console import Console
        from rich.live import Live
        from rich.spinner import Spinner

        with self.lock:
            if not self.timer:  # ended while this thread waited
                return
            console = Console(stderr=True, markup=False, emoji=False)
            self.spinner = Spinner("dots", self.text)
            self.live = Live(
                self.spinner,
                console=console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,  # results may go to a pipe meanwhile
            )
            self.live.start()


_LINE = _Line()


def begin(text: str, *, logged: bool = False) -> None:
    """Show what a command does, if standard error is a terminal or the command is `logged` elsewhere, too."""
    _LINE.drawn = bool(sys.stderr and sys.stderr.isatty())
    _LINE.enabled = _LINE.drawn or logged
    tell(text)


def tell(text: str, *, passing: bool = False) -> None:
    """Replace the text of the line; it appears if it is not there. One that is `passing` is not for a log."""
    if passing and not _LINE.drawn:
        return
    with _LINE.lock:
        _LINE.text = text
        if _LINE.live and _LINE.spinner:
            _LINE.spinner.update(text=text)
        elif _LINE.enabled and not _LINE.timer:
            _LINE.timer = threading.Timer(_DELAY, _LINE.show)
            _LINE.timer.daemon = True
            try:
                _LINE.timer.start()
            except RuntimeError:  # no memory for a thread: the command says why, not this line
                _LINE.timer, _LINE.enabled = None, False


def end() -> None:
    """Remove the line, before something is printed."""
    with _LINE.lock:
        if _LINE.timer:
            _LINE.timer.cancel()
            _LINE.timer = None
        if _LINE.live:
            _LINE.live.stop()
            _LINE.live = None


def close() -> None:
    """End for good: the command is done."""
    end()
    _LINE.enabled = False
