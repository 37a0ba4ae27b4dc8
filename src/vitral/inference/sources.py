"""Sources of many images: folders, archives, shards and lists of paths. Listing one decodes nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

from vitral.data.archives import ARCHIVES, open_files
from vitral.data.dataset import DataSet, Split
from vitral.data.files import Files, is_image, respelled, unread_files
from vitral.data.sources import parquet, remote, shards
from vitral.data.spellings import respelled_note
from vitral.errors import DataError, empty, nearest
from vitral.folders import is_run
from vitral.wording import natural, some

_LONGEST_LINE = 1 << 16
"""Most bytes of a line in a list of paths; a longer one means another kind of file."""


class _Paths:
    """Images of one place, by path."""

    def __init__(self, where: str):
        self.where = where

    @cached_property
    def files(self) -> Files:
        """All files of the place."""
        return open_files(self.where)

    @cached_property
    def paths(self) -> list[str]:
        """Paths of the images, in natural order."""
        return sorted(filter(is_image, self.files.paths), key=natural)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what was left out."""
        return (*self.files.notes, *unread_files(self.files.paths))

    def check(self) -> None:
        """Raise `DataError` if there is no image, or an archive is damaged."""
        if not self.paths:
            raise DataError("no images", where=self.where)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)


class Folder(_Paths):
    """The images of a folder at all levels: those that training reads."""

    @cached_property
    def paths(self) -> list[str]:
        return sorted((str(Path(self.where, path)) for path in filter(is_image, self.files.paths)), key=natural)


class Archive(_Paths):
    """The images of a .tar, .zip or .tar.gz, read without unpacking."""

    def name(self, path: str) -> str:
        """Return the name for messages: `photos.zip:cat/1.jpg`."""
        return self.files.prefix + path


_RECORDS = (remote, shards, parquet)
"""Sources whose images are records of larger files."""


class Shards:
    """The images of shards or Parquet files, split by split, in the order of their records."""

    def __init__(self, where: str):
        self.where = where

    @cached_property
    def dataset(self) -> DataSet:
        source = next(one for one in _RECORDS if one.accepts(self.where))
        return source.load(self.where, root=Path(), download=False)

    def check(self) -> None:
        """Raise `DataError` if the shards cannot be read."""
        if not len(self):
            raise DataError("no images", where=self.where)

    def __len__(self) -> int:
        return sum(map(len, self.dataset.splits.values()))

    def __iter__(self) -> Iterator[tuple[Split, int]]:
        for split in self.dataset.splits.values():
            yield from ((split, number) for number in range(len(split)))


class ListFile:
    """The paths in a text file, one a line, relative to its own folder; empty lines are skipped.

    Lines are read lazily: a list may exceed the memory.
    """

    def __init__(self, where: str):
        self.where = where

    @cached_property
    def _survey(self) -> tuple[int, list[str]]:
        """Number of the paths, and those whose files are spelled in another form of Unicode."""
        total, others = 0, []
        for _, path in self:
            total += 1
            if not path.isascii() and not os.path.lexists(path) and respelled(path):
                others.append(path)
        return total, others

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the list, a sentence each."""
        return (respelled_note(self.where, others),) if (others := self._survey[1]) else ()

    def check(self) -> None:
        """Raise `DataError` if the file is empty or not a list of paths."""
        if not len(self):
            raise DataError("no images", where=self.where, why="the list is empty", hint="one path per line")

    def __len__(self) -> int:
        return self._survey[0]

    def __iter__(self) -> Iterator[tuple[int, str]]:
        """Yield the number of each line with its path."""
        folder = os.path.dirname(self.where)
        try:
            with open(self.where, "rb") as file:
                if file.read(3) != b"\xef\xbb\xbf":  # UTF-8's byte order mark, which some editors write
                    file.seek(0)
                for number in itertools.count(1):
                    if not (line := file.readline(_LONGEST_LINE + 1)):
                        break
                    if len(line) > _LONGEST_LINE or b"\0" in line:
                        why = (
                            f"a line is longer than {_LONGEST_LINE:,} bytes"
                            if len(line) > _LONGEST_LINE
                            else "it is not text"
                        )
                        raise DataError("not a list of images", where=self.where, why=why, hint="one path per line")
                    if path := os.fsdecode(line.rstrip(b"\r\n")):
                        yield number, os.path.join(folder, path)
        except OSError as error:
            raise DataError("cannot read list", where=self.where, why=error.strerror or str(error)) from error


ManyImages = Folder | Archive | Shards | ListFile
"""A path of many images."""
Source = ManyImages | str
"""A path of images; a str is the path of one image."""


def is_shards(path: str) -> bool:
    """True for shards, on this machine or in an object store, and for Parquet files."""
    return any(one.accepts(path) for one in _RECORDS)


def source_at(path: str) -> ManyImages | None:
    """Return the source at an existing path of many images; None for a path of one image, or of none."""
    if is_shards(path):
        return Shards(path)
    if os.path.isdir(path):
        return Folder(path)
    if os.path.isfile(path) and path.lower().endswith(ARCHIVES):
        return Archive(path)
    return ListFile(path) if os.path.isfile(path) and path.lower().endswith(".txt") else None


def find(paths: Sequence[str | Path], command: str = "predict") -> list[Source]:
    """Return the sources for the paths of a command line.

    Raises `DataError` for a missing path, a damaged archive or list, and paths without any image; `UsageError` for an
    empty path.
    """
    sources: list[Source] = []
    for path in map(str, paths):
        if not path:
            raise empty("IMAGE", _usage(command))
        path = path if os.path.lexists(path) else respelled(path) or path
        found = source_at(path)
        if found is None and not os.path.lexists(path):
            raise DataError("no such image or folder", where=path, why=_beside(path), hint=_usage(command))
        sources.append(str(Path(path)) if found is None else found)
    if not count(sources):
        why = None if paths else "the first argument is the run or weights, and no image follows it"
        if any(map(is_run, map(Path, paths))):
            why = "it is a run, which must be the first argument"
        where, verb = ", ".join(map(str, paths)) or None, "search" if command == "similar" else command
        raise DataError(f"no images to {verb}", where=where, why=why, hint=_usage(command))
    return sources


def notes(sources: Sequence[Source]) -> list[str]:
    """Return notes on what the sources leave out, a sentence each."""
    found: list[str] = []
    for source in sources:
        if isinstance(source, Folder | Archive | ListFile):
            found += source.notes
        elif isinstance(source, Shards):
            found += source.dataset.notes
    return found


def count(sources: Sequence[Source]) -> int:
    """Return the number of images; each list is read once."""
    return sum(1 if isinstance(source, str) else len(source) for source in sources)


def find_images(paths: Sequence[str | Path], command: str = "predict") -> list[Path]:
    """Return the image files at these paths, with those in folders. Raises the errors of `find`."""
    files: list[Path] = []
    for source in find(paths, command):
        if isinstance(source, Folder):
            files += map(Path, source.paths)
        else:
            files.append(Path(source if isinstance(source, str) else source.where))
    return files


def _beside(path: str) -> str:
    """Describe what the nearest existing folder above a missing path contains."""
    parent = next(one for one in Path(os.path.abspath(path)).parents if one.is_dir())
    missing = Path(os.path.abspath(path)).relative_to(parent).parts[0]
    folder = os.path.relpath(parent)
    try:
        names = sorted((one.name for one in parent.iterdir() if not one.name.startswith(".")), key=natural)
    except OSError:
        return f"there is no '{missing}' in '{folder}'"
    place = "the current folder" if folder == "." else f"'{folder}'"
    return f"{place} contains {some(nearest(missing, names) or names)}" if names else f"{place} is empty"


def _usage(command: str) -> str:
    if command == "evaluate":
        return "vitral evaluate RUN --unknown FOLDER"
    if command == "label":
        return "vitral label FOLDER"
    return f"vitral {command} RUN IMAGE{' FOLDER' if command == 'similar' else '_OR_FOLDER'} …"
