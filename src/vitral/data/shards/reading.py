"""Records of shards as images of a data set: names on access, one read at an offset for each image."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash

from vitral.data.archives import Handle
from vitral.data.dataset import DataSet, LazyNames, Split, in_order
from vitral.data.files import check_size, file_state
from vitral.data.images.decode import MAX_BYTES
from vitral.data.shards.index import Index, Manifest, Shard
from vitral.wording import shown, some

OPEN_FILES = 64
"""Shards that a process holds open."""


class Store(Protocol):
    """The place of the shards. Picklable and thread-safe."""

    @property
    def prefix(self) -> str:
        """Prefix that turns the name of a shard into one for messages."""

    @property
    def is_remote(self) -> bool:
        """True if reading in the order of the shards is much cheaper than in another."""

    def open(self, shard: Shard) -> Handle:
        """Open the shard's file; OSError if there is none."""

    def read(self, shard: Shard, offset: int, size: int) -> bytes | None:
        """Read one record of a shard that is not open; None if the shard is to be opened instead."""

    def drop(self, shard: Shard) -> bool:
        """Forget a file whose bytes are wrong; True if opening the shard again may give others."""

    def state(self, shard: Shard) -> str:
        """A string that differs after the shard has changed."""


@dataclass(frozen=True)
class LocalStore:
    """Shards in a folder, or anywhere if their names are absolute."""

    folder: str
    """Absolute."""
    prefix: str
    is_remote: bool = False

    def path(self, shard: Shard) -> str:
        """Path of a shard's file."""
        return os.path.join(self.folder, shard.name)

    def size(self, shard: Shard) -> int | None:
        """Size of a shard's file in bytes; None if there is none that can be read."""
        try:
            return os.stat(self.path(shard)).st_size
        except OSError:
            return None

    def open(self, shard: Shard) -> Handle:
        try:
            return Handle(self.path(shard))
        except FileNotFoundError as error:  # the image has a name of its own, in which the shard's is one part
            raise FileNotFoundError(error.errno, f"{os.path.basename(shard.name)} is missing") from error

    def read(self, shard: Shard, offset: int, size: int) -> bytes | None:
        return None

    def drop(self, shard: Shard) -> bool:
        return False

    def state(self, shard: Shard) -> str:
        return file_state(shard.name, os.stat(self.path(shard)))


class _Handles:
    """The open shards of a process: the most recently used ones."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Handle] = OrderedDict()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[_Handles], tuple[()]]:
        return _Handles, ()

    def get(self, shard: Shard) -> Handle | None:
        """The handle of a shard, if it is open."""
        with self._lock:
            if handle := self._open.get(shard.name):
                self._open.move_to_end(shard.name)
            return handle

    def put(self, shard: Shard, handle: Handle) -> Handle:
        """Hold a handle; the least recently used one is closed when the last thread that reads it is done."""
        with self._lock:
            self._open[shard.name] = handle
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)
            return handle

    def drop(self, shard: Shard) -> None:
        """Forget the handle of a shard."""
        with self._lock:
            self._open.pop(shard.name, None)


@dataclass(frozen=True, eq=False)
class ShardFetch:
    """Fetch of the images in shards."""

    index: Index
    store: Store
    _handles: _Handles

    def __call__(self, i: int) -> bytes:
        record = self.index.records[i]
        check_size(int(record["size"]), MAX_BYTES)
        shard = self.index.shards[self.index.shard_of(i)]
        data = self._read(shard, record)
        if not _is_whole(data, record):
            self._handles.drop(shard)  # before the file: Windows removes none that is open
            if self.store.drop(shard):
                data = self._read(shard, record)
        if not _is_whole(data, record):
            raise OSError(f"its bytes are not those that were written into {os.path.basename(shard.name)}")
        return data

    def _read(self, shard: Shard, record: Any) -> bytes:
        offset, size = int(record["offset"]), int(record["size"])
        handle = self._handles.get(shard)
        if handle is None:
            if (data := self.store.read(shard, offset, size)) is not None:
                return data
            handle = self._handles.put(shard, self.store.open(shard))
        return handle.read(offset, size)

    def shard_numbers(self, index: np.ndarray) -> np.ndarray:
        """Number of the shard of each of these images."""
        return np.asarray(self.index.shard_of(index))

    def prefetch(self, shard: int) -> None:
        """Make a local copy of a shard; OSError if that is not possible."""
        self.store.open(self.index.shards[shard])

    def size(self, i: int) -> int:
        return int(self.index.records[i]["size"])

    def identity(self, i: int) -> str:
        record = self.index.records[i]
        if record["digest"]:
            return f"{record['size']} {record['digest']}"
        return f"{self.store.state(self.index.shards[self.index.shard_of(i)])} {record['offset']} {record['size']}"


def _is_whole(data: bytes, record: Any) -> bool:
    """True if the bytes are those that were written, or if that is unknown."""
    return not record["digest"] or xxhash.xxh3_64_intdigest(data) == int(record["digest"])


@dataclass(frozen=True, eq=False)
class ShardNames(LazyNames):
    """Names of records, read from the index: "shards/train-000000.tar:cat/1.jpg"."""

    source: Index
    prefix: str
    first: int
    total: int

    def __len__(self) -> int:
        return self.total

    def name(self, i: int) -> str:
        record = self.first + range(self.total)[i]
        shard = self.source.shards[self.source.shard_of(record)]
        return shown(f"{self.prefix}{shard.name}:{self.source.name(record)}")

    def part(self, which: slice) -> Sequence[str]:
        numbers = range(self.total)[which]
        if numbers.step != 1:
            return [self.name(i) for i in numbers]
        return ShardNames(self.source, self.prefix, self.first + numbers.start, len(numbers))

    def relative(self) -> list[str]:
        return [self.source.name(self.first + i) for i in range(self.total)]

    @property
    def digest(self) -> str:
        """Digest that stands for all names, so that a fingerprint does not build millions of them."""
        return f"{self.source.digest} {self.first} {self.total}"


def dataset_of(
    manifest: Manifest, store: Store, source: str, shards: Mapping[str, Sequence[int]] | None = None
) -> DataSet:
    """Return the data set of a manifest. `shards` selects some by number, split by split."""
    splits = {}
    for split, index in manifest.splits.items():
        images = Split(
            ShardNames(index, store.prefix, 0, len(index)),
            index.records["label"].astype(np.int64),
            ShardFetch(index, store, _Handles()),
        )
        if shards is not None:
            ranges = [np.arange(index.starts[k], index.starts[k + 1]) for k in shards.get(split, ())]
            images = images.select(np.concatenate(ranges)) if ranges else images.select([])
        if len(images):
            splits[split] = images
    return DataSet(manifest.name, manifest.classes, in_order(splits), source, manifest.notes)


def defects(
    manifest: Manifest, size: Callable[[Shard], int | None], shards: Mapping[str, Sequence[int]] | None = None
) -> tuple[str, ...]:
    """Describe shards that are missing or of another size, with the number of images in them, a sentence a split.

    `size` of a shard is None if it is missing. `shards` selects some by number, split by split.
    """
    notes = []
    for split, index in manifest.splits.items():
        numbers = range(len(index.shards)) if shards is None else shards.get(split, ())
        bad = []
        for shard in map(index.shards.__getitem__, numbers):
            found = size(shard)
            if found != shard.bytes:
                bad.append((shard, "missing" if found is None else f"{found:,} bytes instead of {shard.bytes:,}"))
        if bad:
            records = sum(shard.records for shard, _ in bad)
            named = some(f"{shard.name} ({why})" for shard, why in bad)
            notes.append(f"{len(bad):,} of {len(numbers):,} shards, with {records:,} images, are broken: {named}")
    return tuple(notes)


def sha256_of(path: str | Path, *, chunk: int = 1 << 20) -> str:
    """SHA-256 of a file, hexadecimal."""
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(chunk):
            hashed.update(block)
    return str(hashed.hexdigest())
