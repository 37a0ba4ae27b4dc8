"""Shards on this machine: a folder of them, or a pattern of their paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitral.data.dataset import DataSet
from vitral.data.files import is_hidden, is_image
from vitral.data.shards.index import MANIFEST, Manifest
from vitral.data.shards.patterns import braces, is_pattern, matching
from vitral.data.shards.reading import LocalStore, dataset_of, defects
from vitral.data.shards.scan import scan
from vitral.errors import DataError
from vitral.wording import natural, some

_SHARD = ".tar"


def accepts(data: str) -> bool:
    """True for a folder of shards, and for a pattern of tar files."""
    if os.path.isdir(data):
        return os.path.isfile(os.path.join(data, MANIFEST)) or _holds_only_tars(data)
    return data.endswith(_SHARD) and is_pattern(data) and not os.path.exists(data) and "://" not in data


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """Load the records of the shards; shards that are missing or of another size are in the notes."""
    if not os.path.isdir(data):
        return of_pattern(data)
    if os.path.isfile(os.path.join(data, MANIFEST)):
        return of_folder(data, data)
    name = os.path.basename(os.path.abspath(data)) or "data"
    return _scanned([os.path.join(data, one) for one in os.listdir(data) if one.endswith(_SHARD)], name, data)


def of_folder(folder: str, source: str, names: Sequence[str] | None = None) -> DataSet:
    """Load a folder with an index; `names` selects shards by their file names."""
    manifest = Manifest.read(Path(folder))
    store = LocalStore(os.path.abspath(folder), os.path.join(folder, ""))
    chosen = selected(manifest, names, source) if names is not None else None
    dataset = dataset_of(manifest, store, source, chosen)
    return replace(dataset, notes=(*dataset.notes, *defects(manifest, store.size, chosen)))


def selected(manifest: Manifest, names: Sequence[str], source: str) -> dict[str, list[int]]:
    """Numbers of the named shards, split by split; `DataError` for a name that the index lacks."""
    place = {shard.name: (split, k) for split, one in manifest.splits.items() for k, shard in enumerate(one.shards)}
    if unknown := [name for name in names if name not in place]:
        raise DataError("shards that are not in the index", where=source, why=some(unknown), hint="check the pattern")
    chosen: dict[str, list[int]] = {}
    for name in dict.fromkeys(names):
        split, number = place[name]
        chosen.setdefault(split, []).append(number)
    return {split: sorted(numbers) for split, numbers in chosen.items()}


def of_pattern(data: str) -> DataSet:
    """Load the shards that a pattern names, or a single one by its path."""
    paths = [path for word in braces(data) for path in matching(word)]
    if not paths:
        raise DataError("no such shards", where=data, why="the pattern matches no file", hint="check the pattern")
    folder = os.path.dirname(paths[0])
    inside = all(os.path.dirname(path) == folder for path in paths)
    if inside and os.path.isfile(os.path.join(folder, MANIFEST)):
        return of_folder(folder, data, [os.path.basename(path) for path in paths])
    if gone := [path for path in paths if not os.path.isfile(path)]:
        why = f"{len(gone):,} of {len(paths):,} are missing: {some(gone)}"
        raise DataError("no such shards", where=data, why=why, hint="check the pattern")
    name = os.path.basename(os.path.abspath(folder)) or "data"
    return _scanned(paths, name, data)


def _scanned(paths: Sequence[str], name: str, source: str) -> DataSet:
    manifest = scan(sorted(paths, key=natural), name, source)
    return dataset_of(manifest, LocalStore(os.sep, ""), source)


def _holds_only_tars(folder: str) -> bool:
    """True if a folder has tar files, no other folder, no image and no table. Stops at the first of these."""
    found = False
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_hidden(entry.name):
                    continue
                if is_image(entry.name) or entry.name.lower().endswith((".csv", ".tsv")) or entry.is_dir():
                    return False
                found = found or entry.name.endswith(_SHARD)
    except OSError:
        return False
    return found
