"""Shards and Parquet files in an object store, by address: "s3://bucket/shards/", "hf://datasets/ORG/NAME"."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vitral.atomic import replacing
from vitral.data.dataset import DataSet
from vitral.data.shards.cache import key_of
from vitral.data.shards.index import MANIFEST, Manifest, Shard, index_files
from vitral.data.shards.patterns import braces, is_glob, is_pattern
from vitral.data.shards.reading import dataset_of, defects
from vitral.data.shards.remote import Remote, is_remote
from vitral.data.shards.remote_store import RemoteStore
from vitral.data.shards.scan import CLASS_NAMES, scan_shards
from vitral.data.sources import parquet
from vitral.data.sources.shards import selected
from vitral.data.targets import ANY, Labeling
from vitral.errors import DataError, VitralError
from vitral.folders import cache_folder
from vitral.wording import natural, some


def accepts(data: str) -> bool:
    """True for an address of a store."""
    return is_remote(data)


def load(data: str, *, root: Path, download: bool, wanted: Labeling = ANY) -> DataSet:
    """Load the records of the shards at an address; only the index is fetched, or with no index each shard once."""
    try:
        if data.endswith((".tar", parquet.SUFFIX)) or is_pattern(data):
            return _of_pattern(data, wanted)
        return _of_folder(data.rstrip("/") + "/", data, wanted)
    except VitralError:
        raise
    except (OSError, ValueError) as error:
        hint = "check the address and the credentials"
        raise DataError("cannot read the shards", where=data, why=str(error), hint=hint) from error


def _of_folder(folder: str, data: str, wanted: Labeling) -> DataSet:
    remote = Remote(folder)
    try:
        manifest = _manifest(remote, folder)
    except FileNotFoundError:
        if remote.sizes(folder) is None:
            why = f"there is no {MANIFEST}, and {remote.scheme}:// has no listings"
            hint = f"a pattern of the shards: '{folder}train-{{000000..000009}}.tar'"
            raise DataError("cannot find the shards", where=data, why=why, hint=hint) from None
        files = remote.list(f"{folder}*.tar") or remote.list(f"{folder}**/*{parquet.SUFFIX}")
        return _scanned(remote, files, folder, data, wanted)
    return _indexed(remote, manifest, folder, data, None)


def _of_pattern(data: str, wanted: Labeling) -> DataSet:
    remote = Remote(data.partition("{")[0])
    urls: list[str] = []
    for word in braces(data):
        urls += sorted(remote.list(word), key=natural) if is_glob(word) else [word]
    folders = {url.rpartition("/")[0] + "/" for url in urls}
    if len(folders) == 1 and data.endswith(".tar"):
        folder = folders.pop()
        with contextlib.suppress(FileNotFoundError):
            names = [url.rpartition("/")[2] for url in urls]
            return _indexed(remote, _manifest(remote, folder), folder, data, names)
    return _scanned(remote, urls, data, data, wanted)


def _manifest(remote: Remote, folder: str) -> Manifest:
    """Read the manifest of a folder; its index is fetched into the user's cache, unless it is there already."""
    about = remote.read(folder + MANIFEST)
    kept = cache_folder("shards") / "indices" / key_of(folder, about.hex())
    if not (kept / MANIFEST).is_file():
        for split in ("train", "val", "test"):
            for path in index_files(kept, split):
                with contextlib.suppress(FileNotFoundError):  # the manifest states if there should be one
                    remote.download(folder + path.name, path)
        with replacing(kept / MANIFEST) as temporary:
            temporary.write_bytes(about)
    try:
        return Manifest.read(kept)
    except DataError as error:
        (kept / MANIFEST).unlink(missing_ok=True)  # the next command fetches it again
        raise DataError(error.what, where=folder, why=error.why, hint=error.hint) from error


def _indexed(remote: Remote, manifest: Manifest, folder: str, data: str, names: Sequence[str] | None) -> DataSet:
    chosen = None if names is None else selected(manifest, names, data)
    dataset = dataset_of(manifest, RemoteStore(folder), data, chosen)
    try:
        sizes = remote.sizes(folder)
    except OSError:  # reading may be permitted, and listing not
        sizes = None
    if sizes is None:
        return dataset

    def size(shard: Shard) -> int | None:
        return sizes.get(shard.name)

    return replace(dataset, notes=(*dataset.notes, *defects(manifest, size, chosen)))


def _scanned(remote: Remote, urls: Sequence[str], folder: str, data: str, wanted: Labeling) -> DataSet:
    """Scan shards without an index: each is fetched once."""
    if not urls:
        raise DataError("no such shards", where=data, why="no object has this name", hint="check the address")
    failed, sizes, states = list[str](), dict[str, int](), dict[str, str]()
    for url in urls:
        try:
            sizes[url], states[url] = remote.size(url), remote.state(url)
        except FileNotFoundError:
            failed.append(url)
    if failed:
        why = f"{len(failed):,} of {len(urls):,} are missing: {some(failed)}"
        raise DataError("no such shards", where=data, why=why, hint="check the pattern")

    name = (folder.rstrip("/").rpartition("/")[2] or "data").partition(".")[0]
    if urls[0].endswith(parquet.SUFFIX):
        return _with_states(parquet.of_files(states, sizes, remote.download, name, data, wanted), states)
    store = RemoteStore("", states=states)

    def local(url: str) -> str:
        return store.open(Shard(url, 0, sizes[url])).path

    def class_names() -> bytes:
        return remote.read(urls[0].rpartition("/")[0] + "/" + CLASS_NAMES)

    manifest = scan_shards(urls, list(states.values()), local, class_names, name, data)
    return _with_states(dataset_of(manifest, store, data), states)


def _with_states(dataset: DataSet, states: Mapping[str, str]) -> DataSet:
    """Note objects of which the store states the size alone: a local copy of one that was replaced would be used."""
    if not (bare := [url for url, state in states.items() if len(state.split()) < 2]):
        return dataset
    note = f"the server states no time and no tag of {some(bare)}: a change that keeps the size is not noticed"
    return replace(dataset, notes=(*dataset.notes, note))
