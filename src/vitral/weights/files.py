"""Files of tensors that are only data: safetensors with JSON in the header, written whole or not at all.

Written files carry a digest (`vitral.digest`), which reading checks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor

from vitral import bounded
from vitral.atomic import replacing
from vitral.digest import BLANK, KEY, check_tensors, seal_tensors
from vitral.errors import WeightsError
from vitral.filesystem import is_utf8
from vitral.weights.read.safetensors_mmap import check_header, opened, printable


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, object], beside: Mapping[str, str] | None = None
) -> None:
    """Replace a file of tensors atomically; `header` is any JSON, stored under the key `vitral`, beside other texts."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        _save(plain, temporary, {**(beside or {}), "vitral": json.dumps({**header, KEY: BLANK})})


def write_plain(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Replace a file of tensors for other programs atomically."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    with replacing(path) as temporary:
        _save(plain, temporary, {"format": "pt", **(metadata or {}), KEY: BLANK})


def _save(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
    if is_utf8(path):
        save_file(tensors, path, metadata=metadata)
    else:  # the library opens no other paths
        path.write_bytes(save(tensors, metadata=metadata))
    seal_tensors(path)


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read tensors and header of a file by `write_tensors`; `WeightsError` for a damaged, changed or foreign file."""
    if not path.is_file():
        raise WeightsError("no such file", where=path)
    try:
        check_header(path)
        check_tensors(path)
        with opened(path) as (metadata, names, tensor):
            header = bounded.parse(metadata.get("vitral", "null"))
            tensors = {name: tensor(name).to(device) for name in names}
    except (SafetensorError, OSError, ValueError) as error:
        why = f"{printable(str(error))} ({path.stat().st_size:,} bytes; cut short, changed or not safetensors)"
        raise WeightsError("damaged weights file", where=path, why=why, hint="copy it again") from error
    if not isinstance(header, dict):
        raise WeightsError("no vitral header in this file", where=path, why="it was written by another program")
    header.pop(KEY, None)
    return tensors, header
