"""Accept connections on one socket in several processes, so that each has its share.

Linux wakes the same one of several processes that wait for a connection again and again: with few clients, which keep
their connections, it would have all of them and the others none.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket
from collections.abc import Callable

from vitral.serving.logs import log

_OTHERS = 0.01
"""Seconds that a worker with more connections than another leaves a new one to that."""
_EXHAUSTED = 1.0
"""Seconds to wait where the system has no descriptors or memory left."""
_ABSENT = -1


class Shares:
    """The number of connections of each worker, in memory that forks share."""

    def __init__(self, workers: int):
        self._numbers = memoryview(mmap.mmap(-1, 4 * workers)).cast("i")
        for index in range(workers):
            self.remove(index)

    def remove(self, index: int) -> None:
        """Leave out a worker that has ended, until it counts again."""
        self._numbers[index] = _ABSENT

    def count(self, index: int, connections: int) -> None:
        """Note the connections of a worker, which answers."""
        self._numbers[index] = connections

    def is_ahead(self, index: int) -> bool:
        """True if another worker has fewer connections than this one."""
        return self._numbers[index] > min(number for number in self._numbers if number != _ABSENT)


class Acceptor:
    """Accepts connections in the running event loop, in a process that shares the socket with others."""

    def __init__(self, bound: socket.socket, connect: Callable[[], asyncio.Protocol], ahead: Callable[[], bool]):
        """`connect` makes the protocol of a connection. `ahead` is asked before each: if it is true, other processes
        have some milliseconds to accept it.
        """
        self.bound, self.connect, self.ahead = bound, connect, ahead
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[object]] = set()
        bound.setblocking(False)
        self._watch()

    def close(self) -> None:
        """Accept no more."""
        self._loop.remove_reader(self.bound)
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        self._loop.add_reader(self.bound, self._arrived)

    def _arrived(self) -> None:
        if self.ahead():
            self._pause(_OTHERS)
        else:
            self._accept()

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self.bound)
        self._timer = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._watch()
        self._accept()  # nobody else did

    def _accept(self) -> None:
        try:
            connection, _ = self.bound.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):  # another process has it, or it is gone
            return
        except OSError as error:
            log("cannot accept connections", logging.ERROR, why=error.strerror)
            self._pause(_EXHAUSTED)
            return
        connection.setblocking(False)
        task = self._loop.create_task(self._loop.connect_accepted_socket(self.connect, connection))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
