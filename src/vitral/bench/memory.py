"""What a call needs above what is there: the allocator's figure on a GPU, resident pages on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


def growth(program: Callable[[], object], device: str) -> int | None:
    """Run once; the bytes by which its peak exceeds what was taken before. None where that cannot be found out.

    Weights and the optimizer's state are there before; activations, gradients and workspace come on top. On a CPU the
    memory that C's allocator holds in reserve is given back first: taken from there, it would not be seen.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        program()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    watched = device == "cpu" and _reset_peak()
    taken = _status("VmRSS") if watched else 0
    program()
    return max(0, _status("VmHWM") - taken) if watched else None


def _reset_peak() -> bool:
    """Let VmHWM begin at what is resident now; whether that could be done."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (_PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    """A size that Linux tells of this process, in bytes."""
    lines = (_PROCESS / "status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024
