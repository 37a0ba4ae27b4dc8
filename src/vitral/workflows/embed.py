"""Write features of images to a file, and find the images most similar to one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitral.atomic import replacing
from vitral.errors import DataError, ImageError, UsageError
from vitral.inference.fingerprint import model_hash
from vitral.inference.inputs import Items
from vitral.inference.predictor import Predictor
from vitral.inference.sources import Source
from vitral.inference.stream import in_batches
from vitral.workflows.row_formats import pyarrow, text

SUFFIXES = (".npz", ".parquet")
_GROUP = 10_000
"""Rows of a group in a Parquet file."""


@dataclass(frozen=True, eq=False)
class Features:
    """Features of the readable images, and the errors of the others."""

    names: list[str]
    values: np.ndarray
    """(n, D) float32."""
    errors: list[ImageError]
    model: str
    """The loaded run, file or hub reference."""
    model_hash: str
    precision: str

    def save(self, path: str | Path) -> Path:
        """Write `.npz` (`features`, `paths`, `model_hash` …) or `.parquet` (`path`, `features`; the rest as metadata).

        An existing file is replaced atomically.
        """
        path = check_suffix(path)
        metadata = {"model": self.model, "model_hash": self.model_hash, "precision": self.precision}
        if path.suffix.lower() == ".parquet":
            self._save_parquet(path, metadata)
            return path
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, features=self.values, paths=np.array(self.names, np.str_), **metadata)  # type: ignore[arg-type]  # strings become arrays
        return path

    def _save_parquet(self, path: Path, metadata: dict[str, str]) -> None:
        arrow, width = pyarrow(), self.values.shape[1]
        types = [("path", arrow.string()), ("features", arrow.list_(arrow.float32(), width))]
        schema = arrow.schema(types).with_metadata({"vitral": json.dumps(metadata)})
        with replacing(path) as temporary, arrow.parquet.ParquetWriter(temporary, schema) as writer:
            for start in range(0, len(self.names), _GROUP):
                part = slice(start, start + _GROUP)
                lists = arrow.FixedSizeListArray.from_arrays(arrow.array(self.values[part].ravel()), width)
                writer.write_table(arrow.table([list(map(text, self.names[part])), lists], schema=schema))


def check_suffix(path: str | Path) -> Path:
    """Return the path. Raises `UsageError` if its extension is not one of features."""
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        why = f"its extension is '{path.suffix}'" if path.suffix else "it has no extension"
        raise UsageError("features are written as .npz or .parquet", where=path, why=why, hint="--out features.npz")
    if path.suffix.lower() == ".parquet":
        pyarrow()
    return path


def embed(
    predictor: Predictor,
    sources: Sequence[Source],
    batch_size: int = 32,
    progress: Callable[[int], None] = lambda done: None,
) -> Features:
    """Compute the features of all images of `sources`, in order. Raises `DataError` if none is readable."""
    names: list[str] = []
    errors: list[ImageError] = []
    parts: list[np.ndarray] = []
    results = predictor.stream_features(Items(sources), batch_size=batch_size)
    for batch in in_batches(results, batch_size):
        rows = [(name, row) for name, row in batch if not isinstance(row, ImageError)]
        errors += [row for _, row in batch if isinstance(row, ImageError)]
        names += [name for name, _ in rows]
        if rows:
            parts.append(np.stack([row for _, row in rows]))
        progress(len(batch))
    if not parts:
        raise DataError("no readable image", why=str(errors[0].why), where=errors[0].name)
    origin = predictor.source, model_hash(predictor), predictor.machine.precision
    return Features(names, np.concatenate(parts), errors, *origin)


@dataclass(frozen=True)
class Similar:
    """An image, and the cosine similarity of its features to those of the query."""

    name: str
    cosine: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {"image": self.name, "cosine": self.cosine}


def most_similar(query: np.ndarray, features: Features, count: int, leave_out: str = "") -> list[Similar]:
    """Find the `count` images with the highest cosine similarity to `query` (D,), by exhaustive search.

    The file `leave_out` is skipped. Images of equal similarity stay in order.
    """
    cosines = _unit(features.values) @ _unit(query[None])[0]
    order = np.lexsort((np.arange(len(cosines)), -cosines))
    kept = (int(i) for i in order if not (leave_out and _same_file(features.names[i], leave_out)))
    return [Similar(features.names[i], float(cosines[i])) for i, _ in zip(kept, range(count), strict=False)]


def _unit(rows: np.ndarray) -> np.ndarray:
    """Normalize rows to length 1; zero rows are left unchanged."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def _same_file(a: str, b: str) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)


def images_of(sources: Sequence[Source], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each of `names` with its image, in the order of `sources`."""
    wanted = set(names)
    return ((item.name, item.image) for item in Items(sources) if item.name in wanted)
