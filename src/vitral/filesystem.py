"""Differences of disks and systems: locks, reads at an offset, maps, flushing, second names, refusals.

Windows has no `fcntl` and no `pread`, and neither replaces nor removes a file that is open. Network shares, FUSE and
object stores mounted as folders refuse single calls. What a disk cannot do is left out if the data stay whole without.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from vitral.errors import WriteError

if TYPE_CHECKING:
    import numpy as np

_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENODEV}
"""System errors for a call that a file system does not know."""
_NO_LOCKS = _UNSUPPORTED | {errno.ENOLCK, errno.EIO}
_NO_FLUSH = _UNSUPPORTED | {errno.EPERM, errno.EACCES, errno.EBADF}
_NO_RENAME = {errno.EXDEV, errno.EBUSY}
"""System errors for a name that cannot move: a mount point, or a folder of a lower layer of a container's image."""


@contextlib.contextmanager
def locked(file: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold the lock that this file stands for, which exists as long.

    The system releases it when its holder ends for any reason. A disk without locks excludes nobody. Raises
    `BlockingIOError` if it is held elsewhere, also by this process, and `wait` is not set; OSError if the file cannot
    be created.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(file, thread_local=False)
    try:
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        raise BlockingIOError(errno.EAGAIN, "another process holds the lock", str(file)) from None
    except NotImplementedError:  # filelock's word for ENOSYS
        pass
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # before the release: a holder that comes next makes its own
            file.unlink()
        lock.release()


def is_locked(file: Path) -> bool:
    """True if another holder has the lock of this file; False if it cannot be found out."""
    try:
        if file.exists():
            with locked(file):
                pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


_position = threading.Lock()


def read_at(descriptor: int, size: int, offset: int) -> bytes:
    """Read up to `size` bytes at `offset` of a file that several threads read."""
    if hasattr(os, "pread"):
        return os.pread(descriptor, size, offset)
    with _position:
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.read(descriptor, size)


@contextlib.contextmanager
def mapped(file: IO[bytes]) -> Iterator[memoryview]:
    """Yield all bytes of an open file: a map of it, or a copy in memory where the disk refuses maps."""
    try:
        source: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        file.seek(0)
        source = memoryview(file.read())
    with source as whole, memoryview(whole) as data:
        yield data


def mapped_array(path: Path | str, mode: Any = "r") -> np.ndarray:
    """Return the bytes of a file as uint8: a map of it, or a copy in memory where the disk refuses maps."""
    import numpy as np

    if not os.path.getsize(path):
        return np.empty(0, np.uint8)
    try:
        return np.memmap(path, np.uint8, mode).view(np.ndarray)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        return np.fromfile(path, np.uint8)


def no_maps(error: Exception) -> bool:
    """True if a file could not be mapped because its disk refuses maps."""
    return _number_of(error) in _UNSUPPORTED


def is_utf8(path: Path | str) -> bool:
    """True if a path is text in UTF-8: libraries in Rust open no other."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk, if the disk and the system know how to."""
    try:
        # Windows flushes only what is open for writing, and opens no folder.
        descriptor = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    except OSError as error:
        if error.errno in _NO_FLUSH:
            return
        raise
    try:
        flush_open(descriptor)
    finally:
        os.close(descriptor)


def flush_open(descriptor: int) -> None:
    """Flush an open file to the disk, if the disk knows how to."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise


def set_mode(path: Path, mode: int) -> None:
    """Set the permissions of a file, on a disk that has any."""
    with contextlib.suppress(OSError):
        os.chmod(path, mode)


def move(source: Path, target: Path) -> None:
    """Rename a file or folder; a file replaces another one. On Windows a virus scanner may hold it for a moment."""
    for _ in range(_TRIES if os.name == "nt" else 0):
        try:
            os.replace(source, target)
            return
        except PermissionError:
            time.sleep(_PAUSE)
    os.replace(source, target)


_TRIES, _PAUSE = 5, 0.1


def is_fixed(error: OSError) -> bool:
    """True if a rename failed because one of the names cannot move."""
    return error.errno in _NO_RENAME


def relative(path: str, folder: str | Path) -> str | None:
    """Return a path as seen from a folder, with "/" on every system; None on another drive of Windows."""
    try:
        return os.path.relpath(path, folder).replace(os.sep, "/")
    except ValueError:
        return None


def second_name(file: Path, name: Path) -> None:
    """Keep the content of a file under a second name: a link, which costs no time, else a copy."""
    try:
        os.link(file, name)
    except (OSError, AttributeError):
        shutil.copyfile(file, name)


def is_write_error(error: OSError) -> bool:
    """True for a system error by which only writing fails."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EXDEV, errno.EIO)


def refused(path: Path | str | None, error: Exception, kept: str = "") -> WriteError:
    """Return the error of a file that the system refuses to write, with a hint for its kind; `kept` is what is whole
    all the same.
    """
    hint = "; ".join(filter(None, (_HINTS.get(_number_of(error), _OTHER_HINT), kept)))
    why = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return WriteError("cannot write", where=path, why=why, hint=hint)


def _number_of(error: Exception) -> int:
    """Return the number of a system error. Libraries in Rust and torch have it in their message: "… (os error 28)",
    "unable to mmap … (19)".
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = re.search(r"\((?:os error )?(\d+)\)", str(error))
    return int(found[1]) if found else 0


_PERMISSION = "check the permissions, close programs that have it open, or choose another folder"
_FULL = "free disk space, or choose a folder on another disk"
_OTHER_HINT = "check the path and its disk, or choose another folder"
_HINTS = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: "free space of your quota, or choose a folder on another disk",
    errno.EFBIG: "choose a folder on another disk: this one takes no file of this size",
    errno.EROFS: "choose another folder: this disk can only be read",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EXDEV: "remove what is there, or choose another folder: the disk cannot move it",
    errno.EBUSY: "choose another name: this one is a mount point, or another program uses it",
    errno.ENOTDIR: "choose another folder: a part of this path is a file",
    errno.EMFILE: "close files, or raise the limit: ulimit -n 4096",
    errno.EIO: "choose a folder on another disk: this one reports a fault",
}
