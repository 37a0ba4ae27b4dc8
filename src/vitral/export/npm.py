"""Packages of the npm registry: fetched once, checked against a pinned hash, kept in the user's cache.

Nothing of a package is installed or run: an export copies single files out of its archive. The registry is the one that
npm is configured with, or `npm_config_registry`; the hash makes any of them as good as another.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import tarfile
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from vitral.atomic import replacing
from vitral.errors import MissingExtraError, UsageError
from vitral.folders import cache_folder

_NAMES = ("npm_config_registry", "NPM_CONFIG_REGISTRY")
_TIMEOUT = 60.0
"""Seconds without a byte."""
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Package:
    """One version of a package."""

    name: str
    version: str
    integrity: str
    """The registry's `dist.integrity`: "sha512-" and the hash in base64."""
    size: int
    """Bytes of the archive."""

    @property
    def file(self) -> str:
        """Name of the archive, as `npm pack` writes it."""
        return f"{self.name}-{self.version}.tgz"

    def url(self, registry: str) -> str:
        """Address of the archive in a registry."""
        return f"{registry.rstrip('/')}/{self.name}/-/{self.file}"


def archive(package: Package, file: str | Path | None = None) -> Path:
    """The archive of a package: `file`, otherwise that in the cache, otherwise fetched from the registry.

    Raises `UsageError` for a `file` with other contents, `MissingExtraError` if the registry cannot be reached or sends
    something else.
    """
    if file is not None:
        return _given(package, Path(file))
    cached = cache_folder("npm") / package.file
    if _is_intact(package, cached):
        return cached
    return _fetch(package, cached)


def members(path: Path, names: Iterable[str]) -> Mapping[str, bytes]:
    """Read files of an archive by their path inside it. Links and other names are never read."""
    wanted, found = set(names), {}
    with tarfile.open(path, "r:gz") as packed:
        for entry in packed:
            if entry.name in wanted and entry.isfile():
                content = packed.extractfile(entry)
                assert content is not None
                found[entry.name] = content.read()
    if missing := wanted - found.keys():
        raise MissingExtraError("the package lacks a file", where=path, why=f"it has no {min(missing)}")
    return found


def _given(package: Package, file: Path) -> Path:
    """Check the file of a user."""
    hint = f"npm pack {package.name}@{package.version}, then --runtime {package.file}"
    try:
        if _is_intact(package, file):
            return file
        why = f"its bytes are not those of {package.name} {package.version}" if file.is_file() else "no such file"
    except OSError as error:
        why = error.strerror or str(error)
    raise UsageError(f"this is not {package.file}", where=file, why=why, hint=hint)


def _is_intact(package: Package, file: Path) -> bool:
    """True if a file contains the bytes of the package."""
    if not file.is_file() or file.stat().st_size != package.size:
        return False
    with open(file, "rb") as data:
        return _integrity(hashlib.file_digest(data, "sha512").digest()) == package.integrity


def _integrity(digest: bytes) -> str:
    return f"sha512-{base64.b64encode(digest).decode()}"


def _registry(package: Package) -> str:
    """Address of the registry: of the environment, otherwise as npm is configured."""
    if named := next((os.environ[name] for name in _NAMES if os.environ.get(name)), None):
        return named
    if (program := shutil.which("npm")) is None:
        raise _not_here(package, None, "npm is not installed, and npm_config_registry is not set")
    try:
        command = [program, "config", "get", "registry"]
        return subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        raise _not_here(package, None, f"npm does not name its registry: {error}") from error


def _fetch(package: Package, cached: Path) -> Path:
    url, state = package.url(_registry(package)), hashlib.sha512()
    with replacing(cached) as temporary, open(temporary, "wb") as file:
        for part in _received(package, url):
            state.update(part)
            file.write(part)
        if _integrity(state.digest()) != package.integrity:
            raise _not_here(package, url, "its bytes have another hash than the pinned one")
    return cached


def _received(package: Package, url: str) -> Iterator[bytes]:
    """Yield the parts of the archive as they arrive, and little more than its size in all."""
    try:
        if not url.startswith(("https://", "http://")):
            raise ValueError("a registry has an address of https or http")
        request = urllib.request.Request(url, headers={"User-Agent": "vitral"})
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            received = 0
            while received <= package.size and (part := answer.read(_CHUNK)):
                received += len(part)
                yield part
    except (OSError, ValueError, HTTPException) as error:
        raise _not_here(package, url, str(error) or type(error).__name__) from error


def _not_here(package: Package, url: str | None, why: str) -> MissingExtraError:
    hint = f"npm pack {package.name}@{package.version} elsewhere, then --runtime {package.file}"
    return MissingExtraError(f"{package.file} cannot be fetched", where=url, why=why, hint=hint)
