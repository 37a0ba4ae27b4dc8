"""`Files`: one protocol for the files of folders and archives; and its implementation for folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from vitral.data.dataset import DataSet, Fetch, LazyNames, Split, case_notes, in_order
from vitral.data.images.decode import EXTENSIONS, MAX_BYTES, check_link
from vitral.data.images.file_kinds import LIKE_IMAGES, VIDEOS
from vitral.data.spellings import by_composed, nfc
from vitral.data.targets.classes import index_labels
from vitral.errors import DataError
from vitral.folders import RUN_FILES
from vitral.wording import count, shown, some


class Files(Protocol):
    """A tree of regular files, without hidden ones."""

    where: str
    """The path as typed."""
    prefix: str
    """Prefix that turns a relative path into a name for messages."""

    @property
    def paths(self) -> Sequence[str]:
        """Relative paths with "/", sorted."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on what was left out, a sentence each."""

    def find(self, path: str) -> str | None:
        """Return the path of a file as it is spelled here: "é" may be one character or two. None for no such file, and
        for several.
        """

    def read(self, path: str, limit: int) -> bytes:
        """Read a file; ValueError above `limit` bytes, OSError if it cannot be read."""

    def fetch(self, paths: Sequence[str]) -> Fetch:
        """A `Fetch` of these files, at most `MAX_BYTES` each."""


def is_hidden(part: str) -> bool:
    """True for files and folders that operating systems and tools create."""
    return part.startswith(".") or part in ("__MACOSX", "Thumbs.db", "desktop.ini", "lost+found")


def is_image(path: str) -> bool:
    """True if the extension is that of an image format."""
    return os.path.splitext(path)[1].lower() in EXTENSIONS


def common_folders(paths: Sequence[str]) -> list[str]:
    """The folders shared by all paths, outermost first."""
    first, last = min(paths).split("/")[:-1], max(paths).split("/")[:-1]
    shared = 0  # the common prefix of the first and the last in sorted order is that of all
    while shared < min(len(first), len(last)) and first[shared] == last[shared]:
        shared += 1
    return first[:shared]


def count_extensions(paths: Sequence[str]) -> str:
    """Count files by extension, for a message: ".txt (3), .json (1)"."""
    count = Counter(os.path.splitext(path)[1].lower() or "no extension" for path in paths)
    return some([f"{extension} ({n:,})" for extension, n in count.most_common()], 5)


def _named(paths: Sequence[str]) -> str:
    """List a few files by name; of more files, count the extensions and list some."""
    names = some(sorted(paths))
    return names if len(paths) <= _FEW_NAMES else f"{count_extensions(paths)}, such as {names}"


_FEW_NAMES = 3


def other_files(paths: Sequence[str]) -> list[str]:
    """Notes on files that are no images that are read, with those of image formats apart."""
    notes = unread_files(paths)
    rest = [path for path in paths if os.path.splitext(path)[1].lower() not in LIKE_IMAGES | VIDEOS]
    are = "is" if len(rest) == 1 else "are"
    return notes + ([f"{count(len(rest), 'other file')} {are} not used: {_named(rest)}"] if rest else [])


def unread_files(paths: Sequence[str]) -> list[str]:
    """Notes on images of formats that are not read, and on videos."""
    images = [path for path in paths if os.path.splitext(path)[1].lower() in LIKE_IMAGES]
    videos = [path for path in paths if os.path.splitext(path)[1].lower() in VIDEOS]
    what = "images of formats that are not read"
    notes = [f"{len(images):,} {what}: {_named(images)}; convert them to JPEG or PNG"] if images else []
    if videos:
        are = "is" if len(videos) == 1 else "are"
        notes.append(f"{count(len(videos), 'video')} {are} not used: {_named(videos)}; extract their frames")
    return notes


def is_like_image(path: str) -> bool:
    """True if the extension is that of an image format, read or not."""
    return is_image(path) or os.path.splitext(path)[1].lower() in LIKE_IMAGES


def build_dataset(
    files: Files,
    name: str,
    where: str,
    rows: Mapping[str, tuple[list[str], list[str]]],
    notes: Sequence[str] = (),
    unused: int = 0,
) -> DataSet:
    """Build a data set; `rows` has paths and class names of every split, `where` is for errors."""
    classes, labels = index_labels({split: texts for split, (_, texts) in rows.items()}, where, _unopened_only(rows))
    splits = splits_of(files, {split: paths for split, (paths, _) in rows.items()}, labels)
    return DataSet(name, classes, splits, where, (*notes, *case_notes(classes)), unused=unused)


def splits_of(files: Files, paths: Mapping[str, list[str]], labels: Mapping[str, np.ndarray]) -> dict[str, Split]:
    """Build the splits of paths and labels."""
    return in_order(
        {split: Split(Names(files.prefix, own), labels[split], files.fetch(own)) for split, own in paths.items()}
    )


def _unopened_only(rows: Mapping[str, tuple[list[str], list[str]]]) -> set[str]:
    """Classes without any folder that can be opened: they are reported by name, in any split."""
    if not any(path.endswith(UNOPENED) for paths, _ in rows.values() for path in paths):
        return set()
    pairs = [pair for paths, labels in rows.values() for pair in zip(paths, labels, strict=True)]
    opened = {label for path, label in pairs if not path.endswith(UNOPENED)}
    return {label for _, label in pairs} - opened


@dataclass(frozen=True)
class Names(LazyNames):
    """Names of files below one prefix, joined on access."""

    prefix: str
    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, i: int) -> str:
        path = self.paths[i]
        return shown(path if path.startswith("/") else self.prefix + path)

    def part(self, which: slice) -> Sequence[str]:
        return Names(self.prefix, self.paths[which])

    def relative(self) -> list[str]:
        return list(self.paths)


@dataclass
class LeftOut:
    """Files and rows that a reader met and does not use, by reason."""

    found: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """(what it is, why it is not used) → names."""

    def add(self, what: str, why: str, name: str) -> None:
        """Record one: "image", "without a class"."""
        self.found.setdefault((what, why), []).append(name)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each kind, with some of the names."""
        return tuple(
            f"{count(len(names), what)} {why} {'is' if len(names) == 1 else 'are'} not used: {some(sorted(names))}"
            for (what, why), names in sorted(self.found.items())
        )


class Folder:
    """The files below a folder. Links are followed, except to a parent folder; one that leads nowhere counts as an
    unreadable image if its name is that of an image: git-annex and DVC leave these for files that were not fetched.

    A folder that cannot be opened counts as one unreadable image. Run folders are left out.
    """

    def __init__(self, where: str):
        self.where, self.prefix = where, os.path.join(where, "")
        self.root = os.path.realpath(where)  # a link to the folder leads to the same files, and so to the same caches

    @cached_property
    def _listing(self) -> tuple[list[str], tuple[str, ...]]:
        left = LeftOut()
        try:
            return sorted(_walk(self.root, left)), left.notes
        except OSError as error:
            where = shown(error.filename or self.where)
            raise DataError("cannot read folder", where=where, why=error.strerror or str(error)) from error

    @property
    def paths(self) -> Sequence[str]:
        return self._listing[0]

    @property
    def notes(self) -> tuple[str, ...]:
        return self._listing[1]

    def find(self, path: str) -> str | None:
        if os.path.isfile(os.path.join(self.root, path)):
            return path
        other = respelled(path, self.root)
        return other if other is not None and os.path.isfile(os.path.join(self.root, other)) else None

    def read(self, path: str, limit: int) -> bytes:
        return read_file(os.path.join(self.root, path), limit)

    def fetch(self, paths: Sequence[str]) -> Fetch:
        return FolderFetch(self.root, paths)


def respelled(path: str, root: str = "") -> str | None:
    """Find the file or folder, below `root` or not, whose path is in another form of Unicode: composed or decomposed.

    None if there is none, or several. Archives of a Mac hold decomposed names, keyboards write composed ones.
    """
    if path.isascii():
        return None
    found = ["/" if path.startswith("/") else ""]
    for part in filter(None, path.split("/")):
        found = [os.path.join(one, name) for one in found for name in _alike(os.path.join(root, one) or ".", part)]
    there = [one for one in found if os.path.exists(os.path.join(root, one))]
    return there[0] if len(there) == 1 else None


def _alike(folder: str, name: str) -> Sequence[str]:
    """Names in a folder that are this one in any form of Unicode."""
    if name.isascii():
        return (name,)
    try:
        return _composed_names(folder, os.stat(folder).st_mtime_ns).get(nfc(name), ())
    except (OSError, ValueError):
        return ()


@lru_cache(maxsize=4096)
def _composed_names(folder: str, changed: int) -> Mapping[str, Sequence[str]]:
    """Composed name → names, of a folder that was last `changed` then: a table may have millions of rows."""
    return by_composed(os.listdir(folder))


UNOPENED = "(folder that cannot be opened).jpg"
"""File name of a placeholder, which is reported as an unreadable image."""


def _walk(root: str, left: LeftOut) -> Iterator[str]:
    """Yield paths of regular files below the root; add empty folders, run folders and broken links to `left`."""
    todo: list[tuple[str, frozenset[tuple[int, int]]]] = [("", frozenset())]
    while todo:
        prefix, above = todo.pop()
        try:
            here, kept = _entries(os.path.join(root, prefix))
        except OSError:
            if not prefix:
                raise
            yield prefix + UNOPENED
            continue
        if here in above:
            continue
        if not kept and prefix:
            left.add("folder", "without files", prefix.rstrip("/"))
        if prefix and {entry.name for entry in kept} >= RUN_FILES:
            left.add("folder", "of a run", prefix.rstrip("/"))
            continue
        for entry in kept:
            try:
                if entry.is_dir():
                    todo.append((f"{prefix}{entry.name}/", above | {here}))
                elif entry.is_file() or (_is_broken(entry) and is_image(entry.name)):  # no pipes, sockets or devices
                    yield prefix + entry.name
                elif _is_broken(entry):
                    left.add("link", "to nothing", prefix + entry.name)
            except OSError:  # a link to itself
                yield prefix + entry.name if is_image(entry.name) else f"{prefix}{entry.name}/{UNOPENED}"


def _is_broken(entry: os.DirEntry[str]) -> bool:
    """True for a link to nothing."""
    return entry.is_symlink() and not os.path.exists(entry.path)


def _entries(folder: str) -> tuple[tuple[int, int], list[os.DirEntry[str]]]:
    """A folder's device and inode numbers, and its entries."""
    status = os.stat(folder)
    with os.scandir(folder) as entries:
        return (status.st_dev, status.st_ino), [entry for entry in entries if not is_hidden(entry.name)]


@dataclass(frozen=True)
class FolderFetch:
    """Fetch of files below `root` (absolute)."""

    root: str
    paths: Sequence[str]

    def __call__(self, i: int) -> bytes:
        return read_file(os.path.join(self.root, self.paths[i]), MAX_BYTES)

    def identity(self, i: int) -> str:
        path = os.path.join(self.root, self.paths[i])
        return file_state(path, os.stat(path))

    def size(self, i: int) -> int:
        return os.stat(os.path.join(self.root, self.paths[i])).st_size


def file_state(path: str, status: os.stat_result) -> str:
    """Path, device, inode, size and times: changes when the path leads to another file, or the file is rewritten.

    The time of the last change of an inode (ctime) cannot be set, as a modification time can: `rsync -t` and archives
    made for reproducible builds leave another file with the same name, size and modification time.
    """
    return " ".join(map(str, (path, *file_numbers(status))))


def file_numbers(status: os.stat_result) -> tuple[int, ...]:
    """Device, inode, size, and times of the last modification and change in ns: the identity of a file's content."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_file(path: str | Path, limit: int) -> bytes:
    """Read a regular file; ValueError above `limit` bytes."""
    check_link(path)
    with open(path, "rb") as file:
        check_size(os.fstat(file.fileno()).st_size, limit)
        return file.read(limit + 1)


def check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ValueError(f"{size:,} bytes; the limit is {limit:,}")
