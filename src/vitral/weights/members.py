"""What a zip archive says that it holds, checked before any of it is read."""

from __future__ import annotations

import os
import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path

from vitral.errors import WeightsError
from vitral.weights.mapped import ANOTHER_COPY, printable

MOST_MEMBERS = 100_000
MOST_BYTES = 64 * 2**30
MOST_EXPANSION = 200
"""Deflate reaches 1032 at most; whole files of weights stay below 2, also with an array of zeros among them."""

_ENCRYPTED = 0x1 | 0x40
_LOCAL = struct.Struct("<4s5H3I2H")  # APPNOTE.TXT 4.3.7, up to the name


@dataclass(frozen=True)
class Member:
    """A file inside an archive: where its bytes begin, how many lie there, how many they become."""

    name: str
    offset: int
    stored: int
    size: int
    compressed: bool


def members(path: Path) -> list[Member]:
    """The members of a zip archive, in their order in the file, folders left out.

    Raises `WeightsError` for what no program that writes weights makes: names that leave the archive, two of one name,
    encryption, other methods than stored and deflated, members that overlap or lie beyond the end, a size that is out
    of proportion (a zip bomb), a local header that contradicts the directory.
    """
    total = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            entries = archive.infolist()
            if len(entries) > MOST_MEMBERS:
                raise _refused(path, f"{len(entries):,} members, more than {MOST_MEMBERS:,}")
            _check_entries(path, entries, total)
            found = [_located(path, file.fileno(), entry) for entry in entries if not entry.is_dir()]
    except (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError, struct.error, OSError) as error:
        raise _refused(path, f"{error} ({total:,} bytes; cut short or not a zip archive)") from error
    found.sort(key=lambda member: member.offset)
    end, last = 0, ""
    for member in found:
        if member.offset < end:
            raise _refused(path, f"'{member.name}' overlaps '{last}'")
        end, last = member.offset + member.stored, member.name
        if end > total:
            raise _refused(path, f"'{member.name}' ends at byte {end:,}, the file at {total:,}")
    return found


def _check_entries(path: Path, entries: list[zipfile.ZipInfo], total: int) -> None:
    """What the archive's directory alone shows to be wrong."""
    seen: set[str] = set()
    for entry in entries:
        name = entry.orig_filename  # zipfile turns a backslash round and cuts at a zero byte in the other
        if name.startswith("/") or re.match(r"[A-Za-z]:", name) or "\\" in name or ".." in name.split("/"):
            raise _refused(path, f"'{name}' would lie outside the archive's folder")
        if "\0" in name or name in seen:
            raise _refused(path, f"'{name}' is there twice, or its name is damaged")
        seen.add(name)
        if entry.flag_bits & _ENCRYPTED:
            raise _refused(path, f"'{name}' is encrypted")
        if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _refused(path, f"'{name}' is compressed by method {entry.compress_type}; known: stored, deflated")
        if entry.compress_type == zipfile.ZIP_STORED and entry.file_size != entry.compress_size:
            raise _refused(path, f"'{name}' is stored, yet {entry.compress_size:,} bytes become {entry.file_size:,}")
    size = sum(entry.file_size for entry in entries)
    if size > min(MOST_BYTES, MOST_EXPANSION * total):
        raise _refused(path, f"a zip bomb: {total:,} bytes would become {size:,}")


def _located(path: Path, file: int, entry: zipfile.ZipInfo) -> Member:
    """Where the bytes of a member begin: after its local header, which has lengths of its own."""
    raw = os.pread(file, _LOCAL.size, entry.header_offset)
    signature, _, flags, method, *_, name_length, extra_length = _LOCAL.unpack(raw)
    name = os.pread(file, name_length, entry.header_offset + _LOCAL.size)
    if signature != b"PK\3\4" or flags & _ENCRYPTED or method != entry.compress_type:
        raise _refused(path, f"the local header of '{entry.filename}' contradicts the archive's directory")
    if name != entry.orig_filename.encode("utf-8" if flags & 0x800 else "cp437"):
        raise _refused(path, f"'{entry.filename}' has another name in its local header")
    offset = entry.header_offset + _LOCAL.size + name_length + extra_length
    return Member(entry.filename, offset, entry.compress_size, entry.file_size, entry.compress_type != 0)


def _refused(path: Path, why: str) -> WeightsError:
    return WeightsError("damaged or hostile archive", where=path, why=printable(why), hint=ANOTHER_COPY)
