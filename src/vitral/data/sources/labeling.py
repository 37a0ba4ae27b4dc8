"""The label columns of a table: which task they are for, and how a row is read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from vitral.data.dataset import index_labels, nfc, shown, some
from vitral.data.spellings import is_missing, listed, whole
from vitral.data.targets import NUMBERS, ONE_CLASS, SEVERAL_LABELS, TEXT, Labeling, Targets
from vitral.data.text import composed, encode, vocabulary
from vitral.errors import DataError, unknown

SEPARATORS = ("|", ";")
"""Separators of labels that are found without being named. A space or a comma may be part of a name."""
_SEVERAL = ("labels", "tags", "classes", "categories")
"""Names of columns in which ";" separates labels; under other names it may be part of one."""
_NOT_TARGETS = ("id", "index", "idx", "group", "patient", "fold", "")
"""Columns that hold no labels, in lower case, unless `--targets` names them; nor does pandas' "Unnamed: 0"."""

TEXTS = ("text", "transcription", "transcript", "caption")
"""Names of a column of texts, in lower case, which `--task text` reads."""
TEXT_COLUMNS = (*TEXTS, "label")
"""Names of the column that `--task text` reads, in lower case; the first in the table counts."""
LONGEST_TEXT = 1_000
"""Most characters of a text; a longer one is a paragraph, or a mistake."""
_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_HIDDEN = "label (-1 stands for none, unless --task class is stated)"
_LONGEST = 40
"""Most characters of a cell that a message shows."""


class LabelReader(Protocol):
    """Reads the label of a row."""

    @property
    def targets(self) -> Targets:
        """The meaning of the labels."""

    @property
    def reason(self) -> str:
        """The reason for the task, for the plan."""

    @property
    def missing(self) -> str:
        """Word for a label that a row lacks."""

    def parse(self, row: Sequence[str]) -> Any:
        """Return the label of a row, hashable; None if it lacks one."""

    def build(self, labels: Mapping[str, list[Any]], where: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        """Return the names, and the labels of every split with a row for each image."""


@dataclass(frozen=True)
class OneLabel:
    """A column with a class."""

    column: int
    reason: str
    targets: Targets = ONE_CLASS
    missing: str = "label"
    numeric: bool = False
    """All labels are whole numbers, which pandas may have written as "3.0"."""
    hidden: bool = False
    """-1 stands for no label."""

    def parse(self, row: Sequence[str]) -> str | None:
        cell = nfc(shown(_cell(row, self.column)))
        if is_missing(cell, hidden=self.hidden):
            return None
        return whole(cell) if self.numeric else cell

    def build(self, labels: Mapping[str, list[str]], where: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        return index_labels(labels, where)


@dataclass(frozen=True)
class SeparatedLabels:
    """A column with any number of labels, or none."""

    column: int
    separator: str
    reason: str
    targets: Targets = SEVERAL_LABELS
    missing: str = "label"

    def parse(self, row: Sequence[str]) -> frozenset[str]:
        cell = _cell(row, self.column)
        found = listed(cell)
        stripped = (shown(one.strip()) for one in (cell.split(self.separator) if found is None else found))
        return frozenset(one for one in stripped if not is_missing(one))

    def build(
        self, labels: Mapping[str, list[frozenset[str]]], where: str
    ) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        names, _ = index_labels({split: sorted(frozenset().union(*sets)) for split, sets in labels.items()}, where)
        place = {name: i for i, name in enumerate(names)}
        found = {}
        for split, sets in labels.items():
            found[split] = np.zeros((len(sets), len(names)), np.uint8)
            for row, given in enumerate(sets):
                found[split][row, [place[name] for name in given]] = 1
        return names, found


@dataclass(frozen=True)
class Indicators:
    """A column of 0 and 1 for each label."""

    columns: tuple[int, ...]
    names: tuple[str, ...]
    reason: str
    targets: Targets = SEVERAL_LABELS
    missing: str = "0 or 1 in each column"

    def parse(self, row: Sequence[str]) -> tuple[int, ...] | None:
        bits = [_bit(_cell(row, column)) for column in self.columns]
        return None if None in bits else tuple(bit for bit in bits if bit is not None)

    def build(
        self, labels: Mapping[str, list[tuple[int, ...]]], where: str
    ) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        return self.names, {split: np.array(rows, np.uint8) for split, rows in labels.items()}


@dataclass(frozen=True)
class NumberColumns:
    """A column for each number."""

    columns: tuple[int, ...]
    names: tuple[str, ...]
    reason: str
    targets: Targets = NUMBERS
    missing: str = "finite number in each column"

    def parse(self, row: Sequence[str]) -> tuple[float, ...] | None:
        numbers = [_value(_cell(row, column)) for column in self.columns]
        return None if None in numbers else tuple(number for number in numbers if number is not None)

    def build(
        self, labels: Mapping[str, list[tuple[float, ...]]], where: str
    ) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        return self.names, {split: np.array(rows, np.float64) for split, rows in labels.items()}


@dataclass(frozen=True)
class OneText:
    """A column with a text, or texts from elsewhere."""

    column: int = 0
    reason: str = "the images are lines of text"
    targets: Targets = TEXT
    missing: str = "text"

    def parse(self, row: Sequence[str]) -> str | None:
        return composed(_cell(row, self.column)) or None

    def build(self, labels: Mapping[str, list[str]], where: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
        every = [text for own in labels.values() for text in own]
        longest = max(map(len, every), default=0)
        if longest > LONGEST_TEXT:
            why = f"“{shown(max(every, key=len)[:40])}…” has {longest:,} characters, and the most is {LONGEST_TEXT:,}"
            raise DataError("a text is too long", where=where, why=why, hint="one line of text in each image")
        names = vocabulary(every)
        return names, {split: encode(own, names, longest + 1) for split, own in labels.items()}


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
    if wanted.task == "text":
        lower = [name.lower() for name in header]
        column = next((lower.index(name) for name in TEXT_COLUMNS if name in lower), None)
        return None if column is None else OneText(column)
    free = [i for i in range(len(header)) if i not in known.values() and _may_hold_labels(header[i].lower())]
    label = known.get("label")
    lower = [name.lower() for name in header]
    if wanted.names and all(name.lower() in lower for name in wanted.names):
        wanted = replace(wanted, columns=wanted.names)
    if wanted.columns:
        for name in wanted.columns:
            if name.lower() not in lower:
                raise unknown("column", name, header)
        free = [lower.index(name.lower()) for name in wanted.columns]
        label = free[0] if len(free) == 1 else None
    kept = dict(rows)
    if label is not None and wanted.task in (None, "numbers"):
        _refuse_commas(header, [label], kept, where)
    if label is not None and (reader := _of_column(header, label, list(kept.values()), wanted)):
        return reader
    return _of_columns(header, [label] if label is not None else free, kept, wanted, where)


def _may_hold_labels(name: str) -> bool:
    return name not in _NOT_TARGETS and not name.startswith("unnamed:")


def _of_column(header: Sequence[str], label: int, rows: list[Sequence[str]], wanted: Labeling) -> LabelReader | None:
    """Return the reader of a single column of classes or separated labels; None if it is one of numbers or bits."""
    name, cells = header[label], [_cell(row, label) for row in rows]
    if wanted.task == "numbers":
        return None
    if wanted.task != "class" and any(map(listed, cells)):
        return SeparatedLabels(label, SEPARATORS[0], f"the column {name} has a list of the labels of an image")
    found = wanted.separator or next((s for s in SEPARATORS if any(s in cell for cell in cells)), None)
    if wanted.task is None and not wanted.separator and found == ";" and name.lower() not in _SEVERAL:
        found = None
    if wanted.task == "class" or (wanted.task is None and found is None):
        numbers = [_number(cell) for cell in cells if not is_missing(cell)]
        if wanted.task is None and numbers and all(n is not None for n in numbers):
            values = {n for n in numbers if n is not None}
            if any(n != round(n) for n in values) or wanted.columns:
                return None
            why = f"whole numbers in the column {name} are classes; --task numbers reads them as such"
            if -1 in values and min(values) == -1 and values != {-1, 1}:
                return OneLabel(label, why, missing=_HIDDEN, numeric=True, hidden=True)
            return OneLabel(label, why, numeric=True)
        return OneLabel(label, f"the column {name} has one class an image")
    if found is None and cells and all(_bit(cell) is not None for cell in cells):
        return None
    how = f"separated by '{found}'" if found else "one at most"
    return SeparatedLabels(label, found or SEPARATORS[0], f"the column {name} has the labels of an image, {how}")


def _of_columns(
    header: Sequence[str], columns: list[int], rows: Mapping[int, Sequence[str]], wanted: Labeling, where: str
) -> LabelReader | None:
    """Return the reader of columns of bits or numbers; None without such columns."""
    if wanted.task == "class" and len(columns) != 1:
        return None
    odd = {i: _odd(rows, i, _value) for i in columns if rows}
    numeric, names = [i for i in odd if not odd[i]], tuple(header[i] for i in columns)
    if columns and len(numeric) == len(columns):
        bits = all(_bit(_cell(row, i)) is not None for i in columns for row in rows.values())
        if wanted.task is None and not wanted.columns:
            _refuse_text(names, where)
        if bits and wanted.task in (None, "labels"):
            return Indicators(tuple(columns), names, f"{_columns(names)} 0 or 1 for each label")
        if wanted.task in (None, "numbers"):
            return NumberColumns(tuple(columns), names, f"{_columns(names)} numbers")
    if wanted.task in (None, "numbers"):
        _refuse_odd(header, odd, len(rows), where)
    _refuse_commas(header, columns, rows, where)
    if numeric and wanted.task in (None, "numbers") and not wanted.columns:
        others = some([header[i] for i in columns if i not in numeric])
        raise DataError(
            "not all columns hold numbers", where=where, why=f"{others} {'do' if ' ' in others else 'does'} not",
            hint=f"--targets {' '.join(header[i] for i in numeric)}",
        )  # fmt: skip
    if wanted.task in ("labels", "numbers") and columns:
        what, kind = ("0 and 1", "not 0 or 1") if wanted.task == "labels" else ("finite numbers", "no number")
        odd = {i: _odd(rows, i, _bit) for i in columns} if wanted.task == "labels" else odd
        bad = [f"{header[i]}, {cells[0]} is {kind}" for i, cells in odd.items() if cells]
        raise DataError(
            f"--task {wanted.task} needs columns of {what}", where=where, why="; ".join(bad[:3]) or None,
            hint="name the right ones: --targets COLUMN COLUMN",
        )  # fmt: skip
    return None


def _odd(rows: Mapping[int, Sequence[str]], column: int, read: Callable[[str], float | None]) -> list[str]:
    """Return line and value of each cell of a column that cannot be read."""
    cells = ((line, _cell(row, column)) for line, row in rows.items())
    return [f"line {line}: '{shown(cell[:_LONGEST])}'" for line, cell in cells if read(cell) is None]


def _refuse_odd(header: Sequence[str], odd: Mapping[int, Sequence[str]], rows: int, where: str) -> None:
    """Raise `DataError` for a column of numbers with a few other cells."""
    for column, cells in odd.items():
        if cells and 2 * len(cells) < rows:
            few, verb = some(cells), "is no number" if len(cells) == 1 else "are no numbers"
            others = " ".join(header[i] for i in odd if not odd[i])
            raise DataError(
                f"not all cells of the column {header[column]} are numbers", where=where, why=f"{few} {verb}",
                hint="correct them, or delete the lines" + (f"; or --targets {others}" if others else ""),
            )  # fmt: skip


def _refuse_commas(header: Sequence[str], columns: list[int], rows: Mapping[int, Sequence[str]], where: str) -> None:
    """Raise `DataError` for a column of numbers with decimal commas, each of which would be a class of its own."""
    for column in columns:
        cells = {line: _cell(row, column) for line, row in rows.items()}
        commas = [line for line, cell in cells.items() if _DECIMAL_COMMA.fullmatch(cell)]
        if commas and all(_number(cell.replace(",", ".", 1)) is not None for cell in cells.values()):
            raise DataError(
                f"the column {header[column]} holds numbers with a decimal comma", where=where,
                why=f"line {commas[0]}: '{cells[commas[0]]}'", hint="write a point: 12.50",
            )  # fmt: skip


def _refuse_text(names: Sequence[str], where: str) -> None:
    """Raise `DataError` for digits in a column of texts: as numbers they would lose their leading zeros."""
    if texts := [name for name in names if name.lower() in TEXTS]:
        what = f"the column {texts[0]} may be text to read or numbers"
        raise DataError(what, where=where, why="all its cells are numbers", hint="--task text or --task numbers")


def _columns(names: Sequence[str]) -> str:
    """Name columns, with their verb."""
    return f"the column{'s' * (len(names) > 1)} {some(names, 4)} hold{'s' * (len(names) == 1)}"


def _cell(row: Sequence[str], column: int) -> str:
    return row[column].strip() if column < len(row) else ""


def _bit(cell: str) -> int | None:
    return {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}.get(cell.lower())


def _value(cell: str) -> float | None:
    """A number, or a truth value as 0 or 1."""
    number = _number(cell)
    return _bit(cell) if number is None else number


def _number(cell: str) -> float | None:
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
