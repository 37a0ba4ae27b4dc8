"""Parquet files of images, as Hugging Face's `datasets` writes them, as shards.

A row of Parquet cannot be read alone: columns are compressed by groups of rows. So each file is packed once as a tar in
the cache of shards, which is an ordinary shard from then on; a tar that was dropped from the cache is packed again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitral import bounded
from vitral.data.archives import Handle
from vitral.data.dataset import LABEL_COLUMNS
from vitral.data.images.decode import probe
from vitral.data.lazy_pyarrow import pyarrow
from vitral.data.shards.cache import ShardCache, key_of
from vitral.data.shards.index import Shard
from vitral.data.shards.packing import SUFFIXES, Record, ShardWriter
from vitral.data.spellings import is_missing, whole
from vitral.errors import DataError, ImageError

if TYPE_CHECKING:
    from pyarrow import DataType, Schema
    from pyarrow.parquet import ParquetFile

_ROWS = 64  # rows read at a time
_RULES = "2"
"""Changes with the rules of packing: a tar that was made by others is not taken from the cache."""


@dataclass(frozen=True)
class ParquetStore:
    """Tars of Parquet files, in the cache."""

    states: Mapping[str, str]
    """File → a string that differs after it has changed."""
    fetch: Callable[[str, Path], None] | None = None
    """(address, path): fetch a remote file; None for files on this machine."""
    cache: ShardCache = field(default_factory=ShardCache)
    label: str | None = None
    """Column of the classes; None finds it."""
    prefix: str = ""
    is_remote: bool = True

    def open(self, shard: Shard) -> Handle:
        return self.cache.get(self._key(shard), shard.bytes, lambda part, start: self._pack(shard.name, part))

    def read(self, shard: Shard, offset: int, size: int) -> bytes | None:
        return None

    def drop(self, shard: Shard) -> bool:
        self.cache.drop(self._key(shard))
        return True

    def state(self, shard: Shard) -> str:
        return self.states[shard.name]

    def _key(self, shard: Shard) -> str:
        return key_of("parquet", _RULES, self.label or "", shard.name, self.states[shard.name])

    def _pack(self, name: str, part: Path) -> None:
        """Write the tar of one file."""
        if self.fetch is None:
            pack(Path(name), part, name, self.label)
            return
        fetched = part.with_suffix(".parquet")
        try:
            self.fetch(name, fetched)
            pack(fetched, part, name, self.label)
        finally:
            fetched.unlink(missing_ok=True)


def pack(path: Path, target: Path, name: str, label: str | None = None) -> None:
    """Write the images of a Parquet file as a tar, of those without a class a name; `name` is for errors and names of
    images, `label` the column of the classes.

    Equal files give equal tars. Raises `DataError` for a damaged file, for one without an image or label column, and
    for one with several that may be it.
    """
    arrow = pyarrow()
    try:
        file = arrow.parquet.ParquetFile(path)
        columns = _Columns.of(file.schema_arrow, name, label)
        classes, rows = columns.classes, _rows(file, columns)
        if not classes:
            found = (label for label, _ in _rows(file, columns, labels_only=True) if label is not None)
            classes = tuple(dict.fromkeys(found))
        writer = ShardWriter(target, classes)
        try:
            for number, (given, image) in enumerate(rows):
                if given is None:
                    writer.add_unlabeled(f"{number:09}")
                else:
                    writer.add(_record(number, _number(given, columns, classes), image, name), f"{number:09}")
            writer.finish(name)
        finally:
            writer.close()
    except (arrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError("cannot read Parquet file", where=name, why=" ".join(str(error).split())) from error


@dataclass(frozen=True)
class _Columns:
    image: str
    label: str
    classes: tuple[str, ...]
    """Names of the labels by number; empty if the file does not state them."""

    @classmethod
    def of(cls, schema: Schema, name: str, wanted: str | None) -> _Columns:
        """Find the columns by the features that Hugging Face stores, else by type and name."""
        features = _features(schema)
        kinds = {column: str(about.get("_type")) for column, about in features.items() if isinstance(about, dict)}
        images = [one for one in schema.names if kinds.get(one) == "Image"]
        images = images or [one for one in schema.names if _holds_images(schema.field(one).type)]
        named = [one for one in schema.names if one.lower() in LABEL_COLUMNS]
        labels = [one for one in schema.names if kinds.get(one) == "ClassLabel" or one in named]
        if wanted is not None:
            labels = [one for one in schema.names if one.lower() == wanted.lower()]
        image, label = _only("image", images, schema, name), _only("label", labels, schema, name)
        if pyarrow().types.is_nested(schema.field(label).type):
            why = f"the column {label} holds {schema.field(label).type}"
            raise DataError("Parquet with several labels an image is not read", where=name, why=why)
        return cls(image, label, tuple(map(str, features.get(label, {}).get("names") or ())))


def _only(kind: str, found: list[str], schema: Schema, name: str) -> str:
    """The one column of a kind, or the one that is called so; `DataError` for none and for others."""
    chosen = [one for one in found if one.lower() == kind] or found
    if len(chosen) == 1:
        return chosen[0]
    if chosen:
        hint = f"--targets {chosen[0]}, or another of them" if kind == "label" else f"call one of them {kind}"
        why = f"{', '.join(chosen)} may be it"
        raise DataError(f"several {kind} columns in the Parquet file", where=name, why=why, hint=hint)
    raise DataError(
        f"no {kind} column in the Parquet file",
        where=name,
        why=f"columns found: {', '.join(schema.names)}",
        hint=f"use an image column of type Image, and a label column named {', '.join(LABEL_COLUMNS[:3])}",
    )


def _features(schema: Schema) -> dict[str, Any]:
    """Features that Hugging Face's `datasets` stores in the metadata; empty if there are none."""
    try:
        return dict(bounded.parse(schema.metadata[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):
        return {}


def _holds_images(kind: DataType) -> bool:
    """True for a column of bytes, and of structs with `bytes`."""
    types = pyarrow().types
    if types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _rows(file: ParquetFile, columns: _Columns, *, labels_only: bool = False) -> Iterator[tuple[str | None, object]]:
    """Yield the label as text, None for a missing one or -1, and the image of each row."""
    names = [columns.label] if labels_only else [columns.label, columns.image]
    for batch in file.iter_batches(batch_size=_ROWS, columns=names):
        for row in batch.to_pylist():
            label = "" if row[columns.label] is None else whole(str(row[columns.label]))
            yield None if is_missing(label, hidden=True) else label, row.get(columns.image)


def _number(label: str, columns: _Columns, classes: tuple[str, ...]) -> int:
    if not columns.classes:
        return classes.index(label)
    if not label.isdecimal() or int(label) >= len(classes):
        raise ValueError(f"label {label[:40]} is none of {len(classes)} classes")
    return int(label)


def _record(number: int, label: int, image: Any, name: str) -> Record:
    """Make a record; an image that cannot be read is reported when it is decoded, as in any shard."""
    data, path = (image.get("bytes"), image.get("path")) if isinstance(image, dict) else (image, None)
    data = bytes(data or b"")
    try:
        suffix = SUFFIXES[probe(data).format]
    except ImageError:
        suffix = "jpg"
    stem = os.path.basename(name).removesuffix(".parquet")
    return Record(f"{stem}/{number:06}{f' {os.path.basename(path)}' if path else ''}", label, data, suffix)
