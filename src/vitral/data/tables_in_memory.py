"""Tables in memory, such as a DataFrame: they are no images and no data set, and an error says what to pass.

Iterating over one yields the names of its columns, which would be taken for paths.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitral.data.dataset import FILE_COLUMNS
from vitral.errors import UsageError, type_of
from vitral.wording import some


def columns_of(value: Any) -> list[str] | None:
    """Columns of a mapping, or of a table of pandas, polars, pyarrow or datasets, by name; None for other objects."""
    if isinstance(value, Mapping):
        return list(map(str, value))
    names = getattr(value, "column_names", None)  # before `columns`, which pyarrow has for the values
    names = getattr(value, "columns", None) if names is None else names
    return None if names is None or isinstance(value, type) else list(map(str, names))


def why_no_image(value: Any, columns: list[str]) -> tuple[str, str]:
    """The reason that a table is no image, and the change to make."""
    what = f"{type_of(value)} is a table with the columns {some(columns)}" if columns else f"{type_of(value)} is empty"
    known = [name for name in columns if name.lower() in FILE_COLUMNS]
    return what, f"its column of paths or images, table[{(known or columns or ['path'])[0]!r}]"


def as_path(data: Any) -> str:
    """Return the path or name of a data set as text; `UsageError` for another object, such as a DataFrame."""
    if isinstance(data, str | Path | os.PathLike):
        return str(data)
    columns = columns_of(data)
    what = f"{type_of(data)} is no data set" if columns is None else f"{type_of(data)} in memory is not read as data"
    hint = 'table.to_csv("table.csv", index=False), then "table.csv"' if columns else "a folder, a .csv with file,label"
    raise UsageError(what, why="data are a path, or the name of a set", hint=hint)
