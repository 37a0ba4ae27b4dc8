"""Local copies of remote shards: bounded in bytes, the least recently used go first, shared by all processes.

    KEY.tar     a whole shard whose SHA-256 was verified; its modification time is when it was last opened
    KEY.part    a shard that is being fetched
    KEY.lock    its lock, which its writer holds, so that no other process fetches the same

A killed writer leaves its part without a lock; the next one continues behind the bytes that are there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from vitral.data.archives import Handle
from vitral.errors import UsageError
from vitral.filesystem import locked, move
from vitral.folders import cache_folder

VARIABLE = "VITRAL_SHARD_CACHE"
"""Environment variable with the limit of the cache: "20GB", "500MB"."""
SHARE = 0.5
"""Default limit, as a share of the free space plus the space that the cache takes."""

_UNITS = {"": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_FINISHED, _PART = ".tar", ".part"

Fetch = Callable[[Path, int], None]
"""(file, bytes that are there already): append the rest of the shard."""


class ShardCache:
    """Files of shards in a folder, which can be deleted at any time."""

    def __init__(self, folder: str | Path | None = None, limit: int | None = None):
        """`limit` in bytes: by default that of `VITRAL_SHARD_CACHE`, else half of the free space."""
        self.folder = Path(folder) if folder else cache_folder("shards") / "files"
        self.limit = limit if limit is not None else _limit_of_environment()

    def find(self, key: str) -> Handle | None:
        """Open the shard of this key, and mark it as used; None if it is not there."""
        path = self.folder / f"{key}{_FINISHED}"
        try:
            handle = Handle(str(path))
            os.utime(path)
        except FileNotFoundError:  # another process may have removed it in between
            return None
        return handle

    def get(self, key: str, size: int, fetch: Fetch) -> Handle:
        """Open the shard of this key; `fetch` it first if it is not there. Another process that fetches it is awaited.

        OSError if it cannot be fetched or written.
        """
        while True:
            if handle := self.find(key):
                return handle
            with self._part(key) as part:
                if (self.folder / f"{key}{_FINISHED}").exists():  # another process has finished it meanwhile
                    continue
                self._make_room(size)
                fetch(part, os.path.getsize(part))
                move(part, self.folder / f"{key}{_FINISHED}")

    def drop(self, key: str) -> None:
        """Remove a shard."""
        _remove(self.folder / f"{key}{_FINISHED}")

    @contextlib.contextmanager
    def _part(self, key: str) -> Iterator[Path]:
        """Lock the unfinished file of a shard, which is created if there is none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.folder / f"{key}.lock", wait=True):
            path = self.folder / f"{key}{_PART}"
            path.touch(0o600)
            yield path

    def _make_room(self, size: int) -> None:
        """Remove the least recently used shards until `size` more bytes fit."""
        shards = sorted(self._sizes(_FINISHED), key=lambda one: one[1])
        total = sum(bytes_ for _, _, bytes_ in shards)
        limit = self.limit
        if limit is None:
            limit = int(SHARE * (shutil.disk_usage(self.folder).free + total))
        for path, _, bytes_ in shards:
            if total + size <= limit:
                return
            _remove(path)
            total -= bytes_

    def _sizes(self, suffix: str) -> list[tuple[Path, int, int]]:
        """Path, time of use and size of the files with this suffix."""
        found = []
        for path in self.folder.glob(f"*{suffix}") if self.folder.is_dir() else ():
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                found.append((path, status.st_mtime_ns, status.st_size))
        return found

    @property
    def bytes(self) -> int:
        """Bytes of all shards, unfinished ones included."""
        return sum(size for suffix in (_FINISHED, _PART) for _, _, size in self._sizes(suffix))

    def __len__(self) -> int:
        return len(self._sizes(_FINISHED))

    def clear(self) -> None:
        """Remove all shards. Processes that read them are unaffected."""
        shutil.rmtree(self.folder, ignore_errors=True)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError):  # Windows keeps what a process reads
        path.unlink()


def key_of(*marks: str) -> str:
    """Key of a shard from everything that distinguishes it from others."""
    return hashlib.blake2b("\0".join(marks).encode("utf-8", "surrogateescape"), digest_size=20).hexdigest()


def _limit_of_environment() -> int | None:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    found = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    try:
        if found is None:
            raise ValueError
        return int(float(found[1]) * _UNITS[found[2]])
    except (ValueError, KeyError):
        raise UsageError(f"{VARIABLE} is no size", why=f"it is '{text}'", hint=f"{VARIABLE}=50GB") from None
