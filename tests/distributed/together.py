"""Real processes as ranks: forks of the test's process, so that torch is not imported again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch._dynamo  # noqa: F401 - DistributedDataParallel imports it, for seconds in each rank that has not

from freeports import free_port
from running import fork


def start(count: int, work: Callable[[], int], environment: Mapping[str, str] | None = None) -> list[int]:
    """Start `count` ranks that each run `work`; return their process ids."""
    port = free_port()

    def ranked(rank: int) -> int:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
            **(environment or {}),
        }
        return work()

    return [fork(partial(ranked, rank)) for rank in range(count)]


def codes(processes: list[int], seconds: float = 120) -> list[int]:
    """Wait for ranks and return their exit codes, minus the signal that ended one."""
    ended: dict[int, int] = {}
    deadline = time.monotonic() + seconds
    while len(ended) < len(processes):
        for process in set(processes) - set(ended):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                ended[process] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for process in set(processes) - set(ended):
                os.kill(process, 9)
                os.waitpid(process, 0)
            pytest.fail(f"only {len(ended)} of {len(processes)} ranks ended within {seconds:g} s")
        time.sleep(0.02)
    return [ended[process] for process in processes]


def on_ranks(count: int, work: Callable[[], int], environment: Mapping[str, str] | None = None) -> list[int]:
    """Run `work` on `count` ranks; return their exit codes."""
    return codes(start(count, work, environment))


def wait_for(path: Path, seconds: float = 60) -> None:
    """Wait until a file exists."""
    deadline = time.monotonic() + seconds
    while not path.is_file():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)
