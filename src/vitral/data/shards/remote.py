"""Objects of S3, Google Cloud Storage, HTTP and the Hugging Face hub, by fsspec, with retries.

The library of a store is imported when an address of it is opened. A request that fails for a reason that may pass (a
busy server, a cut connection, a body that ends early) is repeated after a growing, random pause.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from vitral.atomic import replacing
from vitral.errors import DataError, MissingExtraError

SCHEMES = ("s3", "s3a", "gs", "gcs", "http", "https", "hf", "az", "abfs", "memory")
"""Schemes of addresses that are read."""
ATTEMPTS = 8
"""Most attempts of a request."""
PAUSE, LONGEST_PAUSE = 0.25, 20.0
"""Seconds before the second attempt, doubled before each further one, and their limit: a minute in all."""
BLOCK = 16 << 20
"""Bytes of one request for a part of an object."""

_STATES = (
    "size",
    "ETag",
    "etag",
    "Content-MD5",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "updated",
    "mtime",
    "created",
    "VersionId",
    "blob_id",
)
"""Fields that stores state of an object: its size, and marks that differ after it has changed."""

_of_parents: list[object] = []
# File systems of the process that this one was forked from. They stay alive: their connections share the parent's epoll
# and sockets, and closing them here would make the parent wait for answers until they time out.

_T = TypeVar("_T")
_FINAL = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    NotADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    ValueError,
)
"""Errors that another attempt does not change."""


class ShortBodyError(OSError):
    """Fewer bytes came than were asked for."""


def is_remote(data: str) -> bool:
    """True for an address that is read from a store, "s3://bucket/shards/"."""
    found = re.match(r"([a-z0-9]+)://", data)
    return bool(found) and found[1] in SCHEMES  # type: ignore[index]


class Remote:
    """The objects below one address, or at any address of its scheme. Picklable; processes do not share connections."""

    def __init__(self, url: str):
        self.url = url
        self.scheme = url.partition("://")[0]
        self._files: tuple[int, object] = (0, None)

    def __reduce__(self) -> tuple[type[Remote], tuple[str]]:
        return Remote, (self.url,)

    @property
    def files(self) -> Any:
        """The fsspec file system of this process; `MissingExtraError` if its library is not installed."""
        if self._files[0] != os.getpid():
            _of_parents.append(self._files[1])
            self._files = (os.getpid(), _file_system(self.scheme))
        return self._files[1]

    def read(self, url: str, start: int = 0, size: int | None = None) -> bytes:
        """Read `size` bytes from `start`, or a whole object; OSError if it cannot be read after all attempts."""

        def attempt() -> bytes:
            if size is None:
                return bytes(self.files.cat_file(url))
            data = bytes(self.files.cat_file(url, start=start, end=start + size))
            if len(data) > size:  # a server that ignores ranges
                data = data[start : start + size]
            if len(data) != size:
                raise ShortBodyError(f"{len(data):,} bytes came, {size:,} were asked for")
            return data

        return retrying(attempt)

    def download(self, url: str, path: Path) -> None:
        """Fetch an object into a file, in parts."""
        size = self.size(url)
        with replacing(path) as temporary, open(temporary, "wb") as file:
            for start in range(0, size, BLOCK):
                file.write(self.read(url, start, min(BLOCK, size - start)))

    def size(self, url: str) -> int:
        """Size of an object in bytes."""
        size = retrying(lambda: self.files.info(url))["size"]
        if size is None:
            raise OSError("the server does not state its size")
        return int(size)

    def state(self, url: str) -> str:
        """A string that differs after an object has changed: size, and tag or time as far as the store has them."""
        info = retrying(lambda: self.files.info(url))
        return " ".join(str(info.get(key, "")) for key in _STATES)

    def list(self, pattern: str) -> list[str]:
        """Addresses that match a wildcard pattern."""
        return [self.address(path) for path in retrying(lambda: self.files.glob(pattern))]

    def sizes(self, folder: str) -> dict[str, int | None] | None:
        """File name → bytes of the objects in a folder; None for a store without listings, as HTTP."""
        if self.scheme in ("http", "https"):
            return None
        entries = retrying(lambda: self.files.ls(folder, detail=True, refresh=True))
        return {str(one["name"]).rstrip("/").rpartition("/")[2]: one.get("size") for one in entries}

    def address(self, path: str) -> str:
        """Return a path as an address with its scheme."""
        return path if "://" in path else f"{self.scheme}://{path.lstrip('/')}"


def _file_system(scheme: str) -> object:
    try:
        import fsspec

        options: dict[str, object] = {"use_listings_cache": False} if scheme in ("s3", "s3a", "gs", "gcs") else {}
        return fsspec.filesystem(scheme, **options)
    except ImportError as error:
        hint = "pip install 'vitral[remote]'"
        why = " ".join(str(error).split())
        raise MissingExtraError(f"{scheme}:// needs packages that are not installed", why=why, hint=hint) from error


def retrying(attempt: Callable[[], _T], *, sleep: Callable[[float], None] | None = None) -> _T:
    """Call `attempt` until it succeeds, with pauses; raise its last error as an OSError of one line.

    A missing object, a refused permission and other errors that stay raise at once.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except Exception as caught:
            if isinstance(caught, DataError | MissingExtraError):
                raise
            error = _cause(caught)
            if isinstance(error, _FINAL) or _is_refused(error):
                raise _as_os_error(error, 1) from error
            if number == ATTEMPTS - 1:
                raise _as_os_error(error, ATTEMPTS) from error
        (sleep or time.sleep)(min(PAUSE * 2**number, LONGEST_PAUSE) * random.uniform(0.5, 1))
    raise AssertionError  # the last attempt returns or raises


def _cause(error: Exception) -> Exception:
    """The failed request behind a FileNotFoundError, which fsspec makes of any, unless the object is missing."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    return cause if isinstance(cause, Exception) and _status(cause) not in (404, 410) else error


def _status(error: Exception) -> int | None:
    """Status of the answer of a server, if there was one."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_refused(error: Exception) -> bool:
    """True for an answer that blames the request: status 400 to 499, without timeouts and "too many requests"."""
    if (status := _status(error)) is not None:
        return 400 <= status < 500 and status not in (408, 425, 429)
    return type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError", "ParamValidationError")


def _as_os_error(error: Exception, attempts: int) -> OSError:
    reason = " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
    after = f" (after {attempts} attempts)" if attempts > 1 else ""
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(f"no such object: {reason}")
    return OSError(f"{reason[:300]}{after}")
