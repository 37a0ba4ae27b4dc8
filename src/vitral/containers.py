"""Limits of this process on its machine: cores and memory, also those of its container (Linux)."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
"""Lists the control groups of this process: "0::/path" in version 2, "4:cpu,cpuacct:/path" in version 1."""


def cores() -> int:
    """Return the number of CPU cores that this process may use: its affinity, or less by a quota, rounded up."""
    return min([_affinity(), *(max(1, math.ceil(quota)) for quota in _quotas())])


def memory_limit() -> int | None:
    """Return the memory limit of the container in bytes; None without one."""
    limits = []
    for file in (*_files("", "memory.max"), *_files("memory", "memory.limit_in_bytes")):
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            limits.append(int(file.read_text("utf-8")))
    return min(limits, default=None)


def limit_threads() -> None:
    """Compute with as many threads as there are `cores`, if the user did not choose a number: torch knows no quota."""
    if cores() == _affinity() or not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}.isdisjoint(os.environ):
        return
    if "torch" not in sys.modules:  # it reads the variable when it is imported
        os.environ["OMP_NUM_THREADS"] = str(cores())
        return
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), cores()))


def _affinity() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quotas() -> Iterator[float]:
    """Yield the CPUs that each quota above this process allows, such as 1.5 of `docker run --cpus 1.5`."""
    for file in _files("", "cpu.max"):
        with contextlib.suppress(OSError, ValueError):  # "max 100000" means no limit
            quota, period = map(int, file.read_text("utf-8").split())
            yield quota / period
    for file in _files("cpu", "cpu.cfs_quota_us"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int(file.with_name(f"cpu.cfs_{one}_us").read_text("utf-8")) for one in ("quota", "period"))
            if quota > 0:  # -1 means no limit
                yield quota / period


def _files(controller: str, name: str) -> Iterator[Path]:
    """Yield the files of this name in the control groups of this process, and in those above; "" is version 2."""
    path = "/"
    with contextlib.suppress(OSError):
        for line in _OWN.read_text("utf-8", "replace").splitlines():
            _, controllers, own = (*line.split(":", 2), "", "")[:3]
            if controller in controllers.split(","):
                path = own
    # Inside a container the path is often the one outside: only the root is there then.
    place = Path(os.path.normpath(f"/{path}"))
    for above in (place, *place.parents):
        yield _GROUPS / controller / str(above).lstrip("/") / name
