"""Parquet files of images on this machine: one, a pattern of them, or a folder as Hugging Face's hub has it."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from vitral.data.dataset import DataSet, natural, some
from vitral.data.files import file_state
from vitral.data.shards.index import Shard
from vitral.data.shards.parquet import ParquetStore
from vitral.data.shards.patterns import braces, is_pattern
from vitral.data.shards.reading import dataset_of
from vitral.data.shards.scan import scan_shards
from vitral.errors import DataError

SUFFIX = ".parquet"


def accepts(data: str) -> bool:
    """True for a Parquet file, a pattern of them, and a folder that holds them directly or in its folder `data`."""
    if os.path.isdir(data):
        return bool(_inside(data))
    return data.endswith(SUFFIX) and (os.path.isfile(data) or is_pattern(data))


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """Load the rows of the files, which are packed as tars in the user's cache the first time."""
    if os.path.isdir(data):
        files = _inside(data)
    else:
        files = [path for word in braces(data) for path in (sorted(glob.glob(word), key=natural) or [word])]
    if gone := [path for path in files if not os.path.isfile(path)]:
        why = f"{len(gone):,} of {len(files):,} are missing: {some(gone)}"
        raise DataError("no such Parquet files", where=data, why=why, hint="check the pattern")
    absolute = [os.path.abspath(path) for path in files]
    states = {path: file_state(path, os.stat(path)) for path in absolute}
    name = os.path.basename(os.path.abspath(data if os.path.isdir(data) else os.path.dirname(files[0]))) or "data"
    return of_files(states, {path: os.path.getsize(path) for path in absolute}, None, name, data)


def of_files(
    states: Mapping[str, str], sizes: Mapping[str, int], fetch: Callable[[str, Path], None] | None, name: str,
    source: str,
) -> DataSet:  # fmt: skip
    """Load files by name or address: `states` tell if one has changed, `fetch` (address, path) brings a remote one."""
    store = ParquetStore(states, fetch)

    def local(file: str) -> str:
        return store.open(Shard(file, 0, sizes[file])).path

    def no_names() -> bytes:
        raise FileNotFoundError

    manifest = scan_shards(list(states), list(states.values()), local, no_names, name, source)
    return dataset_of(manifest, store, source)


def _inside(folder: str) -> list[str]:
    """The Parquet files of a folder, or of its folder `data`."""
    for place in (folder, os.path.join(folder, "data")):
        if found := glob.glob(os.path.join(glob.escape(place), f"*{SUFFIX}")):
            return sorted(found, key=natural)
    return []
