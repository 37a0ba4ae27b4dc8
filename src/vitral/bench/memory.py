"""Measure the peak memory of a call: the allocator's figure on a GPU, resident pages on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


def growth(program: Callable[[], object], device: str) -> int | None:
    """Run once and return the bytes by which the peak exceeds the memory in use before; None if unknown.

    Weights and the optimizer's state are in use before; activations, gradients and workspace come on top.
    """
    found = peak(program, device)
    return None if found is None else max(0, found[1] - found[0])


def peak(program: Callable[[], object], device: str) -> tuple[int, int] | None:
    """Run once and return the bytes in use before and at the peak; None if unknown.

    On a CPU the reserve of C's allocator is released first: memory taken from the reserve would not be seen.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        program()
        torch.cuda.synchronize()
        return before, torch.cuda.max_memory_allocated()
    watched = device == "cpu" and _reset_peak()
    taken = _status("VmRSS") if watched else 0
    program()
    return (taken, _status("VmHWM")) if watched else None


def _reset_peak() -> bool:
    """Reset VmHWM to the resident memory; False if the system does not allow it."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    """Read a size of this process from Linux, in bytes."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
