"""Objects in memory: which may be data of a run, and which are tables, whose iteration would yield names of columns."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vitral.data.dataset import FILE_COLUMNS
from vitral.errors import UsageError, type_of
from vitral.model.own import name_of
from vitral.wording import some


def columns_of(value: object) -> list[str] | None:
    """Columns of a mapping, or of a table of pandas, polars, pyarrow or datasets, by name; None for other objects."""
    if isinstance(value, Mapping):
        return list(map(str, value))
    names = getattr(value, "column_names", None)  # before `columns`, which pyarrow has for the values
    names = getattr(value, "columns", None) if names is None else names
    return None if names is None or isinstance(value, type) else list(map(str, names))


def why_no_image(value: object, columns: list[str]) -> tuple[str, str]:
    """The reason that a table is no image, and the change to make."""
    what = f"{type_of(value)} is a table with the columns {some(columns)}" if columns else f"{type_of(value)} is empty"
    known = [name for name in columns if name.lower() in FILE_COLUMNS]
    return what, f"its column of paths or images, table[{(known or columns or ['path'])[0]!r}]"


@runtime_checkable
class Examples(Protocol):
    """Labeled images by number: a torch Dataset of (image, label), arrays (images, labels), a DataFrame with paths and
    labels, a Hugging Face data set, or a dict of these by split.
    """

    def __len__(self) -> int: ...
    def __getitem__(self, index: object, /) -> Any: ...


def is_examples(data: object) -> bool:
    """True for an object that may hold labeled images."""
    return isinstance(data, Examples) and not isinstance(data, str | bytes | type)


def as_path(data: object) -> str:
    """Return the path or name of a data set as text; for data in memory a name by which this process finds it.

    Raises `UsageError` for another object.
    """
    if isinstance(data, str | Path | os.PathLike):
        return str(data)
    if is_in_memory(data):
        return name_of("data", data)
    raise UsageError(f"{type_of(data)} is not a data set", why=why_no_examples(data), hint=f"pass a path, {EXAMPLES}")


EXAMPLES = "(images, labels), a torch Dataset of (image, label), a DataFrame with path and label, or {split: data}"
"""Hint for data that are of another form."""


def why_no_examples(data: object) -> str:
    """Return why an object has no labeled images by number."""
    if hasattr(data, "dataset"):
        return "it makes batches, and vitral makes its own: pass its .dataset"
    if hasattr(data, "__iter__") and not hasattr(data, "__len__"):
        return "it has no length, and vitral splits and shuffles images by number"
    return "it has no images by number"


def is_in_memory(data: object) -> bool:
    """True for a loaded `DataSet`, and for an object that may become one."""
    return is_examples(data) or isinstance(getattr(data, "splits", None), Mapping)
