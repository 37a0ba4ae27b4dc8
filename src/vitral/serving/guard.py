"""The middleware around every request: id, access, security headers, problems, metrics, a line in the log."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitral.serving.auth import Access
from vitral.serving.limits import Limits
from vitral.serving.logs import LOGGER, log, request_id
from vitral.serving.metrics import Metrics
from vitral.serving.problems import Problem
from vitral.web import EXAMPLE, SERVER

OPEN = frozenset(
    ("/", f"/{EXAMPLE}", *(f"/{path}" for path in SERVER), "/docs", "/openapi.json", "/healthz", "/readyz")
)
"""Paths that need no token: they hold nothing of the models."""

SECURITY = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
"""Headers of every answer that does not set its own."""

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH")
_LEFTOVER, _LEFTOVER_SECONDS, _IDLE_SECONDS = 64 << 20, 10.0, 1.0  # of a refused body
_CLIENT_LEFT = 499  # nginx's number for a client that closed its connection


@dataclass
class _Exchange:
    """One request, and what was answered so far."""

    route: str
    method: str
    id: str
    began: float = field(default_factory=time.perf_counter)
    status: int = 0
    received: bool = False
    """The whole body was read."""
    close: bool = False
    """The connection ends with the answer."""
    recorded: bool = False


class Guarded(Protocol):
    """The part of a service that the guard uses."""

    access: Access
    limits: Limits
    metrics: Metrics
    draining: bool
    """True once it ends: connections close with their answer."""


class Guard:
    """ASGI middleware; `routes` are the paths that exist, the only ones that become labels of metrics, and `without`
    those that need no token.
    """

    def __init__(self, app: ASGIApp, service: Guarded, routes: frozenset[str], without: frozenset[str] = OPEN):
        self.app, self.service, self.routes, self.without = app, service, routes, without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        path = _below_root(scope)
        path = path if path in self.routes else "other"
        method = scope["method"] if scope["method"] in _METHODS else "other"
        exchange = _Exchange(path, method, given if _ID.fullmatch(given) else secrets.token_hex(8))
        token = request_id.set(exchange.id)
        self.service.metrics.in_flight.inc()
        try:
            await self._answer(scope, receive, send, exchange)
        finally:
            if not exchange.recorded:  # no answer, or a part of one
                self._record(scope, exchange)
            request_id.reset(token)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, exchange: _Exchange) -> None:
        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                self._add_headers(MutableHeaders(scope=message), exchange)
            elif not message.get("more_body", False):  # before the client has it: no answer that arrived is uncounted
                self._record(scope, exchange)
            await send(message)

        async def receive_guarded() -> Message:
            message = await receive()
            exchange.received = exchange.received or not message.get("more_body", False)
            return message

        headers = Headers(scope=scope)
        try:
            self._check_size(headers)
            self._check_access(headers, exchange.route)
            await self.app(scope, receive_guarded, send_guarded)
        except ClientDisconnect:
            exchange.status = _CLIENT_LEFT
        except Exception as error:
            problem = error if isinstance(error, Problem) else _unexpected(error)
            self.service.metrics.problems.labels(problem.name).inc()
            if exchange.status:  # the answer has begun: it cannot be taken back
                raise
            if not exchange.received and "expect" not in headers:
                await _throw_away(receive_guarded, exchange)
            exchange.close = not exchange.received
            await problem.response(exchange.id)(scope, receive, send_guarded)

    def _check_size(self, headers: Headers) -> None:
        """Refuse a header above the limit also if it came in one piece, of which the parser of HTTP counts nothing."""
        if sum(len(name) + len(value) for name, value in headers.raw) > self.service.limits.headers:
            raise Problem("headers-too-large", "the header is longer than the server reads")

    def _check_access(self, headers: Headers, route: str) -> None:
        access = self.service.access
        access.check_host(headers)
        if route not in self.without:
            access.check_site(headers)
            access.check_token(headers)

    def _add_headers(self, headers: MutableHeaders, exchange: _Exchange) -> None:
        for name, value in SECURITY.items():
            headers.setdefault(name, value)
        headers["X-Request-ID"] = exchange.id
        if self.service.draining or exchange.close:
            headers["Connection"] = "close"

    def _record(self, scope: Scope, exchange: _Exchange) -> None:
        exchange.recorded = True
        metrics, seconds = self.service.metrics, time.perf_counter() - exchange.began
        metrics.in_flight.dec()
        if exchange.status == _CLIENT_LEFT:
            metrics.abandoned.inc()
        metrics.requests.labels(exchange.route, exchange.method, str(exchange.status)).inc()
        metrics.seconds.labels(exchange.route).observe(seconds)
        quiet = exchange.route in ("/healthz", "/readyz", "/metrics") and exchange.status < 400
        client = (scope.get("client") or ("", 0))[0]
        log(
            f"{exchange.method} {exchange.route} {exchange.status}",
            logging.DEBUG if quiet else logging.INFO,
            ms=round(1000 * seconds, 1),
            client=client,
        )


def _below_root(scope: Scope) -> str:
    """Path of a request without the prefix that the application is mounted under, by `Mount` or `--root-path`."""
    path, root = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


async def _throw_away(receive: Receive, exchange: _Exchange) -> None:
    """Read the rest of a refused body, within bounds: a connection that is closed while its client still sends is
    reset, and the client never reads why.
    """
    size = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(_LEFTOVER_SECONDS):
            while not exchange.received and size < _LEFTOVER:
                size += len((await asyncio.wait_for(receive(), _IDLE_SECONDS)).get("body", b""))


def _unexpected(error: Exception) -> Problem:
    """The problem of a failure that is not the client's; its stack is logged and not sent."""
    LOGGER.error("a request failed", exc_info=error)
    return Problem("internal", "an unexpected error; it is in the log of the server")
