"""Weights by their bits: names and shapes of networks, headers of files, and hashes for the CPUs that made them."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import struct
from pathlib import Path
from typing import Any

import torch

_FLAGS = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")
"""Instruction sets that change how libraries compute products and sums."""


LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
"""Variables that hold the libraries below torch to a lesser CPU."""


_KIND = ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo that name the kind of CPU, on x86 and on ARM."""


def machine() -> str:
    """The kind of CPU and the torch that a hash belongs to: others may round differently."""
    about: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().split("\n\n")[0].splitlines() if cpuinfo.exists() else ():
        name, _, value = line.partition(":")
        about[name.strip()] = value.strip()
    said = {*about.get("flags", "").split(), *about.get("Features", "").split()}
    flags = " ".join(flag for flag in _FLAGS if flag in said)
    kind = " ".join(about[name] for name in _KIND if name in about)
    used = torch.backends.cpu.get_cpu_capability()  # what torch was built or set to use of them
    used += "".join(f", {name}={os.environ[name]}" for name in LIMITS if name in os.environ)
    return f"{platform.system()} {platform.machine()}, {kind} ({flags}), {used}, torch {torch.__version__}"


def header(file: Path) -> dict[str, Any]:
    """The header of a safetensors file, with the JSON inside its metadata parsed."""
    found, _ = _parts(file)
    found["__metadata__"] = {key: _parsed(text) for key, text in found.get("__metadata__", {}).items()}
    return found


def sha256(file: Path) -> str:
    """The hash over name, dtype, shape and bytes of every tensor, sorted by name."""
    found, data = _parts(file)
    total = hashlib.sha256()
    for name in sorted(found.keys() - {"__metadata__"}):
        about = found[name]
        begin, end = about["data_offsets"]
        total.update(f"{name} {about['dtype']} {about['shape']}\n".encode())
        total.update(data[begin:end])
    return total.hexdigest()


def _parts(file: Path) -> tuple[dict[str, Any], bytes]:
    stored = file.read_bytes()
    (length,) = struct.unpack("<Q", stored[:8])
    return json.loads(stored[8 : 8 + length]), stored[8 + length :]


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def listing(state: dict[str, torch.Tensor]) -> str:
    """Keys, shapes and dtypes of a state dict: a hash over all lines in order, then the lines with indices joined.

    Blocks that are alike share a line: `blocks.{0-11}.norm1.weight 192` stands for twelve.
    """
    lines = [f"{name} {'×'.join(map(str, one.shape)) or '-'} {_dtype(one)}" for name, one in state.items()]
    total = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    return "\n".join([f"{len(lines)} tensors, sha256 {total[:32]}", *_joined(_joined(lines, -1), 0)])


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _joined(lines: list[str], which: int) -> list[str]:
    """Lines that differ only in one index of their name, the first (0) or the last (-1), as one line each."""
    found: dict[str, list[int]] = {}
    for line in lines:
        name, _, rest = line.partition(" ")
        places = list(re.finditer(r"(?<=\.)\d+(?=\.)", name))
        if places:
            at = places[which]
            found.setdefault(f"{name[: at.start()]}{{}}{name[at.end() :]} {rest}", []).append(int(at[0]))
        else:
            found.setdefault(line, [])
    return [pattern.replace("{}", _ranges(indices), 1) if indices else pattern for pattern, indices in found.items()]


def _ranges(indices: list[int]) -> str:
    """0, 1, 2, 5 → "{0-2,5}"; one index stands as it is."""
    if len(indices) == 1:
        return str(indices[0])
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return "{" + ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) + "}"
