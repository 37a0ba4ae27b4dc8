"""Formats of features: NumPy's `.npz` and Parquet, one class each.

While they are written each row is a JSON line, in which features are base64 of little-endian fp32; the finished file is
made from these lines in pieces, so that any number of images takes the same memory.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from vitral import bounded
from vitral.atomic import replacing
from vitral.errors import UsageError
from vitral.workflows.tables import formats
from vitral.workflows.tables.formats import Format, JsonLines, pyarrow, rows_of, text

COLUMN = "features"
_GROUP = 4_000
"""Rows of a group in a Parquet file, which are in memory together."""


class _Row(NamedTuple):
    path: str
    features: str | None
    """As `encoded`."""
    error: str | None


def encoded(features: np.ndarray) -> str:
    """Return features (D,) as the text of a line."""
    return base64.b64encode(features.astype("<f4").tobytes()).decode("ascii")


class Npz(JsonLines):
    """Arrays `features` (n, D) and `paths` (n,) of the readable images, `unreadable` and `reasons` of the others, and
    of the model `model`, `model_hash` and `precision`.
    """

    def finish(self, partial: Path, target: Path) -> None:
        counts, longest = [0, 0], [0, 0, 0]
        for row in _rows(partial):
            bad = row.features is None
            counts[bad] += 1
            longest[bad] = max(longest[bad], len(row.path))
            longest[2] = max(longest[2], len(row.error or ""))

        def those(bad: bool) -> Iterator[_Row]:
            return (row for row in _rows(partial) if (row.features is None) == bad)

        with replacing(target) as temporary, zipfile.ZipFile(temporary, "w", allowZip64=True) as file:
            values = (_decoded(row.features) for row in those(bad=False) if row.features)
            _write(file, "features", "<f4", (counts[0], _width(partial)), values)
            _write_texts(file, "paths", (counts[0],), longest[0], (row.path for row in those(bad=False)))
            _write_texts(file, "unreadable", (counts[1],), longest[1], (row.path for row in those(bad=True)))
            _write_texts(file, "reasons", (counts[1],), longest[2], (row.error for row in those(bad=True)))
            for name, value in _metadata(partial).items():
                _write_texts(file, name, (), len(value), [value])
        partial.unlink()


class Parquet(formats.Parquet):
    """Columns `path`, `features` (a list of fp32, null for an unreadable image) and `error`; the model as metadata."""

    def finish(self, partial: Path, target: Path) -> None:
        arrow = pyarrow()
        # Not of a fixed size: pyarrow before 25 cannot read a null among such lists.
        types = [("path", arrow.string()), (COLUMN, arrow.list_(arrow.float32())), ("error", arrow.string())]
        schema = arrow.schema(types).with_metadata({"vitral": json.dumps(_metadata(partial))})
        with replacing(target) as temporary, arrow.parquet.ParquetWriter(temporary, schema) as writer:
            rows = _rows(partial)
            while group := list(itertools.islice(rows, _GROUP)):
                features = [None if r.features is None else np.frombuffer(_decoded(r.features), "<f4") for r in group]
                lists = arrow.array(features, arrow.list_(arrow.float32()))
                columns = [[text(row.path) for row in group], lists, [row.error for row in group]]
                writer.write_table(arrow.table(columns, schema=schema))
        partial.unlink()


FORMATS: dict[str, type[Format]] = {".npz": Npz, ".parquet": Parquet}
"""File extension → format."""


def format_of(path: str | Path) -> type[Format]:
    """Return the format for the extension of a path. Raises `UsageError` for an unknown one, and `MissingExtraError`
    for Parquet without pyarrow.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        why = f"its extension is '{suffix}'" if suffix else "it has no extension"
        raise UsageError("features are written as .npz or .parquet", where=path, why=why, hint="--out features.npz")
    if suffix == ".parquet":
        pyarrow()
    return FORMATS[suffix]


def _rows(partial: Path) -> Iterator[_Row]:
    return (_Row(row["path"], row[COLUMN], row["error"]) for row in rows_of(partial))


def _decoded(features: str) -> bytes:
    return binascii.a2b_base64(features)


def _width(partial: Path) -> int:
    """Return the number of features of an image; 0 if none is readable."""
    return next((len(_decoded(row.features)) // 4 for row in _rows(partial) if row.features is not None), 0)


def _metadata(partial: Path) -> dict[str, str]:
    """Read the model from the origin of the rows (`RowFile.origin_file`)."""
    origin = bounded.read(partial.with_name(f"{partial.name}.json"), file_names=True)
    return {name: origin[name] for name in ("model", "model_hash", "precision")}


def _write(file: zipfile.ZipFile, name: str, dtype: str, shape: tuple[int, ...], values: Iterable[bytes]) -> None:
    """Write an array row by row."""
    with file.open(f"{name}.npy", "w", force_zip64=True) as array:
        header = {"descr": dtype, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(array, header)
        for value in values:
            array.write(value)


def _write_texts(
    file: zipfile.ZipFile, name: str, shape: tuple[int, ...], longest: int, texts: Iterable[str | None]
) -> None:
    longest = max(longest, 1)  # NumPy has no text of length 0
    padded = ((one or "").ljust(longest, "\0").encode("utf-32-le", "surrogatepass") for one in texts)
    _write(file, name, f"<U{longest}", shape, padded)
