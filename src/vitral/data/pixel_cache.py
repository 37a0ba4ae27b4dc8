"""On-disk cache of decoded pixels: the second epoch, and the next run with the same settings, only read.

An entry is a folder named after its key:

    pixels.bin   uint8, image after image, each (C, H, W)
    index.npy    (n, 6) int64: offset in bytes, channels, height, width, and the image's XXH3-128
    entry.json   title, sizes, and the index's digest; its modification time is when the entry was last used

A builder writes an entry to a locked temporary folder, flushes it to the disk, then renames it, so a folder named after
a key is complete. A builder that died holds no lock, and the next one removes its files.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from vitral import bounded
from vitral._version import __version__
from vitral.data.dataset import Split
from vitral.data.images.decode import DECODING
from vitral.digest import check, digest, sealed_json
from vitral.errors import DataError
from vitral.filesystem import flush, locked, mapped_array, move
from vitral.folders import cache_folder

FORMAT = 2
"""Version of the files; a new one invalidates all existing entries."""

_PIXELS, _INDEX, _ABOUT = "pixels.bin", "index.npy", "entry.json"
_PART = ".part"  # suffix of incomplete entries
_KEY = re.compile(r"[0-9a-f]{40}")
_DAMAGE = (OSError, EOFError, ValueError, KeyError, TypeError)  # raised when a damaged entry is read


def pixels_key(images: Split, settings: Mapping[str, object]) -> str:
    """Hash everything that determines the pixels: equal keys mean equal pixels.

    The hash covers each image's `Split.identity`, in order; `settings`, plain data that describe the preprocessing; and
    the versions of the libraries, with the CPU's instruction set, since other kernels may round differently.
    """
    programs = {name: version(name) for name in ("torch", "torchvision", "numpy", "pillow")} | {"vitral": __version__}
    header = [FORMAT, DECODING, programs, torch.backends.cpu.get_cpu_capability(), dict(settings)]
    hashed = hashlib.blake2b(json.dumps(header, sort_keys=True).encode(), digest_size=20)
    for index in range(len(images)):
        hashed.update(f"{images.identity(index)}\0".encode(errors="surrogateescape"))
    return hashed.hexdigest()


class Entry:
    """The pixels of a split, memory-mapped: only accessed images are read."""

    def __init__(self, path: Path):
        """Open the entry in this folder; one of `_DAMAGE` if it is missing or damaged."""
        self.path = path
        self.info = EntryInfo.read(path)
        index = (path / _INDEX).read_bytes()
        if digest(index) != self.info.index:
            raise ValueError(f"damaged: {path / _INDEX}")
        self._pixels = mapped_array(path / _PIXELS)
        whole: np.ndarray = np.load(io.BytesIO(index))
        if whole.shape != (self.info.images, 6) or self._pixels.size != self.info.nbytes:
            raise ValueError(f"damaged: {path / _PIXELS}")
        self._index, self._digests = whole[:, :4], np.ascontiguousarray(whole[:, 4:])

    def __reduce__(self) -> tuple[type[Entry], tuple[Path]]:
        return Entry, (self.path,)  # a worker maps the files again; pickled arrays would be copies

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Tensor:
        """One image, uint8 (C, H, W): a copy, since torch has no read-only tensors."""
        offset, channels, height, width = self._index[i].tolist()
        pixels = self._pixels[offset : offset + channels * height * width].copy()
        self._compare(pixels.reshape(1, -1), np.array([i]))
        return torch.from_numpy(pixels.reshape(channels, height, width))

    def gather(self, indices: np.ndarray, *, pinned: bool = False) -> Tensor:
        """Images of an entry with a single image size, uint8 (B, C, H, W), in pinned memory if `pinned`."""
        _, channels, height, width = self._index[0].tolist()
        images = torch.empty(len(indices), channels, height, width, dtype=torch.uint8, pin_memory=pinned)
        rows = self._pixels.reshape(len(self), -1)
        # No index is out of range, so "clip" never clips; "raise" would use another buffer.
        taken = images.numpy().reshape(len(indices), -1)
        np.take(rows, indices, axis=0, out=taken, mode="clip")
        self._compare(taken, indices)
        return images

    def verify(self) -> None:
        """Verify every image; `DataError` for the first one that differs from what was written."""
        for i in range(len(self)):
            self[i]

    def _compare(self, rows: np.ndarray, indices: np.ndarray) -> None:
        """Check uint8 rows against their digests, while the CPU caches hold them; `DataError` for a mismatch."""
        every, width = memoryview(rows.data).cast("B"), rows.shape[1]
        sums = [_sum(every[k * width : (k + 1) * width]) for k in range(len(rows))]
        expected = self._digests[indices].tobytes()
        if b"".join(sums) != expected:
            wrong = next(k for k, one in enumerate(sums) if one != expected[16 * k : 16 * k + 16])
            why = f"image {int(indices[wrong]) + 1} of {len(self)} is not what was written there"
            hint = "vitral data cache --clear; then the same command again, for a run with --resume"
            raise DataError("damaged pixels in the cache", where=self.path / _PIXELS, why=why, hint=hint)


def _sum(pixels: Any) -> bytes:
    return bytes(xxhash.xxh3_128_digest(pixels))


@dataclass(frozen=True)
class EntryInfo:
    """Description of an entry."""

    key: str
    title: str
    """Source of its images: "photos/train"."""
    images: int
    nbytes: int
    """Bytes of pixels."""
    last_used: float
    """Seconds since 1970."""
    index: str
    """Digest of the index."""

    @classmethod
    def read(cls, path: Path) -> EntryInfo:
        """Read the description of the entry in this folder; one of `_DAMAGE` if it is missing or damaged."""
        written = (path / _ABOUT).read_bytes()
        if not check(written):
            raise ValueError(f"damaged: {path / _ABOUT}")
        about = bounded.parse(written)
        used = (path / _ABOUT).stat().st_mtime
        return cls(path.name, str(about["title"]), int(about["images"]), int(about["bytes"]), used, str(about["index"]))


class PixelCache:
    """Entries in a folder, which can be deleted at any time."""

    def __init__(self, folder: str | Path | None = None):
        """`folder`: by default `vitral/pixels` in the user's cache."""
        self.folder = Path(folder) if folder else cache_folder("pixels")
        self.damage = ""
        """Reason that the last search did not use an existing entry."""

    def find(self, key: str, count: int) -> Entry | None:
        """Return the entry of this key if it is complete and has `count` images, else None. Marks it as used."""
        path = self.folder / key
        entry = _open_entry(path)
        self.damage = ""
        if entry is None or len(entry) != count:
            if path.exists():
                self.damage = f"{damage_of(path) or path} was damaged, so images are decoded again"
            return None
        with contextlib.suppress(OSError):  # it may belong to another user
            os.utime(entry.path / _ABOUT)
        return entry

    def build(self, key: str, count: int, title: str) -> Builder:
        """A builder of the entry of this key, for a `with` statement."""
        return Builder(self.folder, key, count, title)

    @property
    def free_bytes(self) -> int:
        """Free space on the disk; 0 if nothing can be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return shutil.disk_usage(self.folder).free
        except OSError:
            return 0

    def entries(self) -> list[EntryInfo]:
        """All entries, the most recently used first."""
        infos = []
        for path in self.paths():
            with contextlib.suppress(*_DAMAGE):
                infos.append(EntryInfo.read(path))
        return sorted(infos, key=lambda one: one.last_used, reverse=True)

    def clear(self) -> None:
        """Remove all entries, damaged ones included, and files of dead builders. OSError if that is not permitted.

        Concurrent readers are unaffected: the files live until the last process that has mapped them ends.
        """
        if self.folder.is_dir():
            with locked(_lock_of(self.folder), wait=True):
                _sweep(self.folder)
                for path in self.paths():
                    _remove(path)

    def paths(self) -> list[Path]:
        """The folders of all entries, damaged ones included."""
        return [path for path in self.folder.glob("*") if _KEY.fullmatch(path.name)]


class Builder:
    """Writer of an entry, image by image in the split's order, in a `with` statement.

    If the disk refuses a write, `failure` says why, the files are removed, and later calls do nothing. The files are
    also removed if the `with` ends without `finish`.
    """

    def __init__(self, folder: Path, key: str, count: int, title: str):
        self.folder, self.key, self.title = folder, key, title
        self.failure: str | None = None
        self._index = np.zeros((count, 6), np.int64)
        self._written, self._bytes = 0, 0
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> Builder:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Without this lock, another builder could remove the new folder before that is locked.
            with locked(_lock_of(self.folder), wait=True):
                _sweep(self.folder)
                self._place = Path(tempfile.mkdtemp(prefix=".", suffix=_PART, dir=self.folder))
                self._cleanup.enter_context(locked(_lock_of(self._place)))
            self._cleanup.callback(shutil.rmtree, self._place, ignore_errors=True)
            self._file = open(self._place / _PIXELS, "wb")
            self._cleanup.callback(_close, self._file)
        except OSError as error:
            self._fail(error)
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def add(self, pixels: Tensor) -> None:
        """Append an image, uint8 (C, H, W)."""
        if self.failure:
            return
        written = pixels.contiguous().numpy()
        try:
            self._file.write(written.data)
        except OSError as error:
            self._fail(error)
        self._index[self._written, :4] = (self._bytes, *pixels.shape)
        self._index[self._written, 4:] = np.frombuffer(_sum(written.reshape(-1)), np.int64)
        self._written += 1
        self._bytes += pixels.numel()

    def finish(self) -> Entry | None:
        """Complete the entry on the disk and open it; None after a `failure`."""
        if self.failure:
            return None
        if self._written != len(self._index):
            raise ValueError(f"{self._written} of {len(self._index)} images were added")
        try:
            self._write_rest()
            path = self.folder / self.key
            with locked(_lock_of(self.folder), wait=True):
                if (other := _open_entry(path)) is not None:  # another process has built it meanwhile
                    return other
                _remove(path)
                move(self._place, path)
                flush(self.folder)
            return Entry(path)
        except OSError as error:
            self._fail(error)
            return None

    def _write_rest(self) -> None:
        self._file.close()
        np.save(self._place / _INDEX, self._index)
        index = digest((self._place / _INDEX).read_bytes())
        about = {"title": self.title, "images": self._written, "bytes": self._bytes, "index": index}
        (self._place / _ABOUT).write_text(sealed_json(about), "utf-8")
        for path in (*self._place.iterdir(), self._place):
            flush(path)

    def _fail(self, error: OSError) -> None:
        self.failure = f"the cache cannot be written: {error.strerror or error}"
        self._cleanup.close()


def damage_of(path: Path) -> Path | None:
    """The damaged file of the entry in this folder; None if it can be opened."""
    try:
        info = EntryInfo.read(path)
    except _DAMAGE:
        return path / _ABOUT
    try:
        if digest((path / _INDEX).read_bytes()) != info.index:
            return path / _INDEX
    except OSError:
        return path / _INDEX
    return None if _open_entry(path) else path / _PIXELS


def _open_entry(path: Path) -> Entry | None:
    """Open the entry in this folder; None if it is missing or damaged."""
    try:
        return Entry(path)
    except _DAMAGE:
        return None


def _lock_of(folder: Path) -> Path:
    """The lock of a folder is beside an incomplete entry, which is renamed, and inside the folder of all."""
    return folder.with_name(f"{folder.name}.lock") if folder.name.endswith(_PART) else folder / ".lock"


def _sweep(folder: Path) -> None:
    """Remove the files of dead builders. The caller holds the folder's lock."""
    for path in folder.glob(f".*{_PART}"):
        with contextlib.suppress(OSError), locked(_lock_of(path)):  # a live builder holds its lock
            shutil.rmtree(path)


def _remove(path: Path) -> None:
    """Remove an entry if it exists: rename it first, so that a crash does not leave a partial entry under its name."""
    if path.exists():
        trash = Path(tempfile.mkdtemp(prefix=".", suffix=_PART, dir=path.parent))
        move(path, trash / path.name)
        shutil.rmtree(trash)


def _close(file: Any) -> None:
    with contextlib.suppress(OSError):  # closing flushes, which a full disk refuses, too
        file.close()


def title_of(names: Sequence[str]) -> str:
    """Common source of images with these names: "photos/train", "cifar10.tar:train", "mnist/train"."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(names[0], names[-1], strict=False))
    shared = "".join(one for one, _ in pairs)
    end = max(map(shared.rfind, "/:["))
    return shared[:end] if end > 0 else names[0]
