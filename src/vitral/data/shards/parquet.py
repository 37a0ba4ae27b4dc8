"""Parquet files of images, as Hugging Face's `datasets` writes them, as shards.

A row of Parquet cannot be read alone: columns are compressed by groups of rows. So each file is packed once as a tar in
the cache of shards, which is an ordinary shard from then on; a tar that was dropped from the cache is packed again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitral import bounded
from vitral.data.archives import Handle
from vitral.data.dataset import LABEL_COLUMNS
from vitral.data.decode import probe
from vitral.data.lazy_pyarrow import pyarrow
from vitral.data.shards.cache import ShardCache, key_of
from vitral.data.shards.index import Shard
from vitral.data.shards.packing import SUFFIXES, Record, ShardWriter
from vitral.errors import DataError, ImageError

_ROWS = 64  # rows read at a time


@dataclass(frozen=True)
class ParquetStore:
    """Tars of Parquet files, in the cache."""

    states: Mapping[str, str]
    """File → a string that differs after it has changed."""
    fetch: Callable[[str, Path], None] | None = None
    """(address, path): fetch a remote file; None for files on this machine."""
    cache: ShardCache = field(default_factory=ShardCache)
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
        return key_of("parquet", shard.name, self.states[shard.name])

    def _pack(self, name: str, part: Path) -> None:
        """Write the tar of one file."""
        if self.fetch is None:
            pack(Path(name), part, name)
            return
        fetched = part.with_suffix(".parquet")
        try:
            self.fetch(name, fetched)
            pack(fetched, part, name)
        finally:
            fetched.unlink(missing_ok=True)


def pack(path: Path, target: Path, name: str) -> None:
    """Write the labeled images of a Parquet file as a tar; `name` is for errors and names of images.

    Equal files give equal tars. Raises `DataError` for a damaged file, and for one without an image or label column.
    """
    arrow = pyarrow()
    try:
        file = arrow.parquet.ParquetFile(path)
        columns = _Columns.of(file.schema_arrow, name)
        classes, rows = columns.classes, _rows(file, columns)
        if not classes:
            classes = tuple(dict.fromkeys(str(label) for label, _ in _rows(file, columns, labels_only=True)))
        writer = ShardWriter(target, classes)
        try:
            for number, (label, image) in enumerate(rows):
                writer.add(_record(number, _number(label, columns, classes), image, name), f"{number:09}")
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
    def of(cls, schema: Any, name: str) -> _Columns:
        """Find the columns by the features that Hugging Face stores, else by type and name."""
        features = _features(schema)
        kinds = {column: str(about.get("_type")) for column, about in features.items() if isinstance(about, dict)}
        image = next((one for one in schema.names if kinds.get(one) == "Image"), None)
        image = image or next((one for one in schema.names if _holds_images(schema.field(one).type)), None)
        label = next((one for one in schema.names if kinds.get(one) == "ClassLabel"), None)
        label = label or next((one for one in schema.names if one.lower() in LABEL_COLUMNS), None)
        if image is None or label is None:
            raise DataError(
                f"no {'image' if image is None else 'label'} column in the Parquet file",
                where=name,
                why=f"columns found: {', '.join(schema.names)}",
                hint=f"an image column of type Image, and a label column named {', '.join(LABEL_COLUMNS[:3])}",
            )
        names = features.get(label, {}).get("names") or ()
        return cls(image, label, tuple(map(str, names)))


def _features(schema: Any) -> dict[str, Any]:
    """Features that Hugging Face's `datasets` stores in the metadata; empty if there are none."""
    try:
        return dict(bounded.parse(schema.metadata[b"huggingface"])["info"]["features"])
    except (KeyError, TypeError, ValueError):
        return {}


def _holds_images(kind: Any) -> bool:
    """True for a column of bytes, and of structs with `bytes`."""
    types = pyarrow().types
    if types.is_struct(kind):
        return any(kind.field(i).name == "bytes" for i in range(kind.num_fields))
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def _rows(file: Any, columns: _Columns, *, labels_only: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield label and image of each row that has a label."""
    names = [columns.label] if labels_only else [columns.label, columns.image]
    for batch in file.iter_batches(batch_size=_ROWS, columns=names):
        for row in batch.to_pylist():
            if row[columns.label] is not None and row[columns.label] != -1:  # -1 marks a hidden label
                yield row[columns.label], row.get(columns.image)


def _number(label: Any, columns: _Columns, classes: tuple[str, ...]) -> int:
    if not columns.classes:
        return classes.index(str(label))
    if not isinstance(label, int) or not 0 <= label < len(classes):
        raise ValueError(f"label {json.dumps(label, default=str)[:40]} is none of {len(classes)} classes")
    return label


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
