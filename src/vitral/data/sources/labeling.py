"""The label columns of a table: which task they are for, if none is named."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from vitral.data.spellings import is_missing, listed
from vitral.data.targets import Labeling, targets_of
from vitral.data.targets.classes import OneLabel
from vitral.data.targets.columns import LabelColumns, number_of
from vitral.data.targets.labels import found_separator, indicators, separated
from vitral.data.targets.numbers import number_columns
from vitral.data.targets.target import LabelReader
from vitral.data.targets.text import TEXTS
from vitral.errors import DataError, unknown

_SEVERAL = ("labels", "tags", "classes", "categories")
"""Names of columns in which ";" separates labels; under other names it may be part of one."""
_NOT_TARGETS = ("id", "index", "idx", "group", "patient", "fold", "")
"""Columns that hold no labels, in lower case, unless `--targets` names them; nor does pandas' "Unnamed: 0"."""
_HIDDEN = "label (-1 stands for none, unless --task class is stated)"


def reader_of(
    header: Sequence[str],
    known: Mapping[str, int],
    rows: Iterable[tuple[int, Sequence[str]]],
    wanted: Labeling,
    where: str,
) -> LabelReader | None:
    """Choose how the labels of a table are read; None if it has no column of labels.

    `known` has the columns file, label and split by position, `rows` the number of each row's line. Raises
    `UsageError` for a wanted column that the table lacks, `DataError` for columns that do not hold what is wanted.
    """
    lower = [name.lower() for name in header]
    if wanted.names and all(name.lower() in lower for name in wanted.names):
        wanted = replace(wanted, columns=wanted.names)
    others = {i for i, name in enumerate(lower) if name in _NOT_TARGETS or name.startswith("unnamed:")}
    free = sorted(set(range(len(header))) - others - set(known.values()))
    label = known.get("label")
    if wanted.columns:
        for name in wanted.columns:
            if name.lower() not in lower:
                raise unknown("column", name, header)
        free = [lower.index(name.lower()) for name in wanted.columns]
        label = free[0] if len(free) == 1 else None
    columns = LabelColumns(header, dict(rows), label, free, bool(wanted.columns), where)
    return _found(columns, wanted.separator) if wanted.task is None else targets_of(wanted.task).reader(columns, wanted)


def _found(columns: LabelColumns, separator: str | None) -> LabelReader | None:
    """Return the reader that fits the cells: classes or separated labels, else 0 and 1, else numbers."""
    if columns.label is not None:
        columns.refuse_commas([columns.label])
        if reader := _of_column(columns, columns.label, separator):
            return reader
    if columns.all_numbers():
        if not columns.named and (texts := [name for name in columns.names if name.lower() in TEXTS]):
            what = f"the column {texts[0]} may be text to read or numbers"
            hint = "--task text or --task numbers"  # which drops leading zeros
            raise DataError(what, where=columns.where, why="all its cells are numbers", hint=hint)
        return indicators(columns) if columns.all_bits() else number_columns(columns)
    columns.refuse_odd()
    columns.refuse_commas(columns.chosen)
    columns.refuse_mixed()
    return None


def _of_column(columns: LabelColumns, label: int, separator: str | None) -> LabelReader | None:
    """Return the reader of a single column of classes or separated labels; None if it is one of numbers or bits."""
    name, cells = columns.header[label], list(columns.cells(label).values())
    found = separator or found_separator(cells)
    if not separator and found == ";" and name.lower() not in _SEVERAL:
        found = None
    if found or any(map(listed, cells)):
        return separated(columns, label, separator)
    numbers = [number_of(cell) for cell in cells if not is_missing(cell)]
    if not numbers or None in numbers:
        return OneLabel(label, f"the column {name} has one class per image")
    values = {n for n in numbers if n is not None}
    if any(n != round(n) for n in values) or columns.named:
        return None
    why = f"whole numbers in the column {name} are classes; --task numbers reads them as such"
    if -1 in values and min(values) == -1 and values != {-1, 1}:
        return OneLabel(label, why, missing=_HIDDEN, numeric=True, hidden=True)
    return OneLabel(label, why, numeric=True)
