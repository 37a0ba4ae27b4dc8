"""The index of the shards of one split, memory-mapped, and the manifest that names its files."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from vitral import bounded
from vitral.atomic import replacing, write_text
from vitral.data.dataset import SPLITS
from vitral.digest import KIND, check, sealed_json
from vitral.errors import DataError
from vitral.filesystem import mapped_array

MANIFEST = "shards.json"
RECORD = np.dtype([("offset", "<u8"), ("size", "<u4"), ("label", "<u4"), ("name", "<u8"), ("digest", "<u8")])
"""A record: place of its image in the shard, number of its class, end of its name in the names, and the XXH3-64 of its
image (0 if unknown). Records are in the order of the shards, and of their offsets within one."""

_FORMAT = "vitral-shards-1"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError)


@dataclass(frozen=True)
class Shard:
    """One tar file."""

    name: str
    """File name, or the path that a pattern matched."""
    records: int
    bytes: int
    sha256: str = ""
    """Hexadecimal; empty if unknown."""


@dataclass(frozen=True, eq=False)
class Index:
    """Shards of one split and their records. Pickling it reopens the files."""

    shards: tuple[Shard, ...]
    records: np.ndarray
    """(n,) `RECORD`."""
    names: np.ndarray
    """uint8: all names in UTF-8."""
    digest: str
    """Digest of records and names."""
    files: tuple[str, str] | None = None
    """Paths of records and names, if they are memory-mapped."""
    starts: np.ndarray = field(init=False)
    """(shards + 1,) int64: number of the first record of each shard, and the number of records."""

    def __post_init__(self) -> None:
        starts = np.cumsum([0, *(shard.records for shard in self.shards)], dtype=np.int64)
        object.__setattr__(self, "starts", starts)

    def __len__(self) -> int:
        return len(self.records)

    def __reduce__(self) -> Any:
        if self.files is None:
            return Index, (self.shards, self.records, self.names, self.digest)
        return _mapped, (self.shards, self.files, self.digest)

    def shard_of(self, records: np.ndarray | int) -> Any:
        """Number of the shard of a record, or of each of many."""
        return np.searchsorted(self.starts, records, side="right") - 1

    @cached_property
    def has_digests(self) -> bool:
        """True if the checksum of every record is known."""
        return bool(np.all(self.records["digest"] != 0))

    def name(self, i: int) -> str:
        """Name of a record, as it was in the data that were sharded."""
        start = int(self.records["name"][i - 1]) if i else 0
        return self.names[start : int(self.records["name"][i])].tobytes().decode("utf-8", "surrogateescape")

    def check(self, classes: int) -> None:
        """Raise `ValueError` for rows that point outside their shard, the names or the classes."""
        sizes = np.repeat([shard.bytes for shard in self.shards], np.diff(self.starts))
        if len(self.records) != self.starts[-1]:
            raise ValueError(f"{len(self.records):,} rows for {int(self.starts[-1]):,} records")
        ends = self.records["name"]
        whole = (
            np.all(self.records["offset"] + self.records["size"] <= sizes)
            and np.all(self.records["label"] < classes)
            and np.all(ends[1:] >= ends[:-1])
            and (not len(ends) or int(ends[-1]) == len(self.names))
        )
        if not whole:
            raise ValueError("rows point outside the shards, the names or the classes")


def _mapped(shards: tuple[Shard, ...], files: tuple[str, str], digest: str) -> Index:
    records, names = files
    rows = _loaded(records)
    if rows.dtype != RECORD or rows.ndim != 1:
        raise ValueError(f"{records} is not an index")
    return Index(shards, rows.view(np.ndarray), mapped_array(names), digest, files)


def _loaded(records: str) -> np.ndarray:
    """Map the rows, or read them where the disk refuses maps."""
    try:
        found: np.ndarray = np.load(records, mmap_mode="r", allow_pickle=False)
    except OSError:
        found = np.load(records, allow_pickle=False)
    return found


def digest_of(records: np.ndarray, names: np.ndarray) -> str:
    """Digest of an index: XXH3-128 of its records, then of its names."""
    state = xxhash.xxh3_128(np.ascontiguousarray(records).view(np.uint8).data)
    state.update(np.ascontiguousarray(names).data)
    return KIND + state.hexdigest()


@dataclass(frozen=True, eq=False)
class Manifest:
    """Everything in a folder of shards besides the images."""

    name: str
    classes: tuple[str, ...]
    splits: Mapping[str, Index]
    notes: tuple[str, ...] = ()

    def save(self, folder: Path) -> None:
        """Write the indices, then `shards.json`, which completes the folder."""
        splits = {}
        for split, index in self.splits.items():
            records, names = index_files(folder, split)
            with replacing(records) as temporary, open(temporary, "wb") as file:
                np.save(file, index.records, allow_pickle=False)
            with replacing(names) as temporary:
                index.names.tofile(temporary)
            rows = [[shard.name, shard.records, shard.bytes, shard.sha256] for shard in index.shards]
            splits[split] = {"records": len(index), "index": index.digest, "shards": rows}
        about = {
            "format": _FORMAT,
            "name": self.name,
            "classes": list(self.classes),
            "notes": list(self.notes),
            "splits": splits,
        }
        write_text(folder / MANIFEST, sealed_json(about, indent=None))

    @classmethod
    def read(cls, folder: Path, *, plain_names: bool = True) -> Manifest:
        """Read a folder's manifest and map its indices; `DataError` if one is missing or damaged.

        `plain_names`: shards must be files of the folder itself. Reads every byte of the indices once.
        """
        try:
            about = _parse(folder / MANIFEST)
            classes = tuple(map(str, about["classes"]))
            splits = {}
            for split, entry in about["splits"].items():
                if split not in SPLITS:
                    raise ValueError(f"unknown split '{split}'")
                shards = tuple(
                    Shard(str(n), int(count), int(size), str(sha)) for n, count, size, sha in entry["shards"]
                )
                if plain_names and (odd := [one.name for one in shards if one.name != posixpath.basename(one.name)]):
                    raise ValueError(f"a shard outside the folder: {odd[0]}")
                records, names = (str(path.absolute()) for path in index_files(folder, split))
                splits[split] = _checked(_mapped(shards, (records, names), entry["index"]), classes)
            return cls(str(about["name"]), classes, splits, tuple(map(str, about["notes"])))
        except _DAMAGE as error:
            what = "cannot read the index of the shards"
            hint = f"copy {MANIFEST}, *.index.npy and *.names again, or write the shards again: vitral data shard"
            raise DataError(what, where=folder, why=" ".join(str(error).split()), hint=hint) from error


def _parse(path: Path) -> Any:
    written = path.read_bytes()
    if not check(written):
        raise ValueError(f"{path.name} has no digest")
    about = bounded.parse(written)
    if about["format"] != _FORMAT:
        raise ValueError(f"{path.name} has the format {about['format']}; {_FORMAT} is read")
    return about


def _checked(index: Index, classes: Sequence[str]) -> Index:
    if digest_of(index.records, index.names) != index.digest:
        raise ValueError("the index has changed since it was written")
    index.check(len(classes))
    return index


def index_files(folder: Path, split: str) -> tuple[Path, Path]:
    """Paths of a split's records and names."""
    return folder / f"{split}.index.npy", folder / f"{split}.names"
