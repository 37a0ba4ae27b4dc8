"""A table of pictures: a .csv with the columns file and label, and split if there is one."""

from __future__ import annotations

import csv
import io
import os
import posixpath
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from vitral.data.dataset import SPLIT_NAMES, DataSet, shown, some
from vitral.data.files import Files, Folder, labelled
from vitral.errors import DataError

COLUMNS = {
    "file": (
        "file",
        "filename",
        "file_name",
        "filepath",
        "filepaths",
        "file_path",
        "path",
        "image",
        "image_path",
        "img",
    ),
    "label": ("label", "labels", "class", "class_name", "category", "target"),
    "split": ("split", "set", "subset", "partition", "data set", "data_set", "dataset"),
}
"""What a column is called, in lower case; the first that the table has counts."""

EXTENSIONS = (".csv", ".tsv")
TABLE_LIMIT = 1 << 30
"""Bytes of a table."""


def accepts(data: str) -> bool:
    """Whether this is a file with a table's extension."""
    return data.lower().endswith(EXTENSIONS) and os.path.isfile(data)


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """The pictures of a table on disk; its paths are absolute or relative to it."""
    folder, name = os.path.split(data)
    table = _Table(Folder(folder), name, data)
    return table.dataset(os.path.splitext(name)[0])


def read(files: Files, name: str) -> DataSet | None:
    """The pictures of the one table among these files; None where there is no table."""
    paths = [path for path in files.paths if path.lower().endswith(EXTENSIONS)]
    tables = [_Table(files, path, files.prefix + path) for path in paths]
    if len(tables) > 1:
        tables = [table for table in tables if {"file", "label"} <= table.columns.keys()]
        if len(tables) != 1:
            raise DataError(
                f"{len(paths)} tables: {some(paths)}",
                where=files.where,
                why=f"{len(tables) or 'none'} of them with file and label columns",
                hint="keep one table, with the columns file,label,split",
            )
    return tables[0].dataset(name) if tables else None


@dataclass
class _Problems:
    """What is wrong with the rows, gathered so that one message names it all."""

    unlabelled: list[int] = field(default_factory=list)
    unnamed: list[int] = field(default_factory=list)
    strange_split: list[str] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)


class _Table:
    """A table and the files that its paths lead to."""

    def __init__(self, files: Files, path: str, where: str):
        self.files, self.folder, self.where = files, posixpath.dirname(path), shown(where)
        try:
            text = files.read(path, TABLE_LIMIT).decode("utf-8-sig")
            first = text.partition("\n")[0]
            self.reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t|", key=first.count))
            self.header = [column.strip() for column in next(self.reader, [])]
        except (OSError, ValueError, csv.Error) as error:
            raise self._unreadable(error) from error
        lower = [column.lower() for column in self.header]
        found = {kind: next((n for n in names if n in lower), None) for kind, names in COLUMNS.items()}
        self.columns = {kind: lower.index(name) for kind, name in found.items() if name is not None}

    def _unreadable(self, error: Exception) -> DataError:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        return DataError("cannot read table", where=self.where, why=why, hint="save it as CSV in UTF-8")

    def dataset(self, name: str) -> DataSet:
        """The pictures of all rows; `DataError` where rows are wrong."""
        for kind in ("file", "label"):
            if kind not in self.columns:
                raise DataError(
                    f"no {kind} column in the table",
                    where=self.where,
                    why=f"columns found: {some(self.header, 8) or 'none'}",
                    hint=f"call one of them {', '.join(COLUMNS[kind][:5])} (first line of the file)",
                )
        rows, notes = self._rows()
        if not rows:
            raise DataError("a table without rows", where=self.where, hint="a line for each picture: cat/1.jpg,cat")
        return labelled(self.files, name, self.where, rows, notes)

    def _rows(self) -> tuple[dict[str, tuple[list[str], list[str]]], list[str]]:
        """Paths and class names for every split; and notes."""
        rows: dict[str, tuple[list[str], list[str]]] = {}
        labels_of: dict[str, set[str]] = defaultdict(set)
        repeated, problems = [], _Problems()
        try:
            for row in self.reader:
                if not any(cell.strip() for cell in row):
                    continue
                file, label, split = self._row(row, problems)
                path = self._locate(file) if file else None
                if file and path is None:
                    problems.absent.append(file)
                if path is None:
                    continue
                if path in labels_of:
                    repeated.append(path)
                labels_of[path].add(label)
                paths, labels = rows.setdefault(split, ([], []))
                paths.append(path)
                labels.append(label)
        except csv.Error as error:
            raise self._unreadable(error) from error
        self._refuse(problems)
        notes = [f"{len(repeated):,} rows repeat a picture: {some(repeated)}"] if repeated else []
        if torn := sorted(path for path, labels in labels_of.items() if len(labels) > 1):
            notes.append(f"{len(torn):,} pictures have more than one label: {some(torn)}")
        return rows, notes

    def _row(self, row: list[str], problems: _Problems) -> tuple[str, str, str]:
        """File, class and split as typed in one row; what is missing goes to the problems."""
        cells = {kind: row[i].strip() if i < len(row) else "" for kind, i in self.columns.items()}
        split = SPLIT_NAMES.get(cells.get("split", "train").lower(), "")
        if not cells["file"]:
            problems.unnamed.append(self.reader.line_num)
        if not cells["label"]:
            problems.unlabelled.append(self.reader.line_num)
        if not split:
            problems.strange_split.append(f"'{cells['split']}' in line {self.reader.line_num}")
        return cells["file"], shown(cells["label"]), split

    def _locate(self, file: str) -> str | None:
        """The path among the files, or None. Tables from Windows write "cat\\1.jpg"."""
        for spelling in (file, file.replace("\\", "/")) if "\\" in file else (file,):
            path = posixpath.normpath(posixpath.join(self.folder, spelling))
            if "\0" not in path and self.files.has(path):
                return path
        return None

    def _refuse(self, problems: _Problems) -> None:
        if problems.unnamed or problems.unlabelled:
            lines, what = (problems.unnamed, "file") if problems.unnamed else (problems.unlabelled, "label")
            raise DataError(
                f"{len(lines):,} rows without a {what}",
                where=self.where,
                why=f"line {some(lines, 5)}",
                hint="fill them in, or delete the lines",
            )
        if problems.strange_split:
            raise DataError(
                f"{len(problems.strange_split):,} rows of an unknown split",
                where=self.where,
                why=some(problems.strange_split),
                hint="write train, val or test",
            )
        if problems.absent:
            raise DataError(
                f"{len(problems.absent):,} files of the table do not exist",
                where=self.where,
                why=some(problems.absent),
                hint="paths are read relative to the table's own folder",
            )
