"""Shards without an index, of any program that writes WebDataset: the index is made of their headers and labels.

A record is the files of one key, the path up to the first "." of its last part: an image, with its class in KEY.cls (a
number or a name) or in KEY.json (`class`, `label`). A file `classnames.txt` beside the shards names the numbers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitral import bounded
from vitral.data.archives import Tar, open_files
from vitral.data.dataset import SPLIT_NAMES, index_labels, shown, some
from vitral.data.decode import EXTENSIONS
from vitral.data.files import file_state
from vitral.data.shards.index import RECORD, Index, Manifest, Shard, digest_of
from vitral.errors import DataError, WriteError
from vitral.folders import cache_folder

CLASS_NAMES = "classnames.txt"
_LABELS = ("class", "class_name", "label", "cls")
"""Keys of a class in KEY.json; the first that is there counts."""
_SIDE_BYTES = 1 << 20  # of a KEY.cls or KEY.json


def scan(paths: Sequence[str], name: str, where: str) -> Manifest:
    """Return the manifest of tar files, from the user's cache if they have not changed since they were scanned.

    The names of its shards are absolute paths. Raises `DataError` for a damaged tar, and for tars without labeled
    images.
    """
    absolute = [os.path.abspath(path) for path in paths]
    states = [file_state(path, os.stat(path)) for path in absolute]
    beside = Path(absolute[0]).parent / CLASS_NAMES
    return scan_shards(absolute, states, str, beside.read_bytes, name, where)


def scan_shards(
    shards: Sequence[str], states: Sequence[str], local: Callable[[str], str], class_names: Callable[[], bytes],
    name: str, where: str,
) -> Manifest:  # fmt: skip
    """Return the manifest of shards by their names; `local` returns the path of one, `class_names` the content of
    `classnames.txt` (OSError if there is none). `states` tell if they have changed since they were scanned.
    """
    marks = "\0".join((name, *shards, *states))
    kept = cache_folder("shards") / "scanned" / hashlib.blake2b(marks.encode(), digest_size=20).hexdigest()
    try:
        return Manifest.read(kept, plain_names=False)
    except DataError:  # not scanned yet
        manifest = _scan(shards, local, class_names, name, where)
    try:
        manifest.save(kept)
    except WriteError:  # it is scanned again the next time
        return manifest
    return Manifest.read(kept, plain_names=False)


def split_of(path: str) -> str:
    """Split that a file name or its folder states ("imagenet-validation-000.tar" -> "val"), else "train"."""
    for part in path.lower().split("/")[:-3:-1]:
        words = re.split(r"[-_.]", part)
        if split := next((SPLIT_NAMES[word] for word in words if word in SPLIT_NAMES), None):
            return split
    return "train"


@dataclass
class _Rows:
    """Records of one split while its shards are scanned."""

    shards: list[Shard] = field(default_factory=list)
    rows: list[tuple[int, int, int]] = field(default_factory=list)
    """Offset, size, end of the name."""
    names: bytearray = field(default_factory=bytearray)
    labels: list[str] = field(default_factory=list)

    def index(self, labels: np.ndarray) -> Index:
        records = np.zeros(len(self.rows), RECORD)
        if self.rows:
            records["offset"], records["size"], records["name"] = np.array(self.rows, np.int64).T
        records["label"] = labels
        names = np.frombuffer(bytes(self.names), np.uint8)
        return Index(tuple(self.shards), records, names, digest_of(records, names))


def _scan(
    shards: Sequence[str], local: Callable[[str], str], class_names: Callable[[], bytes], name: str, where: str
) -> Manifest:
    splits: dict[str, _Rows] = {}
    unused: list[str] = []
    for shard in shards:
        path = local(shard)
        found, left = _records(path)
        rows = splits.setdefault(split_of(shard), _Rows())
        for offset, size, record, label in found:
            rows.names += record.encode("utf-8", "surrogateescape")
            rows.rows.append((offset, size, len(rows.names)))
            rows.labels.append(label)
        rows.shards.append(Shard(shard, len(found), os.path.getsize(path)))
        unused += left
    splits = {split: rows for split, rows in splits.items() if rows.rows}
    if not splits:
        why = f"{len(shards):,} tar files without KEY.jpg beside KEY.cls or KEY.json"
        raise DataError("no labeled images in the shards", where=where, why=why, hint="vitral data shard writes some")
    classes, labels = index_labels({split: rows.labels for split, rows in splits.items()}, where)
    indices = {split: rows.index(labels[split]) for split, rows in splits.items()}
    notes = (f"{len(unused):,} records without an image or a class are not used: {some(unused)}",) if unused else ()
    return Manifest(name, _named(classes, class_names), indices, notes)


def _named(classes: tuple[str, ...], class_names: Callable[[], bytes]) -> tuple[str, ...]:
    """Names of the classes: the lines of `classnames.txt`, if the classes are numbers of its lines."""
    if not all(one.isdecimal() for one in classes):
        return classes
    try:
        lines = class_names().decode("utf-8").splitlines()
    except (OSError, ValueError):
        return classes
    if not all(int(one) < len(lines) for one in classes):
        return classes
    names = tuple(shown(lines[int(one)].strip()) for one in classes)
    return names if len(set(names)) == len(names) else classes


def _records(path: str) -> tuple[list[tuple[int, int, str, str]], list[str]]:
    """Return offset, size, name and class of each labeled image of a tar, and the names of other records."""
    files = open_files(path)
    assert isinstance(files, Tar)
    found, unused = [], []
    for key, members in _keys(files.paths):
        image = next((one for one in members if _suffix(one) in EXTENSIONS), None)
        name, label = _about(files, key, {_suffix(one): one for one in members})
        if image is None or label is None:
            unused.append(f"{os.path.basename(path)}:{key}")
        else:
            offset, size = files.place(image)
            found.append((offset, size, name, shown(label)))
    return sorted(found), unused


def _keys(paths: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Group sorted paths by key."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(path[: len(path) - len(_suffix(path))], []).append(path)
    yield from groups.items()


def _suffix(path: str) -> str:
    """From the first "." of the last part on, in lower case: ".jpg", ".seg.png"."""
    _, dot, rest = path[path.rfind("/") + 1 :].partition(".")
    return (dot + rest).lower()


def _about(files: Tar, key: str, members: dict[str, str]) -> tuple[str, str | None]:
    """Name of a record, and its class if it has one."""
    about: Any = {}
    try:
        if path := members.get(".json"):
            about = bounded.parse(files.read(path, _SIDE_BYTES))
        about = about if isinstance(about, dict) else {}
        label = next((about[one] for one in _LABELS if isinstance(about.get(one), str)), None)
        if label is None and (path := members.get(".cls")):
            label = files.read(path, _SIDE_BYTES).decode("utf-8").strip()
        if label is None:
            label = next((str(about[one]) for one in _LABELS if type(about.get(one)) is int), None)
    except (OSError, ValueError):
        label = None
    name = about.get("name")
    return name if isinstance(name, str) and name else key, label or None
