"""Manifest of a run folder: digests of its text files, whose formats cannot contain one.

A file's entry has the digests of its latest and of its previous text, and is written before the file. So a run killed
between the two writes leaves a file that matches its manifest. A new file comes before its entry. A file without one is
not checked: it is of a run killed between the two, or of a version without manifests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from vitral import bounded
from vitral.atomic import write_text
from vitral.digest import check, digest, sealed_json

_ATTEMPTS = 3  # a training process may write between the reads of a file and its manifest


class Manifest:
    """`manifest.json` of a folder."""

    def __init__(self, folder: Path):
        self.path = folder / "manifest.json"

    def known(self) -> Mapping[str, list[str]]:
        """File name → valid digests; empty without a manifest. `ValueError` for a damaged one."""
        if not self.path.is_file():
            return {}
        data = self.path.read_bytes()
        try:
            if not check(data):
                raise ValueError("it carries no digest")
            return {str(name): list(map(str, digests)) for name, digests in bounded.parse(data)["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.path.name}, which has the digest of this file, is damaged: {error}") from error

    def write(self, file: Path, text: str) -> None:
        """Replace the entry of a text file, then the file, each atomically. `ValueError` for a damaged manifest."""
        known = dict(self.known())
        before = digest(file.read_bytes()) if file.is_file() else None
        known[file.name] = [digest(text.encode()), *(one for one in known.get(file.name, []) if one == before)]
        if before is None:  # a file that is listed and missing has been removed
            write_text(file, text)
        self._replace(known)
        write_text(file, text)

    def read(self, file: Path) -> bytes:
        """Read a file; `ValueError` if its bytes are not those that were written."""
        for _ in range(_ATTEMPTS):
            data = file.read_bytes()
            entry = self.known().get(file.name)
            if entry is None or digest(data) in entry:
                return data
        raise ValueError("its bytes are not those that vitral wrote: changed by hand, or damaged")

    def accept(self, files: Iterable[Path]) -> None:
        """Accept the current content of these files, as far as they exist."""
        self._replace({file.name: [digest(file.read_bytes())] for file in files if file.is_file()})

    def _replace(self, known: Mapping[str, list[str]]) -> None:
        write_text(self.path, sealed_json({"files": dict(known)}, indent=1))
