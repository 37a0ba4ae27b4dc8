"""Shards without an index, of any program that writes WebDataset: the index is made of their headers and labels.

A record is an image with its class, in KEY.cls (a number or a name) or in KEY.json (`class`, `label`). The key is the
path up to the first "." of its last part; or up to the last one, where that has a class of its own. A file
`classnames.txt` beside the shards names the numbers. What is no record is counted in a note.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from vitral import bounded
from vitral.data.archives import Tar, open_files
from vitral.data.dataset import SPLIT_NAMES, SPLITS, split_name
from vitral.data.files import LeftOut, file_state, is_image
from vitral.data.shards.index import RECORD, Index, Manifest, Shard, digest_of
from vitral.data.spellings import is_missing
from vitral.data.targets.classes import index_labels
from vitral.errors import DataError, WriteError
from vitral.folders import cache_folder
from vitral.wording import count, shown, some

CLASS_NAMES = "classnames.txt"
_LABELS = ("class", "class_name", "label", "cls")
"""Keys of a class in KEY.json; the first that is there counts."""
_RULES = "2"
"""Changes with the rules of scanning: a manifest that was made by others is not taken from the cache."""
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
    shards: Sequence[str],
    states: Sequence[str],
    local: Callable[[str], str],
    class_names: Callable[[], bytes],
    name: str,
    where: str,
) -> Manifest:
    """Return the manifest of shards by their names; `local` returns the path of one, `class_names` the content of
    `classnames.txt` (OSError if there is none). `states` tell if they have changed since they were scanned.
    """
    try:
        given = class_names()
    except OSError:
        given = b""
    marks = "\0".join((_RULES, name, *shards, *states, hashlib.blake2b(given).hexdigest()))
    kept = cache_folder("shards") / "scanned" / hashlib.blake2b(marks.encode(), digest_size=20).hexdigest()
    try:
        return Manifest.read(kept, plain_names=False)
    except DataError:  # not scanned yet
        manifest = _scan(shards, local, given, name, where)
    try:
        manifest.save(kept)
    except WriteError:  # it is scanned again the next time
        return manifest
    return Manifest.read(kept, plain_names=False)


def splits_of_names(paths: Sequence[str], where: str) -> list[str]:
    """Split that the name of each file or its folder states ("imagenet-validation-000.tar" -> "val"): all train where
    none states any. Raises `DataError` if some do and others do not: those may be held out.
    """
    stated = [_stated_split(path) for path in paths]
    if any(stated) and (unknown := [path for path, split in zip(paths, stated, strict=True) if not split]):
        named = some([posixpath.basename(one) for one in unknown])
        why = f"{named}, beside {', '.join(split for split in SPLITS if split in stated)}"
        hint = "put the split (train, val or test) into the file name, or give a pattern of the files to read"
        raise DataError(f"{count(len(unknown), 'file')} of an unknown split", where=where, why=why, hint=hint)
    return [split or "train" for split in stated]


def _stated_split(path: str) -> str | None:
    """Return the split that is a word of the file's name, else the one that its folder is called; None without."""
    folder, name = posixpath.split(path.lower())
    stated = (SPLIT_NAMES[word] for word in re.split(r"[-_.]", name) if word in SPLIT_NAMES)
    return next(stated, None) or split_name(posixpath.basename(folder))


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


def _scan(shards: Sequence[str], local: Callable[[str], str], class_names: bytes, name: str, where: str) -> Manifest:
    splits: dict[str, _Rows] = {}
    left, cut_off = LeftOut(), list[str]()
    for shard, split in zip(shards, splits_of_names(shards, where), strict=True):
        path = local(shard)
        files = open_files(path)
        assert isinstance(files, Tar)
        found = _records(files, posixpath.basename(shard), left)
        cut_off += [posixpath.basename(shard)] * files.cut_off
        rows = splits.setdefault(split, _Rows())
        for offset, size, record, label in found:
            rows.names += record.encode("utf-8", "surrogateescape")
            rows.rows.append((offset, size, len(rows.names)))
            rows.labels.append(label)
        rows.shards.append(Shard(shard, len(found), os.path.getsize(path)))
    splits = {split: rows for split, rows in splits.items() if rows.rows}
    if not splits:
        why = f"{len(shards):,} tar files without KEY.jpg beside KEY.cls or KEY.json"
        raise DataError("no labeled images in the shards", where=where, why=why, hint="vitral data shard writes some")
    classes, labels = index_labels({split: rows.labels for split, rows in splits.items()}, where)
    indices = {split: rows.index(labels[split]) for split, rows in splits.items()}
    cut = (f"{count(len(cut_off), 'shard')} without an end mark, perhaps cut off: {some(cut_off)}",) if cut_off else ()
    return Manifest(name, _named(classes, class_names), indices, (*left.notes, *cut))


def _named(classes: tuple[str, ...], class_names: bytes) -> tuple[str, ...]:
    """Names of the classes: the lines of `classnames.txt`, if the classes are numbers of its lines."""
    if not all(one.isdecimal() for one in classes):
        return classes
    try:
        lines = class_names.decode("utf-8").splitlines()
    except ValueError:
        return classes
    if not all(int(one) < len(lines) for one in classes):
        return classes
    names = tuple(shown(lines[int(one)].strip()) for one in classes)
    return names if len(set(names)) == len(names) else classes


def _records(files: Tar, shard: str, left: LeftOut) -> list[tuple[int, int, str, str]]:
    """Return offset, size, name and class of each labeled image of a tar; add what is no record to `left`."""
    found = []
    for (what, why), names in files.left.found.items():
        for one in names:
            left.add(what, why, f"{shard}:{one}")
    for key, members in _keys(files.paths).items():
        images, taken = list(filter(is_image, members)), set[str]()
        sides = {(stem, suffix.lower()): one for one in members for stem, suffix in [posixpath.splitext(one)]}
        for image in images:
            stem = posixpath.splitext(image)[0]
            about = {suffix: sides[stem, suffix] for suffix in _SIDES if (stem, suffix) in sides}
            name, label = _about(files, stem, about)
            if label is not None and stem not in taken:
                taken.add(stem)
                offset, size = files.place(image)
                found.append((offset, size, name, shown(label)))
            elif not taken:
                left.add("image", "without a class", f"{shard}:{image}")
            else:
                left.add("image", "beside another of the same key", f"{shard}:{image}")
        if not images and posixpath.basename(key):
            left.add("record", "without an image", f"{shard}:{key}")
    return sorted(found)


_SIDES = (".cls", ".json")


def _keys(paths: Sequence[str]) -> dict[str, list[str]]:
    """Group paths by key, those of a key from the shortest to the longest: "p.png" before "p.seg.png"."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        folder, name = posixpath.split(path)
        groups.setdefault(posixpath.join(folder, name.partition(".")[0]), []).append(path)
    return {key: sorted(members, key=len) for key, members in groups.items()}


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
        label = None if is_missing(label or "", hidden=True) else label
    except (OSError, ValueError):
        label = None
    name = about.get("name")
    return name if isinstance(name, str) and name else key, label
