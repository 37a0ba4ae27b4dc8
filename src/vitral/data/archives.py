"""Files in `.zip` and `.tar` archives, read in place.

An archive is never unpacked: its table of contents becomes an index of offsets, and a file is read at its offset,
without a file position, so threads and forked processes share one handle. A compressed tar is not seekable; its
files are held in memory up to a limit. Nothing is ever written to a path named in an archive.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import IO, cast

import numpy as np

from vitral.data.dataset import Fetch
from vitral.data.files import Files, Folder, LeftOut, check_size, file_state, is_hidden
from vitral.data.images.decode import MAX_BYTES
from vitral.data.spellings import by_composed, nfc
from vitral.errors import DataError
from vitral.filesystem import read_at
from vitral.wording import shown

MEMORY_LIMIT = 1 << 30
"""Limit of a compressed tar's size in memory, in bytes after decompression."""

FREE_BYTES = 64 << 20
MOST_EXPANSION = 100
"""Largest expansion factor of a compressed tar, above `FREE_BYTES`. gzip reaches 1030 at most; raw pixels of digits
reach 10."""
ARCHIVES = (".tar", ".zip", ".tar.gz", ".tgz")


def open_files(data: str) -> Files:
    """Open the folder or archive at this path; `DataError` for a damaged archive."""
    if os.path.isdir(data):
        return Folder(data)
    lower = data.lower()
    try:
        if lower.endswith(".zip"):
            return Zip(data)
        return Tar(data) if lower.endswith(".tar") else InMemoryTar(data)
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
        why = f"damaged, or of another format than its extension: {error}"
        hint = f"test it: {'unzip -t' if lower.endswith('.zip') else 'tar tf'} '{data}'"
        raise DataError("cannot read archive", where=data, why=why, hint=hint) from error


class Handle:
    """A file that threads and forked processes read at any offset; unpickling reopens it."""

    def __init__(self, path: str):
        self.path = os.path.realpath(path)
        self._open()

    def _open(self) -> None:
        file = open(self.path, "rb", buffering=0)  # noqa: SIM115 - closed with this object
        self._descriptor = file.fileno()
        weakref.finalize(self, file.close)

    def __getstate__(self) -> dict[str, str]:
        return {"path": self.path}

    def __setstate__(self, state: dict[str, str]) -> None:
        self.path = state["path"]
        self._open()

    @property
    def state(self) -> str:
        """A string that changes when the file is rewritten."""
        return file_state(self.path, os.fstat(self._descriptor))

    def read_up_to(self, offset: int, size: int) -> bytes:
        """Read `size` bytes from `offset`, fewer at the end of the file."""
        return read_at(self._descriptor, size, offset)

    def read(self, offset: int, size: int) -> bytes:
        """Read exactly `size` bytes from `offset`; OSError if the file is shorter."""
        data = self.read_up_to(offset, size)
        if len(data) != size:
            raise OSError("the archive ends inside this file (was it changed?)")
        return data


@dataclass
class Listing:
    """An archive's table of contents while it is read, with skipped files and the reasons."""

    members: dict[str, int] = field(default_factory=dict)
    """Path -> row. Of two files with the same name the later one counts, as when unpacking."""
    left: LeftOut = field(default_factory=LeftOut)
    rows: int = 0

    def add(self, name: str) -> bool:
        """True if the file is listed; it then has the next row."""
        path = posixpath.normpath(name)
        if name.startswith("/") or path.startswith("..") or "\0" in name:
            return self.skip(name, "with a path outside the archive")
        if any(is_hidden(part) for part in path.split("/")):
            return False
        if path in self.members:
            self.skip(name, "whose name comes again")
        self.members[path] = self.rows
        self.rows += 1
        return True

    def skip(self, name: str, why: str) -> bool:
        """Record a skipped file; False, for `add` to return."""
        self.left.add("file", why, name)
        return False


class _Archive:
    """Base of the archives: names, and an index from path to row."""

    where: str
    prefix: str
    members: dict[str, int]
    paths: Sequence[str]
    notes: tuple[str, ...]
    left: LeftOut

    def _set_listing(self, where: str, listing: Listing) -> None:
        self.where, self.prefix = where, f"{where}:"
        self.members, self.paths, self.notes = listing.members, sorted(listing.members), listing.left.notes
        self.left = listing.left

    def find(self, path: str) -> str | None:
        if path in self.members or path.isascii():
            return path if path in self.members else None
        alike = self._composed.get(nfc(path), ())
        return alike[0] if len(alike) == 1 else None

    @cached_property
    def _composed(self) -> dict[str, list[str]]:
        return by_composed(self.members)

    def _rows(self, paths: Sequence[str]) -> np.ndarray:
        return np.array([self.members[path] for path in paths], np.int64)


class Tar(_Archive):
    """The files of an uncompressed tar."""

    cut_off = False
    """The end mark is missing."""

    def __init__(self, where: str):
        listing = Listing()
        entries: list[tuple[int, int]] = []
        with tarfile.open(where, "r:", encoding="utf-8") as tar:
            entries.extend((member.offset_data, member.size) for member in _members(tar, listing))
            end = tar.offset
        self._set_listing(where, listing)
        self._handle = Handle(where)
        self._entries = np.array(entries, np.int64).reshape(-1, 2)
        self._check_end(end)

    def _check_end(self, offset: int) -> None:
        """Check that the tar ends with an end mark: tarfile stops silently at a damaged header, and files would be
        lost without an error.
        """
        block = self._handle.read_up_to(offset, tarfile.BLOCKSIZE)
        if not block:
            self.notes += ("the archive has no end mark: it may have been cut off",)
            self.cut_off = True
        elif block.strip(b"\0") or len(block) < tarfile.BLOCKSIZE:
            raise tarfile.ReadError(f"no file header at byte {offset:,}")

    def read(self, path: str, limit: int) -> bytes:
        offset, size = self.place(path)
        check_size(size, limit)
        return self._handle.read(offset, size)

    def place(self, path: str) -> tuple[int, int]:
        """Offset and size in bytes of a file."""
        offset, size = self._entries[self.members[path]].tolist()
        return offset, size

    def fetch(self, paths: Sequence[str]) -> Fetch:
        return TarFetch(self._handle, self._entries[self._rows(paths)])


def _members(tar: tarfile.TarFile, listing: Listing) -> Iterator[tarfile.TarInfo]:
    """Yield the listed regular files of a tar, in order."""
    while (member := tar.next()) is not None:
        tar.members = []  # type: ignore[attr-defined]  # tarfile would keep a kilobyte per file
        if member.size < 0 or member.offset_data < 0:
            raise tarfile.ReadError(f"negative size of {shown(member.name)}")
        if member.isdir():
            continue
        if not member.isreg() or member.issparse():
            listing.skip(member.name, "as link, device or sparse file")
        elif listing.add(member.name):
            yield member


@dataclass(frozen=True)
class TarFetch:
    """Fetch of files in a tar."""

    handle: Handle
    entries: np.ndarray
    """(n, 2) int64: offset and size in bytes."""

    def __call__(self, i: int) -> bytes:
        offset, size = self.entries[i].tolist()
        check_size(size, MAX_BYTES)
        return self.handle.read(offset, size)

    def identity(self, i: int) -> str:
        return f"{self.handle.state} {self.entries[i].tolist()}"

    def size(self, i: int) -> int:
        return int(self.entries[i, 1])


class InMemoryTar(_Archive):
    """The files of a gzip-compressed tar, held in memory."""

    def __init__(self, where: str, limit: int = MEMORY_LIMIT):
        listing = Listing()
        held: list[bytes] = []
        with gzip.open(where, "rb") as stream:
            expected = max(FREE_BYTES, MOST_EXPANSION * os.path.getsize(where))
            limited = _Limited(stream, min(limit, expected), where)
            with tarfile.open(fileobj=cast(IO[bytes], limited), mode="r|", encoding="utf-8") as tar:
                for member in _members(tar, listing):
                    limited.check(member.size)
                    file = tar.extractfile(member)
                    held.append(file.read() if file else b"")
            while limited.read(1 << 20):  # gzip verifies its checksum at the end
                pass
        self._set_listing(where, listing)
        self._held = held

    def read(self, path: str, limit: int) -> bytes:
        data = self._held[self.members[path]]
        check_size(len(data), limit)
        return data

    def fetch(self, paths: Sequence[str]) -> Fetch:
        return InMemoryFetch([self._held[row] for row in self._rows(paths)])


class _Limited:
    """A stream limited to `limit` bytes, so that a small file cannot fill the memory."""

    def __init__(self, stream: gzip.GzipFile, limit: int, where: str):
        self.stream, self.limit, self.where, self.total = stream, limit, where, 0

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(min(size, 1 << 20))
        self.total += len(data)
        self.check()
        return data

    def check(self, more: int = 0) -> None:
        """Raise `DataError` if the bytes read so far plus `more`, announced by a header, exceed the limit."""
        if self.total + more > self.limit:
            why = f"it holds more than {self.limit:,} bytes, and a compressed tar cannot be read in place"
            hint = "convert it to a .tar or a .zip, which are read in place, or unpack it and give the folder"
            raise DataError("compressed archive is too large to hold in memory", where=self.where, why=why, hint=hint)


@dataclass(frozen=True)
class InMemoryFetch:
    """Fetch of files in memory."""

    contents: Sequence[bytes]

    def __call__(self, i: int) -> bytes:
        check_size(len(self.contents[i]), MAX_BYTES)
        return self.contents[i]


class Zip(_Archive):
    """The files of a zip, stored or deflated."""

    def __init__(self, where: str):
        listing = Listing()
        entries: list[tuple[int, int, int, int, int]] = []
        with zipfile.ZipFile(where) as archive:
            for member in archive.infolist():
                name = _name_in_zip(member)
                if "/" not in name:  # some packers on Windows write "cat\1.jpg"
                    name = name.replace("\\", "/")
                if name.endswith("/"):
                    continue
                if member.flag_bits & 1:
                    listing.skip(name, "with encryption")
                elif member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    listing.skip(name, "with a compression other than deflate")
                elif (member.external_attr >> 16) & 0o170000 == 0o120000:
                    listing.skip(name, "as link, device or sparse file")
                elif listing.add(name):
                    deflated = int(member.compress_type == zipfile.ZIP_DEFLATED)
                    entry = (member.header_offset, member.compress_size, member.file_size, deflated, member.CRC)
                    entries.append(entry)
        self._set_listing(where, listing)
        self._handle = Handle(where)
        self._entries = np.array(entries, np.int64).reshape(-1, 5)

    def read(self, path: str, limit: int) -> bytes:
        return _unzip(self._handle, self._entries[self.members[path]], limit)

    def fetch(self, paths: Sequence[str]) -> Fetch:
        return ZipFetch(self._handle, self._entries[self._rows(paths)])


_UTF8 = 0x800
"""Flag of a name in UTF-8 (PKWARE APPNOTE 4.4.4)."""
_UNICODE_PATH = 0x7075
"""Extra field with a name in UTF-8 (PKWARE APPNOTE 4.6.9)."""


def _name_in_zip(member: zipfile.ZipInfo) -> str:
    """Name of a file in UTF-8: as the archive states, or if the name is valid as such; otherwise in code page 437.

    macOS, and `zip` on Linux, write UTF-8 without saying so, and the standard's code page would garble it.
    """
    if member.flag_bits & _UTF8:
        return member.filename
    raw = member.orig_filename.partition("\0")[0].encode("cp437")  # as zipfile decoded it
    if (stated := _unicode_path(member.extra, raw)) is not None:
        return stated
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("cp437")


def _unicode_path(extra: bytes, raw: bytes) -> str | None:
    """Name in the extra field for one in UTF-8, if it belongs to the raw name; None without one."""
    while len(extra) >= 4:
        kind, size = struct.unpack_from("<HH", extra)
        field, extra = extra[4 : 4 + size], extra[4 + size :]
        if kind == _UNICODE_PATH and field[:1] == b"\1" and field[1:5] == struct.pack("<I", zlib.crc32(raw)):
            try:
                return field[5:].decode().partition("\0")[0] or None
            except UnicodeDecodeError:
                return None
    return None


@dataclass(frozen=True)
class ZipFetch:
    """Fetch of files in a zip."""

    handle: Handle
    entries: np.ndarray
    """(n, 5) int64: offset of the local header, compressed size, size, 1 if deflated, CRC-32."""

    def __call__(self, i: int) -> bytes:
        return _unzip(self.handle, self.entries[i], MAX_BYTES)

    def identity(self, i: int) -> str:
        return f"{self.handle.state} {self.entries[i].tolist()}"

    def size(self, i: int) -> int:
        return int(self.entries[i, 2])


def _unzip(handle: Handle, entry: np.ndarray, limit: int) -> bytes:
    """Read one file of a zip; never produce more bytes than the table of contents states."""
    header, packed, size, deflated, crc = entry.tolist()
    check_size(max(packed, size), limit)
    # PKWARE APPNOTE 4.3.7: a local header of 30 bytes, the lengths of name and extra field at 26.
    local = handle.read(header, 30)
    if local[:4] != b"PK\x03\x04":
        raise OSError("damaged zip: no file at the offset in the table of contents")
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
