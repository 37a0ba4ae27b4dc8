"""Queries below torch: memory, CPU, allocator, load from other programs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import time
from functools import cache
from pathlib import Path

import torch

from vitral.containers import cores, memory_limit


@cache
def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that torch and oneDNN may use (Linux); empty elsewhere, which means fp32.

    Those of the CPU, less those that `ATEN_CPU_CAPABILITY` and `ONEDNN_MAX_CPU_ISA` exclude. Both are read at the first
    use, as by the libraries.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return _all_cpu_flags()
    return _all_cpu_flags() - _excluded_by_torch() - _excluded_by_onednn()


def excluded_cpu_flags() -> frozenset[str]:
    """Return the instruction sets of the CPU that the variables of `cpu_flags` exclude."""
    return _all_cpu_flags() - cpu_flags()


def _all_cpu_flags() -> frozenset[str]:
    return frozenset(cpu_line("flags", "Features").split())


def has_avx512() -> bool:
    """True if torch and oneDNN may use AVX-512."""
    flags = cpu_flags()  # empty outside Linux
    return "avx512f" in flags or (not flags and "AVX512" in torch.backends.cpu.get_cpu_capability())


def is_amd() -> bool:
    """True for a CPU of AMD, by name."""
    return "AuthenticAMD" in cpu_line("vendor_id") or "AuthenticAMD" in platform.processor()  # on Windows


def _excluded_by_torch() -> frozenset[str]:
    capability = torch.backends.cpu.get_cpu_capability()
    if "AVX512" in capability:
        return frozenset()
    return _AVX512_AND_LATER if "AVX2" in capability else _AVX512_AND_LATER | _AVX2


def _excluded_by_onednn() -> frozenset[str]:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or "DEFAULT"
    allowed = _ONEDNN_LIMITS.get(limit.upper())
    return frozenset() if allowed is None else (_AVX512_AND_LATER | _AVX2) - allowed


_AVX2 = frozenset({"avx2", "fma", "avx_vnni"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"})
_AMX = frozenset({"amx_tile", "amx_int8", "amx_bf16"})
_AVX512_AND_LATER = _AVX512 | _AMX | {"avx512_vnni", "avx512_bf16", "avx512_fp16"}
_ONEDNN_LIMITS: dict[str, frozenset[str]] = {
    "SSE41": frozenset(),
    "AVX": frozenset(),
    "AVX2": _AVX2,
    "AVX2_VNNI": _AVX2,
    "AVX2_VNNI_2": _AVX2,
    "AVX512_CORE": _AVX2 | _AVX512,
    "AVX512_CORE_VNNI": _AVX2 | _AVX512 | {"avx512_vnni"},
    "AVX512_CORE_BF16": _AVX2 | _AVX512 | {"avx512_vnni", "avx512_bf16"},
    "AVX512_CORE_FP16": _AVX2 | _AVX512 | {"avx512_vnni", "avx512_bf16", "avx512_fp16"},
}
"""Instruction sets that oneDNN uses up to each limit; others, such as AVX512_CORE_AMX, allow all of these."""


def cpu_line(*names: str) -> str:
    """Return the first entry with one of these names in /proc/cpuinfo (Linux); empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as info:
            line = next((line for line in info if line.startswith(names)), "")
    except OSError:
        return ""
    return line.partition(":")[2].strip()


def cpu_name() -> str:
    return cpu_line("model name") or platform.processor() or platform.machine()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step; without effect on other systems.

    By default every large tensor of a step on a CPU is mapped, touched page by page and unmapped again: some 60,000
    page faults per step of ViT-S/16 with 16 images. Meant for training; it applies to the whole process.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20)):
            mallopt(option, value)


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # malloc.h


def memory_bytes() -> int:
    """Return the memory that this process may use, in bytes: the machine's, or the limit of its container (Linux)."""
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        available = 8 << 30
    limit = memory_limit()
    return available if limit is None else min(available, limit)


class HostLoad:
    """CPU load from other programs on the cores of this process, measured since construction (Linux)."""

    def __init__(self) -> None:
        self._began = _work()

    def cores(self) -> float | None:
        """Return the mean number of busy cores; None on other systems, and during the first 0.2 s, for which the
        system's clock is too coarse.
        """
        now = _work()
        if self._began is None or now is None or (passed := now[0] - self._began[0]) < 0.2:
            return None
        total, own = (after - before for before, after in zip(self._began[1:], now[1:], strict=True))
        return max(0.0, total - own) / passed


def cpu_contention(others: HostLoad) -> str | None:
    """Return a warning about CPU contention, to print before a long computation; None if the cores suffice.

    All threads of a layer wait for the one that shares its core with another program.
    """
    busy, threads, there = others.cores(), torch.get_num_threads(), cores()
    if busy is None or threads == 1 or busy < there / 4 or threads + busy < there + 0.5:
        return None
    free = max(1, min(threads - 1, there - round(busy)))
    return (
        f"other programs, or the host of this machine, keep {busy:.1f} of {there} cores busy: with {threads} threads a "
        "small network can be many times slower, because each layer waits for the slowest thread; "
        f"OMP_NUM_THREADS={free} before the command avoids this"
    )


_STAT = Path("/proc/stat")


def _work() -> tuple[float, float, float] | None:
    """Return seconds: of the clock, of work by all programs on the cores of this process, and of its own work."""
    try:
        lines = _STAT.read_text("utf-8").splitlines()
        allowed = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return None
    rows = [line.split() for line in lines if line.partition(" ")[0] in allowed]
    # user, nice, system, idle, iowait, irq, softirq, steal: all except idle and iowait are work
    ticks = sum(int(number) for words in rows for number in (*words[1:4], *words[6:9]))
    return time.monotonic(), ticks / tick, time.process_time()
