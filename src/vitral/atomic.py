"""Write files whole or not at all. Every file that vitral writes is written here."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vitral.errors import WriteError
from vitral.filesystem import flush, is_fixed, is_locked, locked, move, refused, set_mode

_STALE = 3600.0
"""Age in seconds, since the last write, at which a temporary file that nobody has locked counts as left by a killed
process. The age alone is not enough: clocks jump, and those of a share and its clients differ.
"""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces `path` if the block succeeds; otherwise leave `path` unchanged.

    A full disk or a crash while writing does not damage the existing file. Links are followed, and their target is
    replaced. Devices and pipes are written to directly, never replaced. Raises `WriteError` if the system refuses to
    write, and for a folder, a socket, or a pipe without a reader.
    """
    try:
        target = Path(os.path.realpath(path))
        kind = _kind(path)
        if kind is None or stat.S_ISREG(kind):
            target.parent.mkdir(parents=True, exist_ok=True)
            with _temporary(target) as temporary:
                yield temporary
                _finish(temporary, target)
        else:
            with _opened(path, kind) as device, tempfile.TemporaryDirectory(prefix="vitral-") as folder:
                temporary = Path(folder) / "written"
                yield temporary
                with open(temporary, "rb") as written:
                    shutil.copyfileobj(written, device)
    except WriteError:
        raise
    except Exception as error:
        # safetensors has its own exception for a full disk
        if not isinstance(error, OSError) and type(error).__name__ != "SafetensorError":
            raise
        raise refused(path, error, f"existing files in {path.parent} are unchanged") from error


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder that becomes `path` when the block ends well; otherwise `path` stays as it was.

    What `path` held before is gone then: the caller has checked that it may be replaced. A process that is killed
    between two renames leaves the old folder beside it, under a temporary name. Raises `WriteError` as `replacing`.
    """
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        made = _temporary_folder(target)
        try:
            yield made
            for file in made.rglob("*"):
                if file.is_file():
                    flush(file)
            _put(made, target)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except WriteError:
        raise
    except OSError as error:
        raise refused(path, error, f"{path} is unchanged") from error


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_bytes(text.encode())  # in text mode, Windows would write other ends of lines


def is_temporary(name: str) -> bool:
    """True if `name` is that of a temporary file of `replacing` or its lock, in use or left by a killed process."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_left(folder: Path) -> None:
    """Remove the temporary files in a folder and those below it that nobody is writing, whatever their age.

    For the process that trains a run. Other commands may write into it at the same time, with locks of their own.
    """
    for left in [one for one in folder.rglob(".*") if is_temporary(one.name) and not one.is_dir()]:
        if not is_locked(_lock_of(left)):
            left.unlink(missing_ok=True)


def _kind(path: Path) -> int | None:
    """Return the mode of the file that `path` leads to; None if it does not exist."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.(tmp|lock)", re.DOTALL)
_MAX_NAME_BYTES = 255 - len("..lock") - 17
"""Bytes of a file name that are kept in the name of its temporary file."""


def _temporary_path(target: Path) -> Path:
    """Return a new path next to the target, which `is_temporary` recognizes."""
    return target.with_name(f"{_temporary_prefix(target)}{secrets.token_hex(8)}.tmp")


def _lock_of(temporary: Path) -> Path:
    """Return the lock of a temporary file: a file of its own, because on SMB shares a locked one cannot be written."""
    return temporary.with_suffix(".lock")


def _temporary_prefix(target: Path) -> str:
    return f".{os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])}."


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Create an empty file next to the target, with a lock; it cannot exist already or be a link."""
    _remove_stale(target)
    temporary = _temporary_path(target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    with _locked(temporary):
        os.close(os.open(temporary, flags, 0o600))
        try:
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(temporary: Path) -> Iterator[None]:
    """Hold the lock of a temporary file, which leaves nothing: Windows removes a file only after it is closed."""
    lock = _lock_of(temporary)
    try:
        with locked(lock):
            yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()


def _finish(temporary: Path, target: Path) -> None:
    set_mode(temporary, 0o666 & ~_umask())  # safetensors writes files that only the owner can read
    flush(temporary)
    try:
        move(temporary, target)
    except OSError as error:
        if not is_fixed(error):
            raise
        shutil.copyfile(temporary, target)  # a file that is a mount point can only be written into
        flush(target)


def _temporary_folder(target: Path) -> Path:
    """Create an empty folder beside the target, or inside it if that is a mount point or cannot have one beside it."""
    made = _temporary_path(target)
    inside = target / made.name
    if os.path.ismount(target):
        made = inside
    try:
        made.mkdir()
    except OSError as error:
        if made == inside or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not target.is_dir():
            raise
        made = inside
        made.mkdir()
    return made


def _put(made: Path, target: Path) -> None:
    """Put a folder in the place of another, by renaming it where that is possible."""
    if made.parent != target:
        try:
            _swap(made, target)
            return
        except OSError as error:
            if not is_fixed(error):
                raise
    _replace_content(made, target)


def _swap(made: Path, target: Path) -> None:
    """Rename a folder to the name of another, which is kept until it has succeeded."""
    old = _temporary_path(target)
    with contextlib.suppress(FileNotFoundError):
        move(target, old)
    try:
        move(made, target)
    except OSError:
        if old.exists():
            move(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _replace_content(made: Path, target: Path) -> None:
    """Move what a folder holds into another, file by file, and remove what that held before.

    For a folder that cannot be renamed. A process that is killed meanwhile leaves whole files, some of them old.
    """
    for old in sorted(target.rglob("*"), reverse=True):  # what is inside a folder comes before it
        new = made / old.relative_to(target)
        if old == made or made in old.parents or (new.is_dir() and old.is_dir()) or (new.is_file() and old.is_file()):
            continue
        if old.is_dir() and not old.is_symlink():
            old.rmdir()
        else:
            old.unlink()
    for new in sorted(made.rglob("*")):
        place = target / new.relative_to(made)
        if new.is_dir():
            place.mkdir(exist_ok=True)
        else:
            move(new, place)


def _remove_stale(target: Path) -> None:
    """Remove temporary files of this file that killed processes left; those still being written are locked."""
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(_temporary_prefix(target)) and is_temporary(entry.name):
                with contextlib.suppress(OSError):
                    age = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if age > _STALE and not is_locked(_lock_of(Path(entry.path))):
                        os.unlink(entry.path)


def _opened(path: Path, kind: int) -> IO[bytes]:
    """Open a device or pipe for writing. A pipe without a reader is refused, because opening it would block."""
    if stat.S_ISDIR(kind) or stat.S_ISSOCK(kind):
        what = "a folder" if stat.S_ISDIR(kind) else "a socket"
        raise WriteError("cannot write", where=path, why=f"it is {what}", hint="give the path of a file")
    waiting = os.O_NONBLOCK if stat.S_ISFIFO(kind) else 0
    descriptor = os.open(path, os.O_WRONLY | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0) | waiting)
    if waiting:
        os.set_blocking(descriptor, True)
    return open(descriptor, "wb")


def _umask() -> int:
    """Return the umask of this process, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
