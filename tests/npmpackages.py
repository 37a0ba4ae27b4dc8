"""Packages of npm for tests: stand-ins made here, and real ones from the user's own cache or the registry."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from vitral.errors import MissingExtraError
from vitral.export import npm, web

AXE = npm.Package(
    "axe-core",
    "4.14.1",
    "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
    708405,
)
"""Checks of accessibility (MPL-2.0), for tests alone."""
TYPESCRIPT = npm.Package(
    "typescript",
    "5.9.3",
    "sha512-jl1vZzPDinLr9eUt3J/t7V6FgNEw9QjvBPdysz9KfQDD41fQrC2Y4vKQdiaUpFT4bXlb1RHhLpp8wtm6M5TgSw==",
    4377468,
)
"""The compiler that checks types (Apache-2.0), for tests alone."""


def packed(name: str, files: Mapping[str, bytes]) -> tuple[npm.Package, bytes]:
    """Make an archive of these files, and the package that pins it."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, content in files.items():
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    data = buffer.getvalue()
    return npm.Package(name, "1.2.3", npm._integrity(hashlib.sha512(data).digest()), len(data)), data


def pretend_runtime(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Put a small stand-in for ONNX Runtime Web in the cache, so that exports of pages fetch nothing."""
    package, data = packed("runtime", {f"package/dist/{name}": name.encode() for name in web.RUNTIME})
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(web, "PACKAGE", package)
    (folder / "vitral/npm").mkdir(parents=True, exist_ok=True)
    (folder / "vitral/npm" / package.file).write_bytes(data)


def real(package: npm.Package) -> Path:
    """The archive of a package, from the user's own cache or the registry; the test is skipped without both."""
    own, os.environ["XDG_CACHE_HOME"] = os.environ["XDG_CACHE_HOME"], os.environ["VITRAL_TESTS_CACHE"]
    try:
        return npm.archive(package)
    except MissingExtraError as error:
        pytest.skip(f"needs {package.file}: {error.why}")
    finally:
        os.environ["XDG_CACHE_HOME"] = own
