"""Device, precision, threads and seeds: decided here and nowhere else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from vitral.errors import UsageError

Precision = Literal["fp32", "bf16"]

# Below this width a CPU spends more on casting to bf16 than its matrix units win back (benchmarks/precision.py).
BF16_MIN_DIM_ON_CPU = 16


@dataclass(frozen=True)
class Machine:
    """Where and how precisely the network computes."""

    device: torch.device
    precision: Precision
    reason: str
    caution: str = ""
    """What speaks against it, where it was asked for all the same."""

    def autocast(self) -> AbstractContextManager[None]:
        """The context for forward passes: bf16 for matrix products where chosen, fp32 for the rest."""
        if self.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    @property
    def name(self) -> str:
        """What a person would call this machine: the GPU's name, or the processor and its cores."""
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        if self.device.type == "mps":
            return "Apple GPU"
        threads = torch.get_num_threads()
        return f"{_cpu_name()}, {threads} {'thread' if threads == 1 else 'threads'}"


def choose(device: str = "auto", precision: str = "auto", dim: int | None = None) -> Machine:
    """The machine to use. `auto`: a GPU where there is one; bf16 where the processor has instructions for it and the
    network is wide enough (`dim`) to gain. fp16 is never chosen: a CPU is about a hundred times slower at it.

    Raises `UsageError` for a device that is not there and for a precision that is not offered.
    """
    if precision not in ("auto", "fp32", "bf16"):
        why = "fp16 needs loss scaling, and a CPU is about 100 times slower at it" if precision == "fp16" else None
        raise UsageError(
            f"unknown precision '{precision}'",
            why=why,
            hint="--precision bf16, fp32 or auto; int8 is for predictions, after vitral quantize",
        )
    target = _device(device)
    if precision == "fp32":
        return Machine(target, "fp32", "you asked")
    if precision == "bf16":
        slow = target.type == "cpu" and bool(_cpu_flags()) and not has_bf16(target)  # other systems tell no flags
        caution = "bf16 is slower than fp32 on this processor, which has no instructions for it" * slow
        return Machine(target, "bf16", "; ".join(filter(None, ("you asked", caution))), caution)
    if not has_bf16(target):
        return Machine(target, "fp32", f"this {target.type} has no bf16 instructions")
    if target.type == "cpu" and dim is not None and dim < BF16_MIN_DIM_ON_CPU:
        return Machine(target, "fp32", f"at width {dim} casting costs more than bf16 gains")
    return Machine(target, "bf16", "the processor has bf16 instructions")


def _device(name: str) -> torch.device:
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"unknown device '{name}'", hint="--device auto, cpu, cuda or mps") from None
    missing = (device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing or device.type not in ("cpu", "cuda", "mps"):
        raise UsageError(f"no device '{name}' on this machine", hint="--device auto")
    return device


def has_bf16(device: torch.device) -> bool:
    """Whether it has instructions for products in bf16: without, a processor is many times slower than in fp32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        flags = ("avx512_bf16", "amx_bf16", "bf16")
        return any(flag in _cpu_flags() for flag in flags)
    return False


def _cpu_flags() -> frozenset[str]:
    """Instruction sets that the processor names (Linux); elsewhere none, which means fp32."""
    return frozenset(_cpu_line("flags", "Features").split())


def _cpu_line(*names: str) -> str:
    """What Linux says of the first processor under one of these names."""
    try:
        with open("/proc/cpuinfo") as info:
            line = next((line for line in info if line.startswith(names)), "")
    except OSError:
        return ""
    return line.partition(":")[2].strip()


def _cpu_name() -> str:
    return _cpu_line("model name") or platform.processor() or platform.machine()


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Within, nothing is rounded to bf16, whatever `Machine.autocast` says around it."""
    if not torch.amp.is_autocast_available(device.type):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def synchronise(device: torch.device | str) -> None:
    """Wait until the device has done all that it was asked for."""
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.synchronize(device)
    elif kind == "mps":
        torch.mps.synchronize()


def keep_freed_memory() -> None:
    """Let glibc keep the memory that tensors free, for the next step to take; elsewhere nothing happens.

    By default every large tensor of a step on a CPU is mapped, touched page by page and unmapped again: some 60,000
    page faults a step of ViT-S/16 with 16 pictures. For programs that train; it holds for the whole process.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20)):
            mallopt(option, value)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h


def memory_bytes() -> int:
    """Memory that this process may use, in bytes: the machine's, or less where a container has a limit (Linux)."""
    try:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        there = 8 << 30
    for limit in _LIMITS:
        with contextlib.suppress(OSError, ValueError):  # "max" is none
            there = min(there, int(limit.read_text()))
    return there


def total_bytes(device: torch.device) -> int:
    """The memory of a device; where it has none of its own, what this process may use of the machine's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else memory_bytes()


def out_of_memory(error: Exception) -> bool:
    """Whether this is what torch raises where a device has no more memory."""
    said = any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or said


_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")
"""What a bare `RuntimeError` says: of a processor, an Apple GPU, CUDA's libraries."""


_LIMITS = tuple(Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory/memory.limit_in_bytes"))
"""Where the second and the first version of Linux's control groups tell it."""


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class OthersWork:
    """What other programs do with the cores that this process may use, from the moment that this is made (Linux)."""

    def __init__(self) -> None:
        self._began = _work()

    def cores(self) -> float | None:
        """How many of the cores they kept busy, in the mean; None elsewhere, and before a fifth of a second is over,
        which the system's clock of ticks is too coarse for.
        """
        now = _work()
        if self._began is None or now is None or (passed := now[0] - self._began[0]) < 0.2:
            return None
        everyone, own = (after - before for before, after in zip(self._began[1:], now[1:], strict=True))
        return max(0.0, everyone - own) / passed


def crowded(others: OthersWork) -> str | None:
    """What to say before a long computation on a processor on which too much else goes on: all threads of a layer wait
    for the one that has to share its core. None where there is room for them all.
    """
    busy, threads, there = others.cores(), torch.get_num_threads(), cores()
    if busy is None or threads == 1 or busy < there / 4 or threads + busy < there + 0.5:
        return None
    free = max(1, min(threads - 1, there - round(busy)))
    return (
        f"other programs, or the host of this machine, keep {busy:.1f} of {there} cores busy: with {threads} threads a "
        "small network can be many times slower, since each layer waits for the slowest of them; "
        f"OMP_NUM_THREADS={free} in front of the command keeps out of their way"
    )


_STAT = Path("/proc/stat")


def _work() -> tuple[float, float, float] | None:
    """Seconds: of the clock, of work that was done on our cores by anyone, and of our own."""
    try:
        lines = _STAT.read_text().splitlines()
        ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    told = [line.split() for line in lines if line.partition(" ")[0] in ours]
    # user, nice, system, idle, iowait, irq, softirq, steal: all but the two in the middle are work
    ticks = sum(int(number) for words in told for number in (*words[1:4], *words[6:9]))
    return time.monotonic(), ticks / tick, time.process_time()


def derive_seed(*parts: int) -> int:
    """One seed from several numbers (seed, epoch, step or sample): randomness is a function of a position."""
    # SeedSequence takes (1,) and (1, 0) for the same; their number in front tells them apart.
    words = [len(parts), *(part & 0xFFFFFFFF for part in parts)]
    return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0] >> 1)


def seed_everything(*parts: int) -> None:
    """Seed every generator that torch uses, on all devices, from `derive_seed(*parts)`."""
    torch.manual_seed(derive_seed(*parts))


@contextlib.contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Within, torch's CPU generator follows from `parts`; afterwards it goes on as if nothing had been."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derive_seed(*parts))
        yield
