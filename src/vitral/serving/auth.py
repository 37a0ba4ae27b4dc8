"""Access by bearer tokens, hosts, and sites, and the addresses that may be bound without a token."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from starlette.datastructures import Headers

from vitral.errors import UsageError
from vitral.serving.problems import Problem

VARIABLE = "VITRAL_TOKEN"
"""The environment variable that holds a token."""

_SHORTEST = 16
_MOST_BYTES = 64 << 10
_LOCAL = ("localhost", "127.0.0.1", "::1")


class Access:
    """The checks of a request before it is read.

    With `local`, and with `only_local` also where there are tokens, only hosts of this machine are answered: a page of
    another site could otherwise reach the server through a name that it lets point here.
    """

    def __init__(self, tokens: Sequence[str] = (), *, local: bool = False, only_local: bool = False):
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]
        self.local = only_local or (local and not tokens)

    @property
    def needs_token(self) -> bool:
        """True if requests to models must carry a token."""
        return bool(self._digests)

    def check_host(self, headers: Headers) -> None:
        """Refuse a host that is not of this machine, where only those are answered."""
        if self.local and _host(headers.get("host", "")) not in _LOCAL:
            raise Problem("host-not-allowed", "it answers for localhost and 127.0.0.1 only")

    def check_site(self, headers: Headers) -> None:
        """Refuse what a browser sends on behalf of another site."""
        if headers.get("sec-fetch-site") in ("cross-site", "same-site"):
            raise Problem("cross-site", "a page of another site may not use this server")

    def check_token(self, headers: Headers) -> None:
        """Refuse a request without a valid token. Digests are compared, each one, in constant time."""
        if not self._digests:
            return
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        same = [hmac.compare_digest(given, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(same):
            why = "the token is not valid" if token else "the request has no token"
            raise Problem("unauthorized", why, headers={"WWW-Authenticate": "Bearer"})


def _host(header: str) -> str:
    """The name in a Host header, without the port."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.rpartition(":")[0].lower() if ":" in header else header.lower()


def read_tokens(file: str | Path | None, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Read tokens from a file, one per line, and from `VITRAL_TOKEN`, which may end with a line break; lines that begin
    with # are comments.
    """
    tokens = [environment[VARIABLE].strip()] if environment.get(VARIABLE) else []
    if file is not None:
        try:
            with open(file, "rb") as opened:
                text = opened.read(_MOST_BYTES).decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise UsageError("the token file cannot be read", where=file, why=why) from error
        lines = [line.strip() for line in text.splitlines()]
        tokens += [line for line in lines if line and not line.startswith("#")]
        if not tokens:
            raise UsageError("the token file holds no token", where=file, hint="openssl rand -hex 32 > FILE")
    if any(len(token) < _SHORTEST or not token.isascii() or token.split() != [token] for token in tokens):
        why = f"at least {_SHORTEST} ASCII characters without spaces"
        raise UsageError("a token is too short or has other characters", why=why, hint="openssl rand -hex 32")
    return tuple(tokens)


def is_loopback(host: str) -> bool:
    """True for an address that other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def check_binding(host: str, tokens: Sequence[str], *, no_auth: bool) -> None:
    """Refuse an address that other machines reach, unless there is a token, or `no_auth` allows its absence."""
    if tokens and no_auth:
        raise UsageError("--no-auth contradicts the token", why=f"a token file or {VARIABLE} is set")
    if not tokens and not no_auth and not is_loopback(host):
        why = "every machine that reaches this address could use the models"
        hint = f"--token-file FILE, or {VARIABLE}=…; without authentication: --no-auth"
        raise UsageError("serving to other machines needs a token", where=host, why=why, hint=hint)
