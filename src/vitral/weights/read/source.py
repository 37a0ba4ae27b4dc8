"""Read any file or folder of weights into tensors by name, without running any code it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from vitral import bounded
from vitral.errors import WeightsError, type_of
from vitral.weights.read.npz import read_npz
from vitral.weights.read.safetensors_mmap import printable, read_safetensors
from vitral.weights.read.unpickle import read_pickle
from vitral.weights.read.zip_entries import list_entries

PREFIXES = (
    "module.",
    "_orig_mod.",
    "model.",
    "network.",
    "net.",
    "backbone.",
    "encoder.",
    "student.",
    "teacher.",
    "ema_model.",
)
"""Prefixes of wrappers: DataParallel, torch.compile, Lightning, self-supervised trainers. No known format has one of
them before all its names (torchvision and Hugging Face have other names beside `encoder.`), so that a prefix shared by
all names is a wrapper's."""

SUFFIXES = (".safetensors", ".npz", ".bin", ".pth", ".pt", ".ckpt", ".pth.tar")
WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Names of a folder's weights; a `.index.json` with such a name lists shards."""
LARGEST_JSON = 8 * 2**20

FOREIGN = (
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras)"),
    (b"GGUF", "a GGUF file"),
    (b"\x1f\x8b", "compressed by gzip; unpack it first"),
    (b"version https://git-lfs", "a pointer of git-lfs, not the file; run git lfs pull"),
    (b"<!", "a web page; the download went wrong"),
    (b"<html", "a web page; the download went wrong"),
    (b"\xff\xd8\xff", "a JPEG image; the run or weights come first, then images"),
    (b"\x89PNG", "a PNG image; the run or weights come first, then images"),
)
"""First bytes of files mistaken for weights, and their kind."""


@dataclass(frozen=True, eq=False)
class Stated:
    """Properties stated by a network in memory; they override everything inferred."""

    fields: Mapping[str, Any]
    """Fields of the configuration."""
    preprocessing_from: str
    """Source of the preprocessing."""
    format: str | None = None
    """Name of the format of its tensors; None to detect it by their names."""
    scheme: str = ""
    """Scheme that resizes its positions; empty for that of the format."""


@dataclass(frozen=True, eq=False)
class Source:
    """Contents of a file or folder of weights; see `open_source`."""

    where: str
    """As typed."""
    tensors: dict[str, Tensor]
    """In the file's order; views of the mapped file where its format allows."""
    metadata: Mapping[str, str]
    """Of a safetensors header, else empty."""
    config: Mapping[str, Any] | None
    """`config.json` beside the weights; None where there is none."""
    preprocessor: Mapping[str, Any] | None
    """`preprocessor_config.json` beside them; None where there is none."""
    notes: tuple[str, ...]
    """Steps taken: unwrapped, renamed, left out."""
    stated: Stated | None = None
    """Properties stated by a network in memory; None for a file."""
    left: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    """Name → shape of tensors of the file that are no part of the network."""
    generation: Mapping[str, Any] | None = None
    """`generation_config.json` beside the weights; None where there is none."""


def open_source(path: Path) -> Source:
    """Read a file (safetensors, `.npz`, PyTorch's pickles) or a folder of Hugging Face's layout, whole or in shards.

    The first bytes decide the kind, not the name. A wrapper's prefix shared by all names is removed. Raises
    `WeightsError` for a missing, damaged, hostile or unknown file.
    """
    folder = path if path.is_dir() else path.parent
    if path.is_dir():
        tensors, metadata, notes = _from_folder(path)
    else:
        tensors, metadata, notes = _from_file(path)
    if not tensors:
        raise WeightsError("there are no tensors in this file", where=path)
    _refuse_quantized(tensors, path)
    tensors, stripped = without_prefixes(tensors)
    configs = []
    for name in ("config.json", "preprocessor_config.json", "generation_config.json"):
        config, more = _config(folder / name, required=path.is_dir())
        configs.append(config)
        stripped += more
    notes = [*notes, *stripped]
    return Source(str(path), tensors, metadata, configs[0], configs[1], tuple(notes), generation=configs[2])


def _refuse_quantized(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raise `WeightsError` for matrices of whole numbers: the scale that makes weights of them has no common place."""
    if whole := [name for name, one in tensors.items() if one.dtype in _WHOLE_NUMBERS and one.ndim > 1]:
        kind = str(tensors[whole[0]].dtype).removeprefix("torch.")
        why = f"{whole[0]} and others are {kind}" if len(whole) > 1 else f"{whole[0]} is {kind}"
        raise WeightsError(
            "quantized weights are not read", where=path, why=why, hint="take the file in fp32, bf16 or fp16"
        )


_WHOLE_NUMBERS = (torch.int8, torch.uint8, torch.int16)


def non_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """List the tensors that hold NaN or an infinity; reads every byte once."""
    return [name for name, tensor in tensors.items() if not _is_finite(tensor)]


def _is_finite(tensor: Tensor) -> bool:
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    if tensor.element_size() == 1:  # torch does not sum 8-bit floats
        tensor = tensor.float()
    # A sum costs a fraction of a check of every element and cannot hide NaN or an infinity, but it can overflow.
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def without_prefixes(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Remove the `PREFIXES` that all names share, repeatedly, with a note for each."""
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
        return _read_by_kind(path)
    except OSError as error:
        raise WeightsError("cannot read", where=path, why=error.strerror or str(error)) from error


def _read_by_kind(path: Path) -> _Read:
    """Read a file of the kind that its first bytes state."""
    with open(path, "rb") as file:
        start = file.read(32)
    is_zip = start[:4] == b"PK\3\4"
    if not is_zip and (start[8:9] == b"{" or (path.name.endswith(".safetensors") and not _foreign(start))):
        return *read_safetensors(path), []
    if is_zip or (start[:1] == b"\x80" and len(start) > 1 and start[1] <= 5):
        arrays = is_zip and all(entry.name.endswith(".npy") for entry in list_entries(path))
        tensors, notes = read_npz(path) if arrays else read_pickle(path)
        return tensors, {}, list(notes)
    size = path.stat().st_size
    word = start.split(b"\n")[0][:8].decode("ascii", errors="replace")
    readable = f" ('{word}')" if word.isprintable() and word.isascii() and word else ""
    why = _foreign(start) or (f"it begins with {start[:8].hex(' ')}{readable}" if size else "it is empty")
    hint = f"weights are {', '.join(SUFFIXES)}"
    raise WeightsError("not a file of weights", where=path, why=f"{size:,} bytes; {why}", hint=hint)


def _foreign(start: bytes) -> str | None:
    return next((f"this is {kind}" for first, kind in FOREIGN if start.startswith(first)), None)


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
    """Read the tensors of an index's `weight_map` (name → file of the same folder), in its order."""
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
        # Links are followed: Hugging Face's cache consists of them.
        shards[shard], more, inner = _from_file(folder / shard)
        metadata |= more
        notes += [note for note in inner if note not in notes]
    for name, shard in places.items():
        if name not in shards[shard]:
            raise WeightsError(
                "a tensor is missing in a shard", where=folder / shard, why=f"{index.name} lists '{name}'"
            )
    extra = [name for shard, tensors in shards.items() for name in tensors if places.get(name) != shard]
    if extra:
        raise WeightsError("a shard has tensors that the index does not list", where=index, why=", ".join(extra[:8]))
    return {name: shards[shard][name] for name, shard in places.items()}, metadata, notes


def _config(path: Path, required: bool) -> tuple[Mapping[str, object] | None, list[str]]:
    """Read a configuration next to the weights. Unless `required`, an unreadable one is ignored with a note: beside a
    single file of weights it may belong to something else.
    """
    if not path.is_file():
        return None, []
    try:
        return read_json(path), []
    except WeightsError as error:
        if required:
            raise
        return None, [f"ignored {path.name} beside it: {error.why or error.what}"]


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most 8 MiB; `WeightsError` for anything else."""
    what = "cannot read a JSON file"
    try:
        found = bounded.read(path, most_bytes=LARGEST_JSON)
    except (OSError, ValueError) as error:
        raise WeightsError(what, where=path, why=printable(str(error))) from error
    if not isinstance(found, dict):
        raise WeightsError(what, where=path, why=f"it holds {type_of(found)}, not an object")
    return found
