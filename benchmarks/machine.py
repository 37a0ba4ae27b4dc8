"""What a figure was measured on: processor, GPU, load, commit, date, versions."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from vitral.device import _cpu_flags, cores, memory_bytes

ROOT = Path(__file__).resolve().parents[1]
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "bf16")
_PACKAGES = ("vitral", "torch", "torchvision", "timm", "transformers", "vit-pytorch", "numpy", "pillow")


def describe(device: str) -> dict[str, Any]:
    """The machine, without names of hosts or folders."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": cores(),
        "instructions": [flag for flag in _FLAGS if flag in _cpu_flags()],
        "memory_gib": round(memory_bytes() / 2**30),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
    if device == "cuda":
        import torch

        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(map(_field, lines))
    name = fields.get("model name", platform.machine())
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()


def load_average() -> float | None:
    """Processes that wanted a core over the last minute; more than we use ourselves means that others disturbed."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str]:
    """The versions of what is installed of ours and the peers."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit that was measured, marked where the code on disk differs from it."""
    try:
        short = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "--", "src", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{short} with changes" if changed else short


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def today() -> str:
    """The date, in UTC."""
    return datetime.now(UTC).date().isoformat()
