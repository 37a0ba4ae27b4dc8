"""List the entries of a zip archive, checked before any of them is read."""

from __future__ import annotations

import io
import re
import struct
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from vitral.errors import WeightsError
from vitral.filesystem import mapped, read_at
from vitral.weights.read.safetensors_mmap import ANOTHER_COPY, printable

MOST_ENTRIES = 20_000
"""Four times the tensors read of one file: a training's pickle has those of its optimizer too."""
LONGEST_DIRECTORY = MOST_ENTRIES * 512
MOST_BYTES = 64 * 2**30
FREE_BYTES = 2**28
MOST_EXPANSION = 200
MOST_LARGE = 8
"""Deflate reaches 1032 at most; files of weights stay below 2, also with an array of zeros among them. Contents of more
than `FREE_BYTES` may be `MOST_LARGE` times larger than the file, others `MOST_EXPANSION` times."""

_ENCRYPTED = 0x1 | 0x40
_LOCAL = struct.Struct("<4s5H3I2H")  # APPNOTE.TXT 4.3.7, up to the name


@dataclass(frozen=True)
class ZipEntry:
    """A file inside an archive: offset, stored size and unpacked size of its bytes, and their CRC-32."""

    name: str
    offset: int
    stored: int
    size: int
    compressed: bool
    checksum: int


class _Directory(io.FileIO):
    """A file with a limit on reads: zipfile reads the whole table of contents into memory, whatever its size."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > LONGEST_DIRECTORY:
            raise zipfile.BadZipFile(f"a table of contents of {size:,} bytes; at most {LONGEST_DIRECTORY:,} are read")
        return super().read(-1 if size is None else size)


def list_entries(path: Path) -> list[ZipEntry]:
    """List the entries of a zip archive in their order in the file, without folders.

    Raises `WeightsError` for what no program that writes weights produces: names outside the archive, duplicate names,
    encryption, methods other than stored and deflated, entries that overlap or lie beyond the end, a size out of
    proportion (a zip bomb), a local header that contradicts the directory.
    """
    total = path.stat().st_size
    try:
        with _Directory(path) as directory, zipfile.ZipFile(directory) as archive, open(path, "rb") as file:
            entries = archive.infolist()
            if len(entries) > MOST_ENTRIES:
                raise _refused(path, f"{len(entries):,} entries, more than {MOST_ENTRIES:,}")
            _check_entries(path, entries, total)
            found = [_located(path, file.fileno(), entry) for entry in entries if not entry.is_dir()]
    except (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError, struct.error, OSError) as error:
        raise _refused(path, f"{error} ({total:,} bytes; cut short or not a zip archive)") from error
    found.sort(key=lambda entry: entry.offset)
    end, last = 0, ""
    for entry in found:
        if entry.offset < end:
            raise _refused(path, f"'{entry.name}' overlaps '{last}'")
        end, last = entry.offset + entry.stored, entry.name
        if end > total:
            raise _refused(path, f"'{entry.name}' ends at byte {end:,}, the file at {total:,}")
    return found


def check_sums(path: Path, entries: list[ZipEntry], *, optional: bool = False) -> None:
    """Raise `WeightsError` for a stored entry whose bytes changed since it was written.

    `optional`: an archive in which no checksum is right has none, an option of `torch.save`.
    """
    stored = [entry for entry in entries if not entry.compressed and entry.size]
    if not stored:
        return
    with open(path, "rb") as file, mapped(file) as data:
        wrong = [e for e in stored if zlib.crc32(data[e.offset : e.offset + e.size]) != e.checksum]
    if wrong and not (optional and len(wrong) == len(stored)):
        raise _refused(path, f"the bytes of '{wrong[0].name}' do not have the checksum that the archive states")


def _check_entries(path: Path, entries: list[zipfile.ZipInfo], total: int) -> None:
    """Refuse what the archive's directory alone shows to be wrong."""
    seen: set[str] = set()
    for entry in entries:
        name = entry.orig_filename  # `filename` has its backslashes replaced and is cut at a zero byte
        if name.startswith("/") or re.match(r"[A-Za-z]:", name) or "\\" in name or ".." in name.split("/"):
            raise _refused(path, f"'{name}' would lie outside the archive's folder")
        if "\0" in name or name in seen:
            raise _refused(path, f"'{name}' occurs twice, or its name is damaged")
        seen.add(name)
        if entry.flag_bits & _ENCRYPTED:
            raise _refused(path, f"'{name}' is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _refused(path, f"'{name}' is compressed by method {entry.compress_type}; known: stored, deflated")
        if entry.compress_type == zipfile.ZIP_STORED and entry.file_size != entry.compress_size:
            raise _refused(path, f"'{name}' is stored, yet {entry.compress_size:,} bytes become {entry.file_size:,}")
    size = sum(entry.file_size for entry in entries)
    if size > min(MOST_BYTES, MOST_EXPANSION * total, max(FREE_BYTES, MOST_LARGE * total)):
        raise _refused(path, f"a zip bomb: {total:,} bytes would become {size:,}")


def _located(path: Path, file: int, entry: zipfile.ZipInfo) -> ZipEntry:
    """Locate the bytes of an entry: they begin after its local header, which states its own lengths."""
    raw = read_at(file, _LOCAL.size, entry.header_offset)
    signature, _, flags, method, *_, name_length, extra_length = _LOCAL.unpack(raw)
    name = read_at(file, name_length, entry.header_offset + _LOCAL.size)
    if signature != b"PK\3\4" or flags & _ENCRYPTED or method != entry.compress_type:
        raise _refused(path, f"the local header of '{entry.filename}' contradicts the archive's directory")
    if name != entry.orig_filename.encode("utf-8" if flags & 0x800 else "cp437"):
        raise _refused(path, f"'{entry.filename}' has another name in its local header")
    offset = entry.header_offset + _LOCAL.size + name_length + extra_length
    return ZipEntry(entry.filename, offset, entry.compress_size, entry.file_size, entry.compress_type != 0, entry.CRC)


def _refused(path: Path, why: str) -> WeightsError:
    return WeightsError("damaged or hostile archive", where=path, why=printable(why), hint=ANOTHER_COPY)
