"""Write files whole or not at all. Every file that vitral writes is written here."""

from __future__ import annotations

import contextlib
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

_STALE = 3600.0
"""Age in seconds, since the last write, at which a temporary file counts as left by a killed process."""


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
        hint = f"free disk space, or check the permissions; existing files in {path.parent} are unchanged"
        raise WriteError("cannot write", where=path, why=str(error), hint=hint) from error


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new, empty folder that becomes `path` when the block ends well; otherwise `path` stays as it was.

    What `path` held before is gone then: the caller has checked that it may be replaced. A process that is killed
    between two renames leaves the old folder beside it, under a temporary name. Raises `WriteError` as `replacing`.
    """
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
        made, old = _temporary_path(target), _temporary_path(target)
        made.mkdir()
        try:
            yield made
            for file in made.rglob("*"):
                _to_disk(file)
            _swap(made, target, old)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        hint = f"free disk space, or check the permissions; {path} is unchanged"
        raise WriteError("cannot write", where=path, why=str(error), hint=hint) from error


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")


def is_temporary(name: str) -> bool:
    """True if `name` is that of a temporary file of `replacing`, in use or left by a killed process."""
    return _TEMPORARY.fullmatch(name) is not None


def _kind(path: Path) -> int | None:
    """Return the mode of the file that `path` leads to; None if it does not exist."""
    try:
        return os.stat(path).st_mode
    except FileNotFoundError:
        return None


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)
_MAX_NAME_BYTES = 255 - len("..tmp") - 17
"""Bytes of a file name that are kept in the name of its temporary file."""


def _temporary_path(target: Path) -> Path:
    """Return a new path next to the target, which `is_temporary` recognizes."""
    return target.with_name(f"{_temporary_prefix(target)}{secrets.token_hex(8)}.tmp")


def _temporary_prefix(target: Path) -> str:
    return f".{os.fsdecode(os.fsencode(target.name)[:_MAX_NAME_BYTES])}."


@contextlib.contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """Create an empty file next to the target; it cannot exist already or be a link."""
    _remove_stale(target)
    temporary = _temporary_path(target)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(temporary, flags, 0o600))
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _finish(temporary: Path, target: Path) -> None:
    os.chmod(temporary, 0o666 & ~_umask())  # safetensors writes files that only the owner can read
    _to_disk(temporary)
    os.replace(temporary, target)


def _swap(made: Path, target: Path, old: Path) -> None:
    """Put a folder in the place of another, which is kept as `old` until it has succeeded."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(target, old)
    try:
        os.rename(made, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _to_disk(file: Path) -> None:
    if file.is_file():
        with open(file, "rb") as written:
            os.fsync(written.fileno())


def _remove_stale(target: Path) -> None:
    """Remove temporary files of this file that killed processes left; those still being written are recent."""
    with contextlib.suppress(OSError), os.scandir(target.parent) as entries:
        for entry in entries:
            if entry.name.startswith(_temporary_prefix(target)) and is_temporary(entry.name):
                with contextlib.suppress(OSError):
                    if time.time() - entry.stat(follow_symlinks=False).st_mtime > _STALE:
                        os.unlink(entry.path)


def _opened(path: Path, kind: int) -> IO[bytes]:
    """Open a device or pipe for writing. A pipe without a reader is refused, because opening it would block."""
    if stat.S_ISDIR(kind) or stat.S_ISSOCK(kind):
        what = "a folder" if stat.S_ISDIR(kind) else "a socket"
        raise WriteError("cannot write", where=path, why=f"it is {what}", hint="give the path of a file")
    waiting = os.O_NONBLOCK if stat.S_ISFIFO(kind) else 0
    descriptor = os.open(path, os.O_WRONLY | os.O_NOCTTY | waiting)
    os.set_blocking(descriptor, True)
    return open(descriptor, "wb")


def _umask() -> int:
    """Return the umask of this process, which can only be read by setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
