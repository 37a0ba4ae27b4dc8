"""Read PyTorch's files (`.pth`, `.pt`, `.bin`, `.ckpt`), which are pickles, in a sandboxed process.

Nothing in this process unpickles. There is no bypass: a file that cannot be read inside the sandbox is not read.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor

from vitral import bounded
from vitral.errors import WeightsError
from vitral.weights.notes import Caution
from vitral.weights.read.safetensors_mmap import printable, read_safetensors
from vitral.weights.read.zip_entries import check_sums, list_entries

WRAPPERS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher", "model", "state_dict", "model_state_dict",
    "model_state", "module", "network", "net", "weights", "params", "backbone", "student",
)  # fmt: skip
"""Keys of the weights in a checkpoint, the preferred first: averaged weights before current ones (as in timm), a
teacher before its student (DINO)."""

UNWANTED = (
    "optimizer", "optimizer_state_dict", "optimizer_state", "optimizers", "optimizer_states", "opt", "optim",
    "scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "scaler", "amp", "loss_scaler", "callbacks",
    "loops", "dino_loss", "rng_state", "hyper_parameters", "args", "config",
)  # fmt: skip
"""Top-level keys of a checkpoint that hold the state of a training, no weights."""

STAND_INS = (
    "argparse.Namespace", "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype", "numpy.dtypes.Float64DType",
    "numpy.dtypes.Float32DType", "numpy.dtypes.Int64DType",
)  # fmt: skip
"""Classes that torch refuses although official files contain them (DeiT and MAE: the options of the run). An empty
placeholder replaces their objects; the classes themselves are never touched."""

SANDBOX_EXEC = Path("/usr/bin/sandbox-exec")
_REPORT = 2**20
_CONVERT = "if you trust its source, convert it to safetensors with the program that wrote it"
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")


def read_pickle(path: Path, seconds: int | None = None) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Read tensors, and notes on unwrapped and omitted keys, of a file written by `torch.save`.

    `torch.load(weights_only=True)` runs in another process, which cannot reach the network, start programs, write other
    files, or use more memory than four times the file's size. It writes plain tensors into a temporary folder, from
    which they are mapped here; the folder is then removed. `seconds` limits its time; the default is a minute plus one
    second for every 20 MB. Raises `WeightsError` for all that torch's restricted unpickler refuses, for TorchScript,
    for tensors that are not plain, and on systems without a sandbox.
    """
    is_archive = _check_outside(path)
    size = path.stat().st_size
    seconds = seconds or 60 + size // 20_000_000
    with tempfile.TemporaryDirectory(prefix="vitral-") as temporary:
        folder = Path(temporary).resolve()  # on macOS the profile needs the real path
        written = folder / "tensors.safetensors"
        most = 4 * size + 2**26  # tied tensors are written twice, and more
        request = {
            "path": str(path.resolve()),
            "tensors": str(written),
            "report": str(folder / "report.json"),
            "mapped": is_archive,
            "most": most,
            "writable": most + 2**26,
            "memory": 4 * size + 2**30,
            "seconds": seconds,
            "wrappers": WRAPPERS,
            "unwanted": UNWANTED,
            "stand_ins": STAND_INS,
        }
        notes = _run(path, folder, request)
        try:
            tensors, _ = read_safetensors(written)
        except WeightsError as error:
            raise WeightsError("cannot read a PyTorch file", where=path, why=error.why, hint=_CONVERT) from error
    return tensors, notes


def _check_outside(path: Path) -> bool:
    """True for a zip archive, False for a bare pickle; `WeightsError` for faults visible without unpickling."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4":
            return False
    found = list_entries(path)
    inside = {entry.name.partition("/")[2] for entry in found}
    if "constants.pkl" in inside or any(name.startswith("code/") for name in inside):
        hint = "load it with torch.jit.load if you trust it, and save its state_dict() as safetensors"
        raise WeightsError("a TorchScript archive is a program", where=path, why="it holds code", hint=hint)
    if "data.pkl" not in inside:
        raise WeightsError("not a file of torch.save", where=path, why="there is no data.pkl in this archive")
    compressed = next((entry.name for entry in found if entry.compressed), None)
    if compressed is not None:
        why = f"'{compressed}' is compressed, which torch.save never does"
        raise WeightsError("damaged or hostile archive", where=path, why=why)
    check_sums(path, found, optional=True)
    return True


def _run(path: Path, folder: Path, request: dict[str, Any]) -> tuple[str, ...]:
    """Run the reader and return its notes; `WeightsError` however it fails."""
    script = Path(__file__).with_name("sandbox.py")
    command = [*_sandbox_command(path, folder), sys.executable, "-P", "-B", str(script), json.dumps(request)]
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}  # no tokens, no passwords
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    with open(folder / "stderr", "wb") as output:
        try:
            done = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                timeout=request["seconds"],
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        except subprocess.TimeoutExpired as error:
            why = f"it took longer than {request['seconds']} s"
            raise WeightsError("gave up reading a pickle", where=path, why=why, hint=_CONVERT) from error
        except OSError as error:
            raise WeightsError("cannot start the reader of pickles", where=path, why=str(error)) from error
    result = _report(folder / "report.json")
    if "error" in result:
        raise _explained(path, str(result["error"]))
    notes = result.get("notes")
    if done.returncode or not isinstance(notes, list):
        raise _ended(path, folder, done.returncode)
    return tuple((Caution if left_out else str)(printable(str(note), 1000)) for note, left_out in notes)


def _sandbox_command(path: Path, folder: Path) -> list[str]:
    """Build the prefix of the command; empty on Linux, where the reader restricts itself."""
    system = platform.system()  # sys.platform would make mypy see one branch only
    if system == "Linux":
        return []
    if system == "Darwin" and SANDBOX_EXEC.exists():
        return [str(SANDBOX_EXEC), "-p", _profile(folder)]
    why = f"there is no sandbox on {system}, and pickles can run code"
    hint = f"convert it to safetensors elsewhere (Linux or macOS), or here if you trust its source: {_converting(path)}"
    raise WeightsError("a pickle cannot be opened safely here", where=path, why=why, hint=hint)


def _converting(path: Path) -> str:
    """Return the command that converts a file of tensors with torch's restricted unpickler, without a sandbox."""
    read, written = (repr(str(one)) for one in (path, path.with_suffix(".safetensors")))
    program = f"save_file(torch.load({read}, weights_only=True), {written})"
    return f'python -c "import torch; from safetensors.torch import save_file; {program}"'  # Windows quotes by " only


def _profile(folder: Path) -> str:
    """Build the profile for `sandbox-exec`: no network, no other program, no file written except below `folder`."""
    python = [sys.executable, os.path.realpath(sys.executable)]
    programs = [f"(literal {json.dumps(name)})" for name in python] + [f"(subpath {json.dumps(sys.base_prefix)})"]
    return "\n".join(
        [
            "(version 1)",
            "(allow default)",
            "(deny network*)",
            "(deny process-fork)",
            "(deny process-exec)",
            f"(allow process-exec {' '.join(programs)})",
            "(deny file-write*)",
            f'(allow file-write* (subpath {json.dumps(str(folder))}) (literal "/dev/null"))',
        ]
    )


def _report(path: Path) -> dict[str, object]:
    """Read the reader's report, which is not trusted."""
    try:
        result = bounded.read(path, most_bytes=_REPORT)
    except (OSError, ValueError):
        return {}
    return result if isinstance(result, dict) else {}


def _explained(path: Path, message: str) -> WeightsError:
    """Shorten torch's message, a paragraph that recommends unsafe loading, to one line."""
    message = printable(message, 4000)
    named = re.search(r"GLOBAL ([\w.<>]+)", message)
    if named:
        why = f"it needs {named[1]}, which is not a weight and may run code"
        return WeightsError("refused to open a pickle", where=path, why=why, hint=_CONVERT)
    if "Unsupported operand" in message or "Invalid magic number" in message:
        why = "it was not written by torch.save in a form that can be read without running code"
        return WeightsError("refused to open a pickle", where=path, why=why, hint=_CONVERT)
    if re.search(r"MemoryError|can't allocate memory|Cannot allocate", message):
        message = "it needs more memory than its size justifies"
    inner = re.split(r"WeightsUnpickler error:\s*", message)[-1]  # drop the recommendation before it
    return WeightsError("cannot read a PyTorch file", where=path, why=inner[:300], hint=_CONVERT)


def _ended(path: Path, folder: Path, code: int) -> WeightsError:
    """Describe a reader that died without a report."""
    last = (folder / "stderr").read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()
    why = f"its reader ended with code {code}" + (f": {printable(last[-1], 200)}" if last else "")
    return WeightsError("cannot read a PyTorch file", where=path, why=why, hint=_CONVERT)
