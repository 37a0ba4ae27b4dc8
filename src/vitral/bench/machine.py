"""Describe the machine of a measurement: CPU, GPU, load, date, versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import torch

from vitral import system
from vitral.containers import cores

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "bf16")
_PACKAGES = ("vitral", "torch", "torchvision", "timm", "transformers", "vit-pytorch", "openvino", "numpy", "pillow")


def describe(device: str) -> dict[str, object]:
    """Describe the machine, without names of hosts or folders."""
    family, model = system.cpu_line("cpu family"), system.cpu_line("model\t")  # not the line "model name"
    found: dict[str, object] = {
        "cpu": f"{system.cpu_name()} (family {family}, model {model})" if family else system.cpu_name(),
        "cores": cores(),
        "instructions": [flag for flag in _FLAGS if flag in system.cpu_flags()],
        "memory_gib": round(system.memory_bytes() / 2**30),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def load_average() -> float | None:
    """Average number of runnable processes over the last minute; more than our own threads means CPU contention."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def versions() -> dict[str, str]:
    """Versions of the installed packages of vitral and the peers."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def today() -> str:
    """Today's date in UTC."""
    return datetime.now(UTC).date().isoformat()
