"""What a figure was measured on: processor, GPU, load, date, versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from vitral import device as ours

_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "bf16")
_PACKAGES = ("vitral", "torch", "torchvision", "timm", "transformers", "vit-pytorch", "openvino", "numpy", "pillow")


def describe(device: str) -> dict[str, Any]:
    """The machine, without names of hosts or folders."""
    found: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": ours.cores(),
        "instructions": [flag for flag in _FLAGS if flag in ours._cpu_flags()],
        "memory_gib": round(ours.memory_bytes() / 2**30),
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu_name() -> str:
    family, model = ours._cpu_line("cpu family"), ours._cpu_line("model\t")  # not the line "model name"
    return f"{ours._cpu_name()} (family {family}, model {model})" if family else ours._cpu_name()


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


def today() -> str:
    """The date, in UTC."""
    return datetime.now(UTC).date().isoformat()
