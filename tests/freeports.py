"""Ports for processes that open them later."""

from __future__ import annotations

import random
import socket

FIRST, LAST = 20_000, 32_000
"""Below the ports that Linux gives to connections and to port 0, which may be taken before a process opens its own."""


def free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    draw = random.Random()  # of the system: tests that run at once must not draw the same
    while True:
        port = draw.randrange(FIRST, LAST)
        with socket.socket() as server:
            try:
                server.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
