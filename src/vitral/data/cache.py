"""Pixels that were decoded once, kept on disk: a second epoch, and a second run with the same settings, only reads.

An entry is a folder named after its key:

    pixels.bin   uint8, picture after picture, each (C, H, W)
    index.npy    (n, 4) int64: offset in bytes, channels, height, width
    entry.json   what a person wants to know of it; its time of change is when the entry was last used

It is written in a folder with another name, which its builder holds locked, and renamed when all of it is on the disk:
what has the name of a key is whole. A builder that died holds no lock, and the next one removes what it left.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitral import __version__
from vitral.data.dataset import Split
from vitral.folders import cache_folder

FORMAT = 1
"""Of the files and of how pixels are made; another number makes all that are there be decoded anew."""

_PIXELS, _INDEX, _ABOUT = "pixels.bin", "index.npy", "entry.json"
_PART = ".part"  # ends the name of what is not whole
_KEY = re.compile(r"[0-9a-f]{40}")
_NOT_ONE = (OSError, EOFError, ValueError, KeyError, TypeError)  # what reading a damaged entry raises


def pixels_key(pictures: Split, settings: Mapping[str, Any]) -> str:
    """A hash of all that pixels follow from: equal keys mean equal pixels.

    In it: each picture's `Split.identity`, in order; `settings`, plain data that say what is made of a picture; and the
    programs that make it, with the processor's instructions, since kernels for others may round otherwise.
    """
    programs = {name: version(name) for name in ("torch", "torchvision", "numpy", "pillow")} | {"vitral": __version__}
    facts = [FORMAT, programs, torch.backends.cpu.get_cpu_capability(), dict(settings)]
    known = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=20)
    for index in range(len(pictures)):
        known.update(f"{pictures.identity(index)}\0".encode(errors="surrogateescape"))
    return known.hexdigest()


class Entry:
    """The pixels of a split, mapped into memory: what is not looked at is not read."""

    def __init__(self, path: Path):
        """Open the entry in this folder; one of `_NOT_ONE` where it is none, or damaged."""
        self.path = path
        self.info = EntryInfo.read(path)
        # Not copy-on-write, which Linux refuses for files larger than the memory.
        self._pixels = np.memmap(path / _PIXELS, np.uint8, "r").view(np.ndarray)
        self._index: np.ndarray = np.load(path / _INDEX, mmap_mode="r").view(np.ndarray)
        if self._index.shape != (self.info.pictures, 4) or self._pixels.size != self.info.nbytes:
            raise ValueError(f"damaged: {path}")

    def __reduce__(self) -> tuple[type[Entry], tuple[Path]]:
        return Entry, (self.path,)  # a worker maps the files itself; pickled arrays would be copies

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Tensor:
        """One picture, uint8 (C, H, W): a copy, since torch has no tensors that are only read."""
        offset, channels, height, width = self._index[i].tolist()
        pixels = self._pixels[offset : offset + channels * height * width]
        return torch.from_numpy(pixels.reshape(channels, height, width).copy())

    def gather(self, indices: np.ndarray, *, pinned: bool = False) -> Tensor:
        """Pictures that all have the size of the first, uint8 (B, C, H, W); `pinned` for a GPU to copy from."""
        _, channels, height, width = self._index[0].tolist()
        images = torch.empty(len(indices), channels, height, width, dtype=torch.uint8, pin_memory=pinned)
        rows = self._pixels.reshape(len(self), -1)
        # "clip" never comes to clip; "raise" would go through another buffer.
        np.take(rows, indices, axis=0, out=images.numpy().reshape(len(indices), -1), mode="clip")
        return images


@dataclass(frozen=True)
class EntryInfo:
    """What is told of an entry."""

    key: str
    title: str
    """Where its pictures come from, as a person knows them."""
    pictures: int
    nbytes: int
    """Of pixels."""
    last_used: float
    """Seconds since 1970."""

    @classmethod
    def read(cls, path: Path) -> EntryInfo:
        """Of the entry in this folder; one of `_NOT_ONE` where it is none, or damaged."""
        about = json.loads((path / _ABOUT).read_text("utf-8"))
        used = (path / _ABOUT).stat().st_mtime
        return cls(path.name, str(about["title"]), int(about["pictures"]), int(about["bytes"]), used)


class PixelCache:
    """Entries in a folder. Nothing in it is needed: it can be deleted at any time."""

    def __init__(self, folder: str | Path | None = None):
        """`folder`: by default `vitral/pixels` in the user's cache."""
        self.folder = Path(folder) if folder else cache_folder("pixels")

    def find(self, key: str, count: int) -> Entry | None:
        """The entry of this key with so many pictures, or None where there is none that is whole. It counts as used."""
        entry = _whole(self.folder / key)
        if entry is None or len(entry) != count:
            return None
        with contextlib.suppress(OSError):  # it may belong to someone else
            os.utime(entry.path / _ABOUT)
        return entry

    def build(self, key: str, count: int, title: str) -> Builder:
        """A builder of the entry of this key, to be used in a `with`."""
        return Builder(self.folder, key, count, title)

    @property
    def free_bytes(self) -> int:
        """Room on the disk; 0 where nothing can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self.folder).free
        except OSError:
            return 0

    def entries(self) -> list[EntryInfo]:
        """All entries, the last used first."""
        found = []
        for path in self._paths():
            with contextlib.suppress(*_NOT_ONE):
                found.append(EntryInfo.read(path))
        return sorted(found, key=lambda one: one.last_used, reverse=True)

    def clear(self) -> None:
        """Remove all entries, also damaged ones, and what dead builders left. OSError where that is not allowed.

        Who reads an entry meanwhile goes on: the files live until the last one that has mapped them ends.
        """
        if self.folder.is_dir():
            with _locked(self.folder):
                _sweep(self.folder)
                for path in self._paths():
                    _remove(path)

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.glob("*") if _KEY.fullmatch(path.name)]


class Builder:
    """An entry while it is written, picture by picture in the split's order, in a `with`.

    Where the disk refuses, what was written is removed at once, `failure` says why, and the rest does nothing. So it is
    where the `with` ends without `finish`.
    """

    def __init__(self, folder: Path, key: str, count: int, title: str):
        self.folder, self.key, self.title = folder, key, title
        self.failure: str | None = None
        self._index = np.zeros((count, 4), np.int64)
        self._written, self._bytes = 0, 0
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Builder:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self.folder):  # or another builder could sweep this one away before it has its own lock
                _sweep(self.folder)
                self._place = Path(tempfile.mkdtemp(prefix=".", suffix=_PART, dir=self.folder))
                self._cleanup.enter_context(_locked(self._place))
            self._cleanup.callback(shutil.rmtree, self._place, ignore_errors=True)
            self._file = open(self._place / _PIXELS, "wb")
            self._cleanup.callback(_close, self._file)
        except OSError as error:
            self._fail(error)
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def add(self, pixels: Tensor) -> None:
        """The next picture, uint8 (C, H, W)."""
        if self.failure:
            return
        try:
            self._file.write(pixels.contiguous().numpy().data)
        except OSError as error:
            self._fail(error)
        self._index[self._written] = (self._bytes, *pixels.shape)
        self._written += 1
        self._bytes += pixels.numel()

    def finish(self) -> Entry | None:
        """The entry, whole and on the disk; None where `failure` says why there is none."""
        if self.failure:
            return None
        if self._written != len(self._index):
            raise ValueError(f"{self._written} of {len(self._index)} pictures were added")
        try:
            self._write_rest()
            path = self.folder / self.key
            with _locked(self.folder):
                if (other := _whole(path)) is not None:  # another process was faster; what it built is the same
                    return other
                _remove(path)
                os.rename(self._place, path)
                _sync(self.folder)
            return Entry(path)
        except OSError as error:
            self._fail(error)
            return None

    def _write_rest(self) -> None:
        about = {"title": self.title, "pictures": self._written, "bytes": self._bytes}
        self._file.close()
        np.save(self._place / _INDEX, self._index)
        (self._place / _ABOUT).write_text(json.dumps(about), "utf-8")
        for path in (*self._place.iterdir(), self._place):
            _sync(path)

    def _fail(self, error: OSError) -> None:
        self.failure = f"the cache cannot be written: {error.strerror or error}"
        self._cleanup.close()


def _whole(path: Path) -> Entry | None:
    """The entry in this folder, or None where there is none that is whole."""
    try:
        return Entry(path)
    except _NOT_ONE:
        return None


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold the folder's lock; BlockingIOError where someone else holds it and this shall not wait.

    The system frees it when its holder ends, however that happens.
    """
    descriptor = os.open(folder, os.O_RDONLY)  # refused by Windows, which has no fcntl either: then nothing is cached
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing would not free it where a fork has the descriptor, too
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Remove what dead builders left. The folder is locked."""
    for path in folder.glob(f".*{_PART}"):
        with contextlib.suppress(OSError), _locked(path, wait=False):  # a living one holds its lock
            shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Remove an entry if there is one: first its name, so that what a crash leaves of it is not taken for it."""
    if path.exists():
        grave = Path(tempfile.mkdtemp(prefix=".", suffix=_PART, dir=path.parent))
        os.rename(path, grave / path.name)
        shutil.rmtree(grave)


def _sync(path: Path) -> None:
    """Wait until a file or a folder's list of files is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _close(file: Any) -> None:
    with contextlib.suppress(OSError):  # a full disk refuses the last bytes, too
        file.close()


def title_of(names: Sequence[str]) -> str:
    """Where pictures with these names come from: "photos/train", "cifar10.tar:train", "mnist/train"."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(names[0], names[-1], strict=False))
    shared = "".join(one for one, _ in pairs)
    end = max(map(shared.rfind, "/:["))
    return shared[:end] if end > 0 else names[0]
