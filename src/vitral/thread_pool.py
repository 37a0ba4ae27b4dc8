"""Thread pools for generators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

PATIENCE = 60.0
"""Seconds that the end of a pool waits for a task that runs."""


class _Pool(ThreadPoolExecutor):
    """A pool that knows its unfinished tasks."""

    def __init__(self, threads: int):
        super().__init__(threads)
        self.unfinished: set[Future[object]] = set()

    def submit(self, task: Callable[..., object], /, *args: object, **options: object) -> Future[Any]:
        future = super().submit(task, *args, **options)
        self.unfinished.add(future)
        future.add_done_callback(self.unfinished.discard)
        return future


@contextmanager
def pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A pool of threads that ends with the block: pending tasks are dropped, and running ones are waited for.

    Trap: the garbage collector closes a generator that nobody finished, in any thread and at any place, also within
    threading's own bookkeeping. To join a thread there waits forever for a lock that the same thread holds; to wait for
    a task does not.
    """
    executor = _Pool(threads)
    try:
        yield executor
    finally:
        executor.shutdown(wait=False, cancel_futures=True)
        wait(tuple(executor.unfinished), timeout=PATIENCE)
