"""PyTorch's own files (`.pth`, `.pt`, `.bin`, `.ckpt`), which are pickles: opened in a process of their own, shut in.

Nothing here, and nothing that this calls in this process, unpickles. There is no way around the walls: what cannot be
read inside them is not read.
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

from vitral.errors import WeightsError
from vitral.weights.mapped import printable, read_safetensors
from vitral.weights.members import members

WRAPPERS = (
    "state_dict_ema", "model_ema", "ema_state_dict", "ema", "teacher", "model", "state_dict", "model_state_dict",
    "model_state", "module", "network", "net", "weights", "params", "backbone", "student",
)  # fmt: skip
"""Keys under which a training saves its weights, the preferred first: averages before what they average (timm does the
same), a teacher before its student (DINO)."""

UNWANTED = (
    "optimizer", "optimizer_state_dict", "optimizer_state", "optimizers", "optimizer_states", "opt", "optim",
    "scheduler", "lr_scheduler", "lr_schedulers", "scheduler_state_dict", "scaler", "amp", "loss_scaler", "callbacks",
    "loops", "dino_loss", "rng_state", "hyper_parameters", "args", "config",
)  # fmt: skip
"""Keys beside weights that lie at the top: state of a training, no weights."""

STAND_INS = (
    "argparse.Namespace", "pathlib.Path", "pathlib.PosixPath", "pathlib.PurePosixPath", "pathlib._local.PosixPath",
    "numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar", "numpy.dtype", "numpy.dtypes.Float64DType",
    "numpy.dtypes.Float32DType", "numpy.dtypes.Int64DType",
)  # fmt: skip
"""Classes that torch refuses and official files hold beside their weights (DeiT and MAE: the options of the run). An
object that keeps nothing takes their place; the classes themselves are never touched."""

SANDBOX_EXEC = Path("/usr/bin/sandbox-exec")
_REPORT = 2**20
_CONVERT = "where you trust its source, convert it to safetensors with the program that wrote it"
_ENVIRONMENT = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")


def read_pickle(path: Path, seconds: int | None = None) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Tensors, and notes on what was unwrapped and left out, of a file that `torch.save` wrote.

    `torch.load(weights_only=True)` runs in another process, which can reach no network, start no program, write no
    other file and take no more than four times the file's size of memory. It writes plain tensors into a temporary
    folder, from which they are mapped here; the folder is gone afterwards. `seconds` limits its time, a minute
    and one second for every 20 MB if not given. Raises `WeightsError` for all that torch's restricted unpickler
    refuses, for TorchScript, for tensors of other kinds than plain ones, and on systems without such a wall.
    """
    is_archive = _check_outside(path)
    size = path.stat().st_size
    seconds = seconds or 60 + size // 20_000_000
    with tempfile.TemporaryDirectory(prefix="vitral-") as temporary:
        folder = Path(temporary).resolve()  # on macOS the profile needs the real path
        written = folder / "tensors.safetensors"
        most = 4 * size + 2**26  # tied tensors are written twice, and more
        request = {
            "path": str(path.resolve()), "tensors": str(written), "report": str(folder / "report.json"),
            "mapped": is_archive, "most": most, "writable": most + 2**26, "memory": 4 * size + 2**30,
            "seconds": seconds, "wrappers": WRAPPERS, "unwanted": UNWANTED, "stand_ins": STAND_INS,
        }  # fmt: skip
        notes = _run(path, folder, request)
        try:
            tensors, _ = read_safetensors(written)
        except WeightsError as error:
            raise WeightsError("cannot read a PyTorch file", where=path, why=error.why, hint=_CONVERT) from error
    return tensors, notes


def _check_outside(path: Path) -> bool:
    """Whether it is an archive (else a bare pickle); `WeightsError` for what need not be opened to be refused."""
    with open(path, "rb") as file:
        if file.read(4) != b"PK\3\4":
            return False
    found = members(path)
    inside = {member.name.partition("/")[2] for member in found}
    if "constants.pkl" in inside or any(name.startswith("code/") for name in inside):
        hint = "load it with torch.jit.load where you trust it, and save its state_dict() as safetensors"
        raise WeightsError("a TorchScript archive is a program", where=path, why="it holds code", hint=hint)
    if "data.pkl" not in inside:
        raise WeightsError("not a file of torch.save", where=path, why="there is no data.pkl in this archive")
    squeezed = next((member.name for member in found if member.compressed), None)
    if squeezed is not None:
        raise WeightsError(
            "damaged or hostile archive", where=path, why=f"'{squeezed}' is compressed; torch never does"
        )
    return True


def _run(path: Path, folder: Path, request: dict[str, Any]) -> tuple[str, ...]:
    """Run the reader and return its notes; every way in which it can end badly is a `WeightsError`."""
    script = Path(__file__).with_name("confined.py")
    command = [*_wall(path, folder), sys.executable, "-P", "-B", str(script), json.dumps(request)]
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}  # no tokens, no passwords
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""}
    with open(folder / "stderr", "wb") as said:
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, timeout=request["seconds"], start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=said, stderr=said,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            why = f"it took longer than {request['seconds']} s"
            raise WeightsError("gave up reading a pickle", where=path, why=why, hint=_CONVERT) from error
        except OSError as error:
            raise WeightsError("cannot start the reader of pickles", where=path, why=str(error)) from error
    told = _report(folder / "report.json")
    if "error" in told:
        raise _explained(path, str(told["error"]))
    notes = told.get("notes")
    if done.returncode or not isinstance(notes, list):
        raise _ended(path, folder, done.returncode)
    return tuple(printable(str(note), 1000) for note in notes)


def _wall(path: Path, folder: Path) -> list[str]:
    """What has to stand before the command; nothing on Linux, where the reader shuts itself in."""
    system = platform.system()  # sys.platform would make mypy see one branch only
    if system == "Linux":
        return []
    if system == "Darwin" and SANDBOX_EXEC.exists():
        return [str(SANDBOX_EXEC), "-p", _profile(folder)]
    why = f"on {system} there is no wall to open it behind, and pickles can run code"
    hint = "convert it to safetensors elsewhere (Linux or macOS)"
    raise WeightsError("a pickle cannot be opened safely here", where=path, why=why, hint=hint)


def _profile(folder: Path) -> str:
    """What `sandbox-exec` is told: no network, no other program, no file written but below `folder`."""
    python = [sys.executable, os.path.realpath(sys.executable)]
    programs = [f"(literal {json.dumps(name)})" for name in python] + [f"(subpath {json.dumps(sys.base_prefix)})"]
    return "\n".join([
        "(version 1)", "(allow default)", "(deny network*)", "(deny process-fork)", "(deny process-exec)",
        f"(allow process-exec {' '.join(programs)})", "(deny file-write*)",
        f'(allow file-write* (subpath {json.dumps(str(folder))}) (literal "/dev/null"))',
    ])  # fmt: skip


def _report(path: Path) -> dict[str, Any]:
    """What the reader reported; nothing that it writes is trusted."""
    try:
        with open(path, "rb") as file:
            told = json.loads(file.read(_REPORT))
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _explained(path: Path, said: str) -> WeightsError:
    """torch's complaint, a paragraph with an invitation to unsafe loading, in one line."""
    said = printable(said, 4000)
    named = re.search(r"GLOBAL ([\w.<>]+)", said)
    if named:
        why = f"it asks for {named[1]}, which is no weight and may run code"
        return WeightsError("refused to open a pickle", where=path, why=why, hint=_CONVERT)
    if "Unsupported operand" in said or "Invalid magic number" in said:
        why = "it was not written by torch.save in a form that can be read without running code"
        return WeightsError("refused to open a pickle", where=path, why=why, hint=_CONVERT)
    if re.search(r"MemoryError|can't allocate memory|Cannot allocate", said):
        said = "it asks for more memory than its size justifies"
    inner = re.split(r"WeightsUnpickler error:\s*", said)[-1]  # what precedes is the invitation
    return WeightsError("cannot read a PyTorch file", where=path, why=inner[:300], hint=_CONVERT)


def _ended(path: Path, folder: Path, code: int) -> WeightsError:
    """The reader died without a report."""
    last = (folder / "stderr").read_bytes()[-2000:].decode("utf-8", "replace").strip().splitlines()
    why = f"its reader ended with code {code}" + (f": {printable(last[-1], 200)}" if last else "")
    return WeightsError("cannot read a PyTorch file", where=path, why=why, hint=_CONVERT)
