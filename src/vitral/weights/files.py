"""Files of tensors that are only data: safetensors with JSON in the header, written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vitral.errors import TrainingError, WeightsError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` when the block ends well; else `path` stays as it was.

    A full disk or a crash while writing costs nothing that was there before. Raises `TrainingError` when the system
    refuses to write.
    """
    temporary = path.with_name(f".{path.name}.tmp")  # one name: what a killed process left is overwritten, not kept
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())  # safetensors writes for the owner alone
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as an error of its own kind
        hint = f"make room, or check that you may write there; what was in {path.parent} before is untouched"
        raise TrainingError("cannot write", where=path, why=str(error), hint=hint) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _umask() -> int:
    """What this process takes from the mode of new files; it can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Replace a text file, atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Replace a file of tensors, atomically; `header` is anything that JSON holds, kept under the key `vitral`."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(plain, temporary, metadata={"vitral": json.dumps(header)})


def write_plain(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Replace a file of tensors that other programs read, atomically."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        save_file(plain, temporary, metadata={"format": "pt", **(metadata or {})})


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and header of what `write_tensors` wrote; `WeightsError` for a damaged file or one of another kind."""
    if not path.is_file():
        raise WeightsError("no such file", where=path)
    try:
        with safe_open(path, framework="pt", device=device) as file:
            header = json.loads((file.metadata() or {}).get("vitral", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        why = f"{error} ({path.stat().st_size:,} bytes; cut short or not safetensors)"
        raise WeightsError("damaged weights file", where=path, why=why, hint="copy it again") from error
    if not isinstance(header, dict):
        raise WeightsError("no vitral header in this file", where=path, why="it was written by another program")
    return tensors, header
