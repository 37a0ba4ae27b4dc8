"""Formats of a table: CSV, JSON Lines and Parquet, one class each.

While a table is written each row is one line, so that a truncated row is recognized and the table can be resumed.
Parquet cannot be appended to: its rows are JSON lines until the table is complete.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from vitral.atomic import replacing
from vitral.data import lazy_pyarrow
from vitral.errors import UsageError
from vitral.filesystem import move
from vitral.wording import as_escape, shown

Cell = str | float | None
Row = Sequence[Cell]
"""The first cell is a path, the last one an error message or None."""

_GROUP = 10_000
"""Rows of a group in a Parquet file, which are in memory together."""


class Format(Protocol):
    """A file format, for a table of these columns."""

    def __init__(self, columns: Sequence[str], texts: Collection[str] = ()):
        """`texts` are the columns that hold text; all others hold numbers."""

    def head(self) -> bytes:
        """Return the bytes before the first row."""

    def line(self, row: Row) -> bytes:
        """Return a row as one line."""

    def read(self, line: bytes) -> tuple[str, bool] | None:
        """Return the path of a line and True for an error; None for a line that `line` did not write."""

    def path(self, name: str) -> str:
        """Return an image's name in the form of `read`."""

    def finish(self, partial: Path, target: Path) -> None:
        """Convert the complete partial file into the table."""


class Csv:
    """UTF-8, RFC 4180 with `\\n` at the end of lines.

    Spreadsheets evaluate cells that begin with = + - @. Such a relative path gets the prefix `./`, which names the same
    file; other such text gets an apostrophe. Control characters and bytes that are not text are escaped in Python's
    notation, so each row is one line and contains no terminal control sequence.
    """

    def __init__(self, columns: Sequence[str], texts: Collection[str] = ()):
        self.columns, self.texts = columns, texts

    def head(self) -> bytes:
        return _csv_line([_inert(shown(name)) for name in self.columns])

    def line(self, row: Row) -> bytes:
        path, *cells = row
        return _csv_line([self.path(str(path)), *(_inert(shown(c)) if isinstance(c, str) else c for c in cells)])

    def read(self, line: bytes) -> tuple[str, bool] | None:
        try:
            (cells,) = csv.reader([line.decode()], strict=True)
        except (UnicodeDecodeError, ValueError, csv.Error):
            return None
        return (cells[0], bool(cells[-1])) if len(cells) == len(self.columns) else None

    def path(self, name: str) -> str:
        return f"./{shown(name)}" if name[:1] in _FORMULA else shown(name)

    def finish(self, partial: Path, target: Path) -> None:
        move(partial, target)


_FORMULA = tuple("=+-@＝＋－＠")
_NO_TEXT = re.compile("[\ud800-\udfff]")
_NUMBER = re.compile(r"[+-]\d+(\.\d+)?")


def _inert(text: str) -> str:
    """Return a text that no spreadsheet evaluates. Numbers are left unchanged."""
    return f"'{text}" if text[:1] in _FORMULA and not _NUMBER.fullmatch(text) else text


def _csv_line(cells: Sequence[Cell]) -> bytes:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue().encode()


class JsonLines:
    """One object per line with every column; names are exact, but with bytes that are no UTF-8 escaped."""

    def __init__(self, columns: Sequence[str], texts: Collection[str] = ()):
        self.columns, self.texts = columns, texts

    def head(self) -> bytes:
        return b""

    def line(self, row: Row) -> bytes:
        cells = (_exact(cell) if isinstance(cell, str) else cell for cell in row)
        return (json.dumps(dict(zip(self.columns, cells, strict=True))) + "\n").encode()

    def read(self, line: bytes) -> tuple[str, bool] | None:
        try:
            row = json.loads(line)  # one row; names of earlier versions may hold surrogates, which `bounded` refuses
        except (ValueError, RecursionError):
            return None
        if not isinstance(row, dict) or list(row) != list(self.columns):
            return None
        path, *_, error = row.values()
        return path, error is not None

    def path(self, name: str) -> str:
        return _exact(name)

    def finish(self, partial: Path, target: Path) -> None:
        move(partial, target)


def _exact(text: str) -> str:
    """Return the text, with bytes that are no UTF-8, which strict readers of JSON refuse, as `\\xe9`."""
    return _NO_TEXT.sub(as_escape, text)


class Parquet(JsonLines):
    """Columns of strings and float32, in groups of 10,000 rows. Names that are not text are escaped, as in CSV."""

    def __init__(self, columns: Sequence[str], texts: Collection[str] = ()):
        super().__init__(columns, texts)
        pyarrow()

    def finish(self, partial: Path, target: Path) -> None:
        arrow = pyarrow()
        kinds = {name: arrow.string() if name in self.texts else arrow.float32() for name in self.columns}
        schema = arrow.schema(kinds.items())
        with replacing(target) as temporary, arrow.parquet.ParquetWriter(temporary, schema) as writer:
            for rows in _groups(partial):
                writer.write_table(arrow.Table.from_pylist(rows, schema))
        partial.unlink()


def rows_of(partial: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of `JsonLines`."""
    with open(partial, "rb") as file:
        yield from map(json.loads, file)


def _groups(partial: Path) -> Iterator[list[dict[str, Any]]]:
    rows = rows_of(partial)
    while group := list(itertools.islice(rows, _GROUP)):
        yield [{name: text(v) if isinstance(v, str) else v for name, v in row.items()} for row in group]


def text(name: str) -> str:
    """Return a name that UTF-8 can encode."""
    return shown(name) if any("\ud800" <= letter <= "\udfff" for letter in name) else name


def pyarrow() -> Any:
    """Import pyarrow. Raises `MissingExtraError` if it is not installed."""
    return lazy_pyarrow.pyarrow("write .csv or .jsonl")


FORMATS: dict[str, type[Format]] = {".csv": Csv, ".jsonl": JsonLines, ".parquet": Parquet}
"""File extension → format."""


def format_of(path: str | Path) -> type[Format]:
    """Return the format for the extension of a path. Raises `UsageError` for an unknown one."""
    suffix = Path(path).suffix.lower()
    if suffix not in FORMATS:
        why = f"its extension is '{suffix}'" if suffix else "it has no extension"
        raise UsageError("tables are written as .csv, .jsonl or .parquet", where=path, why=why, hint="--out table.csv")
    return FORMATS[suffix]
