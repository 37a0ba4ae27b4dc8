"""Parquet files of images on this machine: one, a pattern of them, or a folder as Hugging Face's hub has it."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from vitral.data.dataset import DataSet
from vitral.data.files import file_state, is_image
from vitral.data.shards.index import Shard
from vitral.data.shards.parquet import ParquetStore
from vitral.data.shards.patterns import braces, is_pattern, matching
from vitral.data.shards.reading import dataset_of
from vitral.data.shards.scan import scan_shards
from vitral.data.targets import ANY, Labeling
from vitral.errors import DataError
from vitral.wording import natural, some

SUFFIX = ".parquet"


def accepts(data: str) -> bool:
    """True for a Parquet file, a pattern of them, and a folder that holds them directly or in its folder `data`.

    A folder with images or folders beside its Parquet files is one of images, in which a table of predictions lies.
    """
    if os.path.isdir(data):
        return bool(_inside(data))
    return data.endswith(SUFFIX) and (os.path.isfile(data) or is_pattern(data))


def load(data: str, *, root: Path, download: bool, wanted: Labeling = ANY) -> DataSet:
    """Load the rows of the files, which are packed as tars in the user's cache the first time; `wanted` may name the
    column of the classes.
    """
    if os.path.isdir(data):
        files = _inside(data)
    else:
        files = [path for word in braces(data) for path in matching(word) or [word]]
    if gone := [path for path in files if not os.path.isfile(path)]:
        why = f"{len(gone):,} of {len(files):,} are missing: {some(gone)}"
        raise DataError("no such Parquet files", where=data, why=why, hint="check the pattern")
    absolute = [os.path.abspath(path) for path in files]
    states = {path: file_state(path, os.stat(path)) for path in absolute}
    name = os.path.basename(os.path.abspath(data if os.path.isdir(data) else os.path.dirname(files[0]))) or "data"
    return of_files(states, {path: os.path.getsize(path) for path in absolute}, None, name, data, wanted)


def of_files(
    states: Mapping[str, str],
    sizes: Mapping[str, int],
    fetch: Callable[[str, Path], None] | None,
    name: str,
    source: str,
    wanted: Labeling,
) -> DataSet:
    """Load files by name or address: `states` tell if one has changed, `fetch` (address, path) brings a remote one."""
    if len(wanted.columns) > 1:
        raise DataError("Parquet with several labels an image is not read", where=source, hint="--targets COLUMN")
    column = wanted.columns[0] if wanted.columns else None
    store = ParquetStore(states, fetch, label=column)

    def local(file: str) -> str:
        return store.open(Shard(file, 0, sizes[file])).path

    def no_names() -> bytes:
        raise FileNotFoundError

    manifest = scan_shards(list(states), [f"{one} {column}" for one in states.values()], local, no_names, name, source)
    dataset = dataset_of(manifest, store, source)
    return replace(dataset, reason=f"the column {column} has one class per image") if column else dataset


def _visible(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder whose names do not begin with a dot; none if it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return [one for one in entries if not one.name.startswith(".")]
    except OSError:
        return []


def _inside(folder: str) -> list[str]:
    """The Parquet files of a folder, or of its folder `data`."""
    for place in (folder, os.path.join(folder, "data")):
        found = glob.glob(os.path.join(glob.escape(place), f"*{SUFFIX}"))
        if found and not any(one.is_dir() or is_image(one.name) for one in _visible(place)):
            return sorted(found, key=natural)
    return []
