"""Run a service under uvicorn: one process, its socket, its signals.

SIGTERM and Ctrl-C drain: readiness goes, requests are answered with `Connection: close`, then the listener closes, and
the process ends when nothing is in flight, at the latest after `grace` seconds. SIGHUP reloads.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from vitral.errors import VitralError
from vitral.serving.guard import Guarded
from vitral.serving.logs import log
from vitral.serving.protocol import Bounded
from vitral.stopping import Handler, handling

BACKLOG = 2048
"""Connections that wait to be accepted."""

_SWITCH = 0.0005
"""Seconds for which a thread keeps Python's lock while others ask for it."""

_LATE = 0.25
"""Seconds for requests of connections that were accepted before the listener closed."""


def bind(host: str, port: int, options: str = "--host or --port") -> socket.socket:
    """A bound socket, which does not listen yet; `VitralError` if the system refuses, which names the `options`."""
    found = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)  # asyncio sends without delay where the protocol is TCP by number
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        if found is not None:
            found.close()
        raise _refused(f"{host}:{port}", error, options) from error
    return found


def _refused(where: str, error: OSError, options: str) -> VitralError:
    hint = f"choose another {options}; with port 0, the system chooses a free one"
    return VitralError("cannot listen", where=where, why=error.strerror, hint=hint)


def address(bound: socket.socket) -> str:
    """The URL of a bound socket."""
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Served(Guarded, Protocol):
    """The part of a service that the server uses."""

    ended: bool
    """True once it ends by itself."""

    def drain(self) -> None:
        """Prepare to end; requests are still answered."""

    def hang_up(self) -> None:
        """Do what SIGHUP asks for."""


def serve_on(
    bound: socket.socket, service: Served, app: ASGIApp, *, grace: float, started: Callable[[], None] = lambda: None
) -> int:
    """Serve the application of a service until a signal or the service ends it; return 130 after Ctrl-C, otherwise 0.
    `started` is called once it listens.
    """
    config = uvicorn.Config(
        app,
        http=Bounded,
        loop="asyncio",
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=30,
        h11_max_incomplete_event_size=service.limits.headers,
        backlog=BACKLOG,
    )
    server = _Server(config, service, grace, started)
    try:
        bound.listen(BACKLOG)
    except OSError as error:  # another process bound the port, too, and was first
        raise _refused(address(bound), error, "--host or --port") from error
    with _for_serving():
        server.run([bound])
    code = 130 if server.interrupted else 0
    if _threads_remain():  # one computes an abandoned request, and Python would wait for it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


@contextmanager
def _for_serving() -> Iterator[None]:
    """Settings of the interpreter for threads that compute beside an event loop.

    A full collection of garbage walks through all objects of torch and stops every thread for a quarter of a second,
    every few thousand requests: what is there before the first request is left out. A thread that computes asks for
    Python's lock at every operation, and a busy loop would keep it for 5 ms each time.
    """
    gc.collect()
    gc.freeze()
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
        gc.unfreeze()


def _threads_remain(seconds: float = 0.5) -> bool:
    """True if threads of the service are still at work after these seconds."""
    end = time.monotonic() + seconds
    own = [one for one in threading.enumerate() if one.name.startswith("vitral-")]
    for one in own:
        one.join(max(0.0, end - time.monotonic()))
    return any(one.is_alive() for one in own)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Served, grace: float, on_start: Callable[[], None]):
        super().__init__(config)
        self.service, self.grace, self.on_start = service, grace, on_start
        self.interrupted = False
        self._hangup = False
        self._asked_at: float | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGTERM, SIGINT and SIGHUP; uvicorn would raise them once more at the end."""
        handlers: dict[int, Handler] = {signal.SIGTERM: self.handle_exit, signal.SIGINT: self.handle_exit}
        if hasattr(signal, "SIGHUP"):
            handlers[signal.SIGHUP] = self._on_hangup
        with handling(handlers):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; Ctrl-C for the second time ends at once."""
        self.force_exit = self.interrupted and sig == signal.SIGINT
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self.should_exit = True

    def _on_hangup(self, sig: int, frame: FrameType | None) -> None:
        self._hangup = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then report it."""
        await super().startup(sockets)
        self.on_start()

    async def on_tick(self, counter: int) -> bool:
        """Handle signals, ten times a second. After a signal to end, keep answering without readiness for a while, so
        that a load balancer can send requests elsewhere.
        """
        stop = await super().on_tick(counter)
        if self._hangup:
            self._hangup = False
            self.service.hang_up()
        self.should_exit = stop = stop or self.service.ended
        if stop and self._asked_at is None:
            self._asked_at = time.monotonic()
            self.service.drain()
            log("draining", grace=self.grace)
        settled = self._asked_at is not None and time.monotonic() >= self._asked_at + min(1.0, self.grace / 5)
        return self.force_exit or settled

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener, answer what was accepted, end."""
        for server in self.servers:
            server.close()
        await asyncio.sleep(0 if self.force_exit else _LATE)
        left = self.grace - (time.monotonic() - (self._asked_at or time.monotonic())) - 0.5
        self.config.timeout_graceful_shutdown = max(0.1, left)  # type: ignore[assignment]  # asyncio takes a float
        await super().shutdown(sockets)
        log("ended")
