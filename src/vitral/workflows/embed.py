"""Write features of images to a file, and find the images most similar to one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitral.errors import DataError, ImageError, none_readable
from vitral.inference.inputs import Item, Items
from vitral.inference.predictor import Predictor
from vitral.inference.sources import Source
from vitral.inference.stream import in_batches
from vitral.workflows.tables.feature_formats import COLUMN, encoded, format_of
from vitral.workflows.tables.formats import Cell
from vitral.workflows.tables.image_table import ImageTable, Written


@dataclass(frozen=True, eq=False)
class Features:
    """Features of the readable images, in memory, and the errors of the others."""

    names: list[str]
    values: np.ndarray
    """(n, D) float32."""
    errors: list[ImageError]


class FeatureFile(ImageTable[tuple[str, np.ndarray]]):
    """The file `out` of features: for each image the vector (D,) that the network's head receives, or its error."""

    def __init__(self, predictor: Predictor, sources: Sequence[Source], out: str | Path, batch_size: int = 32):
        super().__init__(predictor, sources, out, [COLUMN], batch_size, format_of(out))

    def results(self, items: Items | list[Item]) -> Iterator[tuple[str, np.ndarray] | ImageError]:
        for name, row in self.predictor.stream_features(items, batch_size=self.batch_size):
            yield row if isinstance(row, ImageError) else (name, row)

    def cells(self, result: tuple[str, np.ndarray]) -> tuple[str, Sequence[Cell]]:
        name, row = result
        return name, [encoded(row)]

    def finish(self, kept: int, model_hash: str) -> Written:
        """Complete the file. Raises `DataError` if no image is readable."""
        if self.file.failed == self.images:
            self.file.discard()
            raise none_readable(self._names(), where=self.sources[0])
        return super().finish(kept, model_hash)

    def origin(self) -> dict[str, object]:
        return {"model": self.predictor.source, **super().origin()}


def features_of(
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
    return Features(names, np.concatenate(parts), errors)


@dataclass(frozen=True)
class Similar:
    """An image, and the cosine similarity of its features to those of the query."""

    name: str
    cosine: float

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        return {"image": self.name, "cosine": self.cosine}


def most_similar(query: np.ndarray, features: Features, count: int, leave_out: str = "") -> list[Similar]:
    """Find the `count` images with the highest cosine similarity to `query` (D,), by exhaustive search.

    The file `leave_out` is skipped. Images of equal similarity stay in order.
    """
    cosines = _unit(features.values) @ _unit(query[None])[0]
    order = np.lexsort((np.arange(len(cosines)), -cosines))
    own = os.path.realpath(leave_out) if leave_out else ""
    kept = (int(i) for i in order if not own or os.path.realpath(features.names[i]) != own)
    return [Similar(features.names[i], float(cosines[i])) for i, _ in zip(kept, range(count), strict=False)]


def _unit(rows: np.ndarray) -> np.ndarray:
    """Normalize rows to length 1; zero rows are left unchanged."""
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def images_of(sources: Sequence[Source], names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield each of `names` with its image, in the order of `sources`."""
    wanted = set(names)
    return ((item.name, item.image) for item in Items(sources) if item.name in wanted)
