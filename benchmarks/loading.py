"""Load ViT-B/16's weights with timm's names, 346 MB of fp32, from a file to a ready network.

The reference is `load_state_dict(safetensors.torch.load_file(path))` on a network built before, which costs nothing
here. Ours is all of `vitral.load`: detect the format, infer the configuration, build the network, take the tensors,
check every value for NaN and report on every tensor. Both read the file from the system's cache. Peak memory is that of
a separate process, relative to the memory after importing; resident pages of the file count.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio
from vitral.model import create
from vitral.weights.load import read

_PEAK = """
import sys, torch
from safetensors.torch import load_file
from vitral.model import create
from vitral.weights.load import read

def status(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1]) * 1024

def plain():
    model = create("B/16")
    before = status("VmRSS")
    model.load_state_dict(load_file(sys.argv[2]))
    return before, model

def ours():
    before = status("VmRSS")
    return before, read(sys.argv[2]).build()

before, model = plain() if sys.argv[1] == "plain" else ours()
print(status("VmHWM") - before)
"""


def run(options: Options) -> list[Table]:
    """Measure time and peak memory of both."""
    name = "Ti/16" if options.quick else "B/16"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        model = create(name)
        torch.manual_seed(0)
        save_file({key: torch.randn_like(value) for key, value in model.state_dict().items()}, path)
        programs = {
            "load_file + load_state_dict": lambda: model.load_state_dict(load_file(path)),
            "vitral": lambda: read(path).build(),
        }
        found = alternate(programs, rounds=1 if options.quick else 9)
        size = path.stat().st_size
        peaks = (
            {}
            if options.quick
            else {"load_file + load_state_dict": _peak("plain", path), "vitral": _peak("ours", path)}
        )
    reference = found["load_file + load_state_dict"]
    rows = [
        {
            "way": way, **sample.columns(1000), "ratio": ratio(sample, reference),
            "peak": peaks.get(way, 0) / 1e6, "share": peaks.get(way, 0) / size,
        }
        for way, sample in found.items()
    ]  # fmt: skip
    columns = {
        "way": "by", "n": "n|d", "median": "ms|.0f", "least": "least|.0f", "greatest": "greatest|.0f",
        "ratio": "time : load_state_dict|.2f", "peak": "peak MB|.0f", "share": "peak : file|.2f",
    }  # fmt: skip
    return [Table(f"From a file of {size / 1e6:.0f} MB to a network", columns, rows)]


def _peak(way: str, path: Path) -> int:
    """Measure the peak memory of a new process, in bytes above its memory before."""
    command = [sys.executable, "-c", _PEAK, way, str(path)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
