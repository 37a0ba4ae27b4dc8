"""Files in a folder or an archive, read where they lie.

An archive is never unpacked: its table of contents becomes an index of offsets, and a file is read with `os.pread`,
which has no position, so threads and forked processes share one handle. Only a compressed tar has no place to seek to;
its files are held in memory up to a limit. Names in an archive are only names: nothing is ever written.
"""

from __future__ import annotations

import gzip
import os
import posixpath
import struct
import tarfile
import weakref
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Protocol, cast

import numpy as np

from vitral.data.dataset import DataSet, Fetch, LazyNames, Split, in_order, index_labels, shown, some
from vitral.data.intake import EXTENSIONS, MAX_BYTES
from vitral.errors import DataError

HELD_LIMIT = 2 << 30
"""Bytes of a compressed tar that are held in memory, once decompressed."""

ARCHIVES = (".tar", ".zip", ".tar.gz", ".tgz")


class Files(Protocol):
    """A tree of regular files without the hidden ones."""

    where: str
    """As typed."""
    prefix: str
    """What before a path makes it a name that a person knows."""

    @property
    def paths(self) -> Sequence[str]:
        """Relative, with "/", sorted."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What was left out, a sentence each."""

    def has(self, path: str) -> bool:
        """Whether there is such a file."""

    def read(self, path: str, limit: int) -> bytes:
        """The content; ValueError above `limit` bytes, OSError where it cannot be read."""

    def fetch(self, paths: Sequence[str]) -> Fetch:
        """The contents of these files by number, at most `MAX_BYTES` each."""


def open_files(data: str) -> Files:
    """The files of the folder or archive at this path; `DataError` where an archive is damaged."""
    if os.path.isdir(data):
        return Folder(data)
    lower = data.lower()
    try:
        if lower.endswith(".zip"):
            return Zip(data)
        return Tar(data) if lower.endswith(".tar") else HeldTar(data)
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        NotImplementedError,
        OSError,
        EOFError,
        zlib.error,
        ValueError,
    ) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            "cannot read archive",
            where=data,
            why=f"damaged or not what its name says: {error}",
            hint=f"test it: {'unzip -t' if lower.endswith('.zip') else 'tar tf'} '{data}'",
        ) from error


def is_hidden(part: str) -> bool:
    """Files and folders that an operating system or a tool put there."""
    return part.startswith(".") or part in ("__MACOSX", "Thumbs.db", "desktop.ini", "lost+found")


def is_picture(path: str) -> bool:
    """Whether the extension is one of the short list."""
    return os.path.splitext(path)[1].lower() in EXTENSIONS


def common_folders(paths: Sequence[str]) -> list[str]:
    """The folders, outermost first, in which all of the paths lie."""
    first, last = min(paths).split("/")[:-1], max(paths).split("/")[:-1]
    shared = 0  # the common start of the first and the last in order is that of all
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return first[:shared]


def kinds(paths: Sequence[str]) -> str:
    """What files these are, by extension: ".txt (3), .json (1)"."""
    count = Counter(os.path.splitext(path)[1].lower() or "no extension" for path in paths)
    return some([f"{extension} ({n:,})" for extension, n in count.most_common()], 5)


def labelled(
    files: Files, name: str, where: str, rows: Mapping[str, tuple[list[str], list[str]]], notes: Sequence[str] = ()
) -> DataSet:
    """The data set of these files; `rows` has paths and class names for every split, `where` is for errors."""
    classes, labels = index_labels({split: texts for split, (_, texts) in rows.items()}, where)
    splits = {
        split: Split(Names(files.prefix, paths), labels[split], files.fetch(paths))
        for split, (paths, _) in rows.items()
    }
    return DataSet(name, classes, in_order(splits), where, tuple(notes))


@dataclass(frozen=True)
class Names(LazyNames):
    """The names of files below one place, joined only when asked for."""

    prefix: str
    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, i: int) -> str:
        path = self.paths[i]
        return shown(path if path.startswith("/") else self.prefix + path)

    def part(self, which: slice) -> Sequence[str]:
        return Names(self.prefix, self.paths[which])

    def within(self) -> list[str]:
        return list(self.paths)


# ---------------------------------------------------------------- folder


class Folder:
    """The files below a folder; links are followed, a link to a folder above itself is not."""

    def __init__(self, where: str):
        self.where, self.prefix = where, os.path.join(where, "")
        self.root = os.path.abspath(where)

    @cached_property
    def _listing(self) -> tuple[list[str], list[str]]:
        empty: list[str] = []
        try:
            return sorted(_walk(self.root, empty)), sorted(empty)
        except OSError as error:
            where = shown(error.filename or self.where)
            raise DataError("cannot read folder", where=where, why=error.strerror or str(error)) from error

    @property
    def paths(self) -> Sequence[str]:
        return self._listing[0]

    @property
    def notes(self) -> tuple[str, ...]:
        empty = self._listing[1]
        return (f"{len(empty):,} empty folders: {some(empty)}",) if empty else ()

    def has(self, path: str) -> bool:
        return os.path.isfile(os.path.join(self.root, path))

    def read(self, path: str, limit: int) -> bytes:
        return read_file(os.path.join(self.root, path), limit)

    def fetch(self, paths: Sequence[str]) -> Fetch:
        return FolderFetch(self.root, paths)


def _walk(root: str, empty: list[str]) -> Iterator[str]:
    """Paths of regular files below the root; the empty folders are added to the list."""
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while todo:
        prefix, above = todo.pop()
        folder = os.path.join(root, prefix)
        status = os.stat(folder)
        here = (status.st_dev, status.st_ino)
        if here in above:
            continue
        with os.scandir(folder) as entries:
            kept = [entry for entry in entries if not is_hidden(entry.name)]
        if not kept and prefix:
            empty.append(prefix.rstrip("/"))
        for entry in kept:
            if entry.is_dir():
                todo.append((f"{prefix}{entry.name}/", above | {here}))
            elif entry.is_file():  # no pipes, sockets or devices, no dangling links
                yield prefix + entry.name


@dataclass(frozen=True)
class FolderFetch:
    """Files below `root` (absolute) by number."""

    root: str
    paths: Sequence[str]

    def __call__(self, i: int) -> bytes:
        return read_file(os.path.join(self.root, self.paths[i]), MAX_BYTES)

    def identity(self, i: int) -> str:
        path = os.path.join(self.root, self.paths[i])
        return _state(path, os.stat(path))


def _state(path: str, status: os.stat_result) -> str:
    """What changes with a file that is written again, unless its time is set back and its size is the same."""
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def read_file(path: str | Path, limit: int) -> bytes:
    """The content of a regular file; ValueError above `limit` bytes."""
    with open(path, "rb") as file:
        _check_size(os.fstat(file.fileno()).st_size, limit)
        return file.read(limit + 1)


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(f"{size:,} bytes; the limit is {limit:,}")


# ---------------------------------------------------------------- archives


class Handle:
    """A file that threads and forked processes read at any offset; pickling opens it anew."""

    def __init__(self, path: str):
        self.path = os.path.abspath(path)
        self._open()

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        weakref.finalize(self, os.close, self._descriptor)

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.path = state["path"]
        self._open()

    @property
    def state(self) -> str:
        """What changes when the file is written again."""
        return _state(self.path, os.fstat(self._descriptor))

    def up_to(self, offset: int, size: int) -> bytes:
        """The `size` bytes from `offset`, or as many as there are."""
        return os.pread(self._descriptor, size, offset)

    def read(self, offset: int, size: int) -> bytes:
        """Exactly `size` bytes from `offset`; OSError where the file is shorter."""
        data = self.up_to(offset, size)
        if len(data) != size:
            raise OSError("the archive ends inside this file (was it changed?)")
        return data


@dataclass
class _Contents:
    """The table of contents while an archive is listed, with what was left out and why."""

    members: dict[str, int] = field(default_factory=dict)
    """Path -> row; the later of two files with one name counts, as when unpacking."""
    left_out: dict[str, list[str]] = field(default_factory=dict)
    rows: int = 0

    def add(self, name: str) -> bool:
        """Whether the file is wanted; if so, it has the next row."""
        path = posixpath.normpath(name)
        if name.startswith("/") or path.startswith("..") or "\0" in name:
            return self.leave(name, "with a path that leads out of the archive")
        if any(is_hidden(part) for part in path.split("/")):
            return False
        self.members[path] = self.rows
        self.rows += 1
        return True

    def leave(self, name: str, why: str) -> bool:
        self.left_out.setdefault(why, []).append(name)
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        return tuple(f"left out {len(names):,} files {why}: {some(names)}" for why, names in self.left_out.items())


class _Archive:
    """What the archives share: names, and reading through an index from path to row."""

    where: str
    prefix: str
    members: dict[str, int]
    paths: Sequence[str]
    notes: tuple[str, ...]

    def _keep(self, where: str, contents: _Contents) -> None:
        self.where, self.prefix = where, f"{where}:"
        self.members, self.paths, self.notes = contents.members, sorted(contents.members), contents.notes

    def has(self, path: str) -> bool:
        return path in self.members

    def _rows(self, paths: Sequence[str]) -> np.ndarray:
        return np.array([self.members[path] for path in paths], np.int64)


class Tar(_Archive):
    """The files of an uncompressed tar."""

    def __init__(self, where: str):
        contents = _Contents()
        places: list[tuple[int, int]] = []
        with tarfile.open(where, "r:") as tar:
            places.extend((member.offset_data, member.size) for member in _members(tar, contents))
            end = tar.offset
        self._keep(where, contents)
        self._handle = Handle(where)
        self._places = np.array(places, np.int64).reshape(-1, 2)
        self._check_end(end)

    def _check_end(self, offset: int) -> None:
        """tarfile ends quietly at a damaged header, and a set would lose its second half without a word."""
        block = self._handle.up_to(offset, tarfile.BLOCKSIZE)
        if not block:
            self.notes += ("the archive has no end mark: it may have been cut off",)
        elif block.strip(b"\0") or len(block) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f"no file header at byte {offset:,}")

    def read(self, path: str, limit: int) -> bytes:
        offset, size = self._places[self.members[path]].tolist()
        _check_size(size, limit)
        return self._handle.read(offset, size)

    def fetch(self, paths: Sequence[str]) -> Fetch:
        return TarFetch(self._handle, self._places[self._rows(paths)])


def _members(tar: tarfile.TarFile, contents: _Contents) -> Iterator[tarfile.TarInfo]:
    """The regular files of a tar that are wanted, in order."""
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # it would keep a kilobyte for every file
        if member.size < 0 or member.offset_data < 0:
            raise tarfile.ReadError(f"negative size of {shown(member.name)}")
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            contents.leave(member.name, "that are links, devices or sparse")
        elif contents.add(member.name):
            yield member


@dataclass(frozen=True)
class TarFetch:
    """Files of a tar by number."""

    handle: Handle
    places: np.ndarray
    """(n, 2) int64: offset and size in bytes."""

    def __call__(self, i: int) -> bytes:
        offset, size = self.places[i].tolist()
        _check_size(size, MAX_BYTES)
        return self.handle.read(offset, size)

    def identity(self, i: int) -> str:
        return f"{self.handle.state} {self.places[i].tolist()}"


class HeldTar(_Archive):
    """The files of a gzip-compressed tar, held in memory."""

    def __init__(self, where: str, limit: int = HELD_LIMIT):
        contents = _Contents()
        held: list[bytes] = []
        with gzip.open(where, "rb") as stream:
            limited = cast(IO[bytes], _Limited(stream, limit, where))
            with tarfile.open(fileobj=limited, mode="r|") as tar:
                for member in _members(tar, contents):
                    file = tar.extractfile(member)
                    held.append(file.read() if file else b"")
            while limited.read(1 << 20):  # gzip verifies its checksum at the end
                pass
        self._keep(where, contents)
        self._held = held

    def read(self, path: str, limit: int) -> bytes:
        data = self._held[self.members[path]]
        _check_size(len(data), limit)
        return data

    def fetch(self, paths: Sequence[str]) -> Fetch:
        return HeldFetch([self._held[row] for row in self._rows(paths)])


class _Limited:
    """A stream that refuses to give more than `limit` bytes, so that a small file cannot fill the memory."""

    def __init__(self, stream: gzip.GzipFile, limit: int, where: str):
        self.stream, self.limit, self.where, self.given = stream, limit, where, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(min(size, 1 << 20))
        self.given += len(data)
        if self.given > self.limit:
            raise DataError(
                "compressed archive is too large to hold in memory",
                where=self.where,
                why=f"it holds more than {self.limit:,} bytes, and a compressed tar cannot be read in place",
                hint="make it a .tar or a .zip, which are read as they lie, or unpack it and give the folder",
            )
        return data


@dataclass(frozen=True)
class HeldFetch:
    """Files in memory by number."""

    contents: Sequence[bytes]

    def __call__(self, i: int) -> bytes:
        _check_size(len(self.contents[i]), MAX_BYTES)
        return self.contents[i]


class Zip(_Archive):
    """The files of a zip, stored or deflated."""

    def __init__(self, where: str):
        contents = _Contents()
        places: list[tuple[int, int, int, int, int]] = []
        with zipfile.ZipFile(where) as archive:
            for member in archive.infolist():
                # Some packers on Windows write "cat\1.jpg".
                name = member.filename if "/" in member.filename else member.filename.replace("\\", "/")
                if name.endswith("/"):
                    continue
                if member.flag_bits & 1:
                    contents.leave(name, "that are encrypted")
                elif member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    contents.leave(name, "with a compression other than deflate")
                elif (member.external_attr >> 16) & 0o170000 == 0o120000:
                    contents.leave(name, "that are links, devices or sparse")
                elif contents.add(name):
                    deflated = int(member.compress_type == zipfile.ZIP_DEFLATED)
                    place = (member.header_offset, member.compress_size, member.file_size, deflated, member.CRC)
                    places.append(place)
        self._keep(where, contents)
        self._handle = Handle(where)
        self._places = np.array(places, np.int64).reshape(-1, 5)

    def read(self, path: str, limit: int) -> bytes:
        return _unzip(self._handle, self._places[self.members[path]], limit)

    def fetch(self, paths: Sequence[str]) -> Fetch:
        return ZipFetch(self._handle, self._places[self._rows(paths)])


@dataclass(frozen=True)
class ZipFetch:
    """Files of a zip by number."""

    handle: Handle
    places: np.ndarray
    """(n, 5) int64: offset of the local header, compressed size, size, 1 if deflated, CRC-32."""

    def __call__(self, i: int) -> bytes:
        return _unzip(self.handle, self.places[i], MAX_BYTES)

    def identity(self, i: int) -> str:
        return f"{self.handle.state} {self.places[i].tolist()}"


def _unzip(handle: Handle, place: np.ndarray, limit: int) -> bytes:
    """One file of a zip; never makes more bytes than the table of contents says."""
    header, packed, size, deflated, crc = place.tolist()
    _check_size(max(packed, size), limit)
    # PKWARE APPNOTE 4.3.7: a local header of 30 bytes, the lengths of name and extra field at 26.
    local = handle.read(header, 30)
    if local[:4] != b"PK\x03\x04":
        raise OSError("damaged zip: no file where the table of contents says")
    name_length, extra_length = struct.unpack("<HH", local[26:30])
    data = handle.read(header + 30 + name_length + extra_length, packed)
    if deflated:
        try:
            data = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, size + 1)
        except zlib.error as error:
            raise OSError(f"damaged zip: {error}") from error
    if len(data) != size or zlib.crc32(data) != crc:
        raise OSError("damaged zip: size or checksum differs from the table of contents")
    return data
