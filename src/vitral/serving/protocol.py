"""HTTP/1.1 as uvicorn speaks it, with bounds on connections and on what comes before a request is whole."""

from __future__ import annotations

import asyncio
import json
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vitral.serving.guard import SECURITY
from vitral.serving.problems import Problem

HEADER_SECONDS = 10.0
"""Time for a request's header to arrive."""

MOST_CONNECTIONS = 1024
"""Connections at a time; more are closed at once."""


class _Gathered(asyncio.Transport):
    """A transport that sends together what is written within one turn of the loop. uvicorn writes the header of an
    answer and its body one after the other. Without this class, each write would be a system call and wake the client.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop):
        super().__init__()
        self._transport, self._loop = transport, loop
        self._written: list[bytes] = []

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        if not self._written:
            self._loop.call_soon(self._send)
        self._written.append(bytes(data))

    def _send(self) -> None:
        written, self._written = self._written, []
        if written:
            self._transport.write(b"".join(written))

    def close(self) -> None:
        self._send()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: object = None) -> object:
        return self._transport.get_extra_info(name, default)


class Bounded(H11Protocol):
    """Closes connections beyond their number, and those whose header does not come to its end."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(_Gathered(transport, self.loop))
        if len(self.connections) > MOST_CONNECTIONS:
            self.transport.close()
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._arm()
        else:
            self._disarm()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP, or has too large a header, with a problem; then close."""
        error = sys.exc_info()[1]
        too_large = isinstance(error, h11.RemoteProtocolError) and error.error_status_hint == 431
        detail = "the header is longer than the server reads" if too_large else "this is not HTTP/1.1"
        problem = Problem("headers-too-large" if too_large else "bad-request", detail)
        body = json.dumps(problem.to_json("")).encode()
        headers = [(name.lower().encode(), value.encode()) for name, value in SECURITY.items()]
        headers += [
            (b"content-type", b"application/problem+json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        for event in (
            h11.Response(status_code=problem.kind.status, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _arm(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._give_up)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()
