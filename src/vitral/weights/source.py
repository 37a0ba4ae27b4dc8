"""Any file or folder of weights as tensors by name, read without running a line of what it holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from torch import Tensor

from vitral.errors import WeightsError
from vitral.weights.mapped import read_safetensors
from vitral.weights.members import members
from vitral.weights.npz import read_npz
from vitral.weights.unpickle import read_pickle

PREFIXES = (
    "module.", "_orig_mod.", "model.", "network.", "net.", "backbone.", "encoder.", "student.", "teacher.",
    "ema_model.",
)  # fmt: skip
"""What wrappers put before every name: DataParallel, torch.compile, Lightning, self-supervised trainers. None of them
begins every name of a known format (torchvision's and Hugging Face's `encoder.` has names beside it), so that one which
all names share is a wrapper's."""

SUFFIXES = (".safetensors", ".npz", ".bin", ".pth", ".pt", ".ckpt", ".pth.tar")
WHOLE = ("model.safetensors", "pytorch_model.bin")
"""What a folder's weights are called by its makers; a `.index.json` beside the name tells of shards."""
LARGEST_JSON = 8 * 2**20

FOREIGN = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras)"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "compressed by gzip; unpack it first"),
    (b"version https://git-lfs", "a pointer of git-lfs, not the file; run git lfs pull"),
    (b"<!", "a web page; the download went wrong"),
    (b"<html", "a web page; the download went wrong"),
)
"""First bytes of what people take for weights, and what it is."""


@dataclass(frozen=True, eq=False)
class Source:
    """What lies in a file or folder of weights; see `open_source`."""

    where: str
    """As typed."""
    tensors: dict[str, Tensor]
    """In the file's order; views of the mapped file wherever its format allows."""
    metadata: Mapping[str, str]
    """Of a safetensors header, else empty."""
    config: Mapping[str, Any] | None
    """`config.json` beside the weights; None where there is none."""
    preprocessor: Mapping[str, Any] | None
    """`preprocessor_config.json` beside them; None where there is none."""
    notes: tuple[str, ...]
    """What was done on the way: unwrapped, renamed, left out."""


def open_source(path: Path) -> Source:
    """Read a file (safetensors, `.npz`, PyTorch's pickles) or a folder of Hugging Face's layout, whole or in shards.

    The first bytes decide on the kind, not the name. A prefix that wrappers put before all names is taken away.
    Raises `WeightsError` for what is missing, damaged, hostile or unknown.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        tensors, metadata, notes = _from_folder(path)
    else:
        tensors, metadata, notes = _from_file(path)
    if not tensors:
        raise WeightsError("there are no tensors in this file", where=path)
    tensors, stripped = without_prefixes(tensors)
    beside = []
    for name in ("config.json", "preprocessor_config.json"):
        config, more = _beside(folder / name, required=path.is_dir())
        beside.append(config)
        stripped += more
    return Source(str(path), tensors, metadata, beside[0], beside[1], (*notes, *stripped))


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """The names of the tensors that hold NaN or an infinity; reads every byte once."""
    return [name for name, tensor in tensors.items() if not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:  # torch does not add up 8-bit floats
        tensor = tensor.float()
    # A sum costs a fraction of looking at every element and cannot hide NaN or an infinity, but it can overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def without_prefixes(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Names without the `PREFIXES` that all of them share, again and again, and a note for each that went."""
    notes: list[str] = []
    while True:
        prefix = next((p for p in PREFIXES if all(name.startswith(p) and name != p for name in tensors)), None)
        if prefix is None:
            return tensors, notes
        tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        notes.append(f"prefix '{prefix}' removed from all names")


# ---- files

_Read = tuple[dict[str, Tensor], dict[str, str], list[str]]


def _from_file(path: Path) -> _Read:
    if not path.exists():
        raise WeightsError("no such file or folder", where=path)
    if not path.is_file():
        raise WeightsError("not a regular file", where=path)
    try:
        return _reader(path)(path)
    except OSError as error:
        raise WeightsError("cannot read", where=path, why=error.strerror or str(error)) from error


def _reader(path: Path) -> Callable[[Path], _Read]:
    """The function that reads this kind of file, known by its first bytes."""
    with open(path, "rb") as file:
        start = file.read(32)
    if start[:4] == b"PK\3\4":
        names = [member.name for member in members(path)]
        return _arrays if all(name.endswith(".npy") for name in names) else _pickle
    if start[8:9] == b"{" or (path.name.endswith(".safetensors") and not _foreign(start)):
        return _safetensors
    if start[:1] == b"\x80" and len(start) > 1 and start[1] <= 5:
        return _pickle
    size = path.stat().st_size
    word = start.split(b"\n")[0][:8].decode("ascii", errors="replace")
    readable = f" ('{word}')" if word.isprintable() and word.isascii() and word else ""
    why = _foreign(start) or (f"it begins with {start[:8].hex(' ')}{readable}" if size else "it is empty")
    hint = f"weights are {', '.join(SUFFIXES)}"
    raise WeightsError("not a file of weights", where=path, why=f"{size:,} bytes; {why}", hint=hint)


def _foreign(start: bytes) -> str | None:
    return next((f"this is {kind}" for first, kind in FOREIGN if start.startswith(first)), None)


def _safetensors(path: Path) -> _Read:
    tensors, metadata = read_safetensors(path)
    return tensors, metadata, []


def _arrays(path: Path) -> _Read:
    tensors, notes = read_npz(path)
    return tensors, {}, list(notes)


def _pickle(path: Path) -> _Read:
    tensors, notes = read_pickle(path)
    return tensors, {}, list(notes)


# ---- folders


def _from_folder(folder: Path) -> _Read:
    for name in WHOLE:
        if (folder / name).is_file():
            return _from_file(folder / name)
        if (folder / f"{name}.index.json").is_file():
            return _from_shards(folder, folder / f"{name}.index.json")
    for suffixes in (SUFFIXES[:1], SUFFIXES[1:]):
        found = sorted(entry for entry in folder.iterdir() if entry.is_file() and entry.name.endswith(suffixes))
        if len(found) == 1:
            return _from_file(found[0])
        if found:
            names = ", ".join(entry.name for entry in found[:8])
            raise WeightsError("several files of weights", where=folder, why=names, hint="name one of them")
    why = f"it holds none of {', '.join(WHOLE)}, and no file *{', *'.join(SUFFIXES)}"
    raise WeightsError("no weights in this folder", where=folder, why=why)


def _from_shards(folder: Path, index: Path) -> _Read:
    """The tensors of an index's `weight_map` (name → file of the same folder), in its order."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise WeightsError("damaged index of shards", where=index, why="there is no weight_map from names to files")
    shards: dict[str, dict[str, Tensor]] = {}
    metadata: dict[str, str] = {}
    notes = [f"{len(set(places.values()))} shards"]
    for shard in dict.fromkeys(places.values()):
        pure = PurePosixPath(shard)
        if pure.is_absolute() or ".." in pure.parts or "\\" in shard or ":" in shard or not pure.parts:
            raise WeightsError("an index points outside its folder", where=index, why=f"'{shard}'")
        # A link is followed: that is how Hugging Face's cache keeps its files.
        shards[shard], more, told = _from_file(folder / shard)
        metadata |= more
        notes += [note for note in told if note not in notes]
    for name, shard in places.items():
        if name not in shards[shard]:
            raise WeightsError("a shard lacks a tensor", where=folder / shard, why=f"'{name}', says {index.name}")
    extra = [name for shard, tensors in shards.items() for name in tensors if places.get(name) != shard]
    if extra:
        raise WeightsError("tensors that the index does not place there", where=index, why=", ".join(extra[:8]))
    return {name: shards[shard][name] for name, shard in places.items()}, metadata, notes


def _beside(path: Path, required: bool) -> tuple[Mapping[str, Any] | None, list[str]]:
    """A configuration beside the weights; where they are one file of many, a strange one is none of its."""
    if not path.is_file():
        return None, []
    try:
        return read_json(path), []
    except WeightsError as error:
        if required:
            raise
        return None, [f"{path.name} beside it was passed over: {error.why or error.what}"]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 8 MiB; `WeightsError` for anything else."""
    what = "cannot read a JSON file"
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise WeightsError(what, where=path, why=f"{path.stat().st_size:,} bytes; at most {LARGEST_JSON:,}")
        found = json.loads(path.read_bytes().decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(what, where=path, why=str(error)) from error
    if not isinstance(found, dict):
        raise WeightsError(what, where=path, why=f"it holds no object but a {type(found).__name__}")
    return found
