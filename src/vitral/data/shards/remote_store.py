"""Shards in an object store: whole shards through the local cache, single records by range requests."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitral.data.archives import Handle
from vitral.data.shards.cache import ShardCache, key_of
from vitral.data.shards.index import Shard
from vitral.data.shards.remote import BLOCK, Remote

SPARSE_READS = 4
"""Records of a shard that a process reads one by one; at the next one the whole shard is fetched."""


class RemoteStore:
    """Shards below one address, or anywhere if their names are addresses. Picklable and thread-safe."""

    def __init__(self, url: str, cache: ShardCache | None = None, states: Mapping[str, str] | None = None):
        """`states`: shard → a string that differs after it has changed, for shards without a SHA-256 in an index."""
        self.url, self.states = url, dict(states or {})
        self.remote, self.cache = Remote(url or next(iter(self.states), "")), cache or ShardCache()
        self._reads: Counter[str] = Counter()
        self._broken: dict[str, str] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[RemoteStore], tuple[str, ShardCache, Mapping[str, str]]]:
        return RemoteStore, (self.url, self.cache, self.states)

    @property
    def prefix(self) -> str:
        """Prefix that turns the name of a shard into one for messages."""
        return self.url

    @property
    def is_remote(self) -> bool:
        """True: reading in the order of the shards fetches each once."""
        return True

    def open(self, shard: Shard) -> Handle:
        """Open a local copy of the shard, fetched if there is none; OSError if it is missing or damaged.

        A shard that failed after all attempts fails at once the next time.
        """
        if reason := self._broken.get(shard.name):
            raise OSError(reason)
        try:
            return self.cache.get(self._key(shard), shard.bytes, lambda part, start: self._fetch(shard, part, start))
        except OSError as error:
            self._broken[shard.name] = str(error)
            raise

    def read(self, shard: Shard, offset: int, size: int) -> bytes | None:
        """Read one record of a shard that has no local copy and of which few are read; None if it is to be opened."""
        if reason := self._broken.get(shard.name):
            raise OSError(reason)
        with self._lock:
            self._reads[shard.name] += 1
            sparse = self._reads[shard.name] <= SPARSE_READS
        if not sparse or self.cache.find(self._key(shard)):
            return None
        return self.remote.read(self._url(shard), offset, size)

    def drop(self, shard: Shard) -> bool:
        """Remove the local copy, whose bytes are wrong; True, since it can be fetched again."""
        self.cache.drop(self._key(shard))
        return True

    def state(self, shard: Shard) -> str:
        """A string that differs after the shard has changed."""
        return shard.sha256 or self.states.get(shard.name) or self.remote.state(self._url(shard))

    def _url(self, shard: Shard) -> str:
        return shard.name if "://" in shard.name else self.url + shard.name

    def _key(self, shard: Shard) -> str:
        if shard.sha256:
            return key_of(shard.sha256)
        return key_of(self._url(shard), str(shard.bytes), self.states.get(shard.name, ""))

    def _fetch(self, shard: Shard, part: Path, start: int) -> None:
        """Append the missing bytes of a shard and verify its hash; a wrong one is fetched once more from the start."""
        for begin in (start, 0) if shard.sha256 else (0, 0):
            hashed = self._append(shard, part, begin)
            if not shard.sha256 or hashed.hexdigest() == shard.sha256:
                return
        part.write_bytes(b"")
        raise OSError(f"the SHA-256 of {self._url(shard)} is not that of the index")

    def _append(self, shard: Shard, part: Path, start: int) -> Any:
        hashed = hashlib.sha256()
        with open(part, "r+b") as file:
            while start and (block := file.read(min(BLOCK, start - file.tell()))):
                hashed.update(block)
            file.truncate(start)
            file.seek(start)
            while start < shard.bytes:
                block = self.remote.read(self._url(shard), start, min(BLOCK, shard.bytes - start))
                file.write(block)
                file.flush()  # a killed process continues behind it
                hashed.update(block)
                start += len(block)
        return hashed
