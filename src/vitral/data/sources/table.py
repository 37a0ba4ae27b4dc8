"""A table of images: a .csv with the columns file and label, labels or numbers, and optionally split and group."""

from __future__ import annotations

import csv
import io
import os
import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data.dataset import FILE_COLUMNS, LABEL_COLUMNS, DataSet, case_notes, split_name
from vitral.data.files import Files, Folder, is_image, splits_of
from vitral.data.images.decode import EXTENSIONS as IMAGE_EXTENSIONS
from vitral.data.label_table import is_label_table, is_set_aside
from vitral.data.sources.labeling import reader_of
from vitral.data.spellings import nfc, respelled_note
from vitral.data.targets import ANY, Labeling, targets_of
from vitral.data.targets.target import LabelReader
from vitral.data.targets.text import TEXT_COLUMNS, TEXTS
from vitral.errors import DataError
from vitral.wording import count, either, shown, some

COLUMNS = {
    "file": FILE_COLUMNS,
    "label": (*LABEL_COLUMNS, "tags"),
    "group": ("group", "groups", "group_id"),
    "split": ("split", "set", "subset", "partition", "data set", "data_set", "dataset"),
    "val": ("is_valid", "is_val", "is_validation"),
    "test": ("is_test",),
}
"""Names of each column, in lower case; the first in the table counts. The columns `val` and `test` hold true or false,
as fastai's `is_valid` does; a column `split` goes first.
"""
_SEPARATOR = re.compile(r"sep=(.)\r?\n", re.IGNORECASE)
_BOOLEANS = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}

EXTENSIONS = (".csv", ".tsv")
SUFFIXES = {case(suffix) for suffix in IMAGE_EXTENSIONS for case in (str.lower, str.upper)}
"""Suffixes of images that a table may leave out."""
TABLE_LIMIT = 1 << 30
"""Largest table, in bytes."""


def accepts(data: str) -> bool:
    """True for a file with a table's extension."""
    return data.lower().endswith(EXTENSIONS) and os.path.isfile(data)


def load(data: str, *, root: Path, download: bool, wanted: Labeling = ANY) -> DataSet:
    """Load the images of a table on disk; its paths are absolute or relative to it."""
    folder, name = os.path.split(data)
    table = Table(Folder(folder), name, data, wanted)
    return table.dataset(os.path.splitext(name)[0])


def read(files: Files, name: str, wanted: Labeling = ANY) -> DataSet | None:
    """Read the images of the one table among these files; None if there is no table."""
    paths = [path for path in files.paths if path.lower().endswith(EXTENSIONS)]
    tables = [Table(files, path, files.prefix + path, wanted) for path in paths]
    if len(tables) > 1:
        tables = [table for table in tables if {"file", "label"} <= table.columns.keys()]
        if len(tables) != 1:
            what = f"{len(paths)} tables: {some(paths)}"
            why = f"{len(tables) or 'none'} of them with file and label columns"
            raise DataError(what, where=files.where, why=why, hint="keep one table, with the columns file,label,split")
    return tables[0].dataset(name) if tables else None


@dataclass
class _Problems:
    """Errors in the rows, collected so that one message reports them all."""

    unlabeled: list[int] = field(default_factory=list)
    unnamed: list[int] = field(default_factory=list)
    unknown_split: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


class Table:
    """A table and the files that its paths refer to."""

    def __init__(self, files: Files, path: str, where: str, wanted: Labeling):
        self.files, self.folder, self.where = files, posixpath.dirname(path), shown(where)
        self.wanted = wanted
        try:
            text = files.read(path, TABLE_LIMIT).decode("utf-8-sig")
            stated = _SEPARATOR.match(text)  # a line of Excel's
            self.text, self.above = text[stated.end() if stated else 0 :], int(bool(stated))
            first = self.text.partition("\n")[0]
            self.delimiter = stated[1] if stated else max(",;\t|", key=first.count)
            self.header = [column.strip() for column in next(self._reader(), [])]
        except (OSError, ValueError, csv.Error) as error:
            raise self._unreadable(error) from error
        if twice := [name for name, times in Counter(self.header).items() if name and times > 1]:
            hint = "rename one of them, or remove it"
            raise DataError(
                f"{count(self.header.count(twice[0]), 'column')} are called {shown(twice[0])}",
                where=self.where,
                hint=hint,
            )
        lower = [column.lower() for column in self.header]
        name_of = {kind: next((n for n in names if n in lower), None) for kind, names in COLUMNS.items()}
        self.groups: dict[str, list[str]] = defaultdict(list)
        self.columns = {kind: lower.index(name) for kind, name in name_of.items() if name is not None}
        self.marks = {name: lower.index(name) for name in ("given", "checked") if is_label_table(lower)}
        """Columns of a table that a person checks; none in other tables."""
        self.set_aside: set[int] = set()
        """Lines of such a table that are not for training."""
        self.added: dict[str, str] = {}
        """Name of a file in the table → the name with the suffix that it lacks."""
        self.respelled: dict[str, str] = {}
        """Name of a file in the table → the name in another form of Unicode."""

    def _reader(self) -> Any:
        return csv.reader(io.StringIO(self.text, newline=""), delimiter=self.delimiter)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows that are for training, each with the number of its last line."""
        for line, row in self._all_lines():
            if self.marks and "label" in self.columns:
                label, checked = self._cell(row, "label"), _cell_at(row, self.marks["checked"])
                if is_set_aside(label, checked):
                    self.set_aside.add(line)
                    continue
            yield line, row

    def _all_lines(self) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows below the header that are not empty, each with the number of its last line."""
        reader = self._reader()
        next(reader, None)
        before = reader.line_num
        try:
            for row in reader:
                self._check_quotes(row, before + 1 + self.above, reader.line_num + self.above)
                before = reader.line_num
                if any(cell.strip() for cell in row[len(self.header) :]):
                    why = (
                        f"line {before + self.above} has {len(row)} cells, and the first line names {len(self.header)}"
                    )
                    hint = f'quote a cell that holds "{self.delimiter}", or name the column'
                    raise DataError("a row with too many cells", where=self.where, why=why, hint=hint)
                if any(cell.strip() for cell in row):
                    yield before + self.above, row
        except csv.Error as error:
            raise self._unreadable(error) from error

    def _check_quotes(self, row: Sequence[str], first: int, last: int) -> None:
        """Raise `DataError` for a cell that holds lines of the table, after a quotation mark that is not closed."""
        for column, cell in enumerate(row if first < last else ()):
            rows = [line for line in cell.split("\n")[1:] if line.count(self.delimiter) >= len(self.header) - 1]
            if rows or ("\n" in cell.strip() and column in self.columns.values()):
                raise DataError(
                    "a quotation mark is not closed",
                    where=self.where,
                    why=f"it makes one cell of lines {first} to {last}",
                    hint='write "" for a quotation mark in a quoted cell, or remove it',
                )

    def _unreadable(self, error: Exception) -> DataError:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        return DataError("cannot read table", where=self.where, why=why, hint="save it as CSV in UTF-8")

    def dataset(self, name: str) -> DataSet:
        """Read the images of all rows; `DataError` for malformed rows."""
        if "file" not in self.columns:
            raise self._no_column("file")
        labels = reader_of(self.header, self.columns, self._lines(), self.wanted, self.where)
        if labels is None:
            raise self._no_column(targets_of(self.wanted.task).column if self.wanted.task else "label")
        paths, found, notes = self._rows(labels)
        if not paths and self.set_aside:
            why = f"{count(len(self.set_aside), 'row')} without a label, unsure or excluded"
            raise DataError("no labels in the table", where=self.where, why=why, hint=f"vitral label {self.where}")
        if not paths:
            raise DataError("a table without rows", where=self.where, hint="add a line for each image: cat/1.jpg,cat")
        names, arrays = labels.build(found, self.where)
        notes += case_notes(names)
        splits = splits_of(self.files, paths, arrays)
        return self._grouped(
            DataSet(name, names, splits, self.where, tuple(notes), targets=labels.targets, reason=labels.reason)
        )

    def _grouped(self, dataset: DataSet) -> DataSet:
        """Add the groups of the rows: a cut keeps a patient, a video or a place on one side."""
        if not self.groups:
            return dataset
        number = {name: i for i, name in enumerate(dict.fromkeys(n for names in self.groups.values() for n in names))}
        splits = {
            split: replace(images, groups=np.array([number[name] for name in self.groups[split]], np.int64))
            for split, images in dataset.splits.items()
        }
        shared = sorted(name for name in number if sum(name in set(names) for names in self.groups.values()) > 1)
        counted = "1 group is" if len(shared) == 1 else f"{len(shared):,} groups are"
        note = f"{counted} in more than one split: {some(shared)}"
        return replace(dataset, splits=splits, notes=(*dataset.notes, note) if shared else dataset.notes)

    def _no_column(self, kind: str) -> DataError:
        if any(self._locate(cell) for cell in self.header if cell):
            why = f"the first line names an image already: {some(self.header, 3)}"
            hint = "add a line above it with the names of the columns: file,label"
            return DataError("no header in the table", where=self.where, why=why, hint=hint)
        texts = kind == "label" and any(name.strip().lower() in TEXTS for name in self.header)
        return DataError(
            f"no {kind} column in the table",
            where=self.where,
            why=f"columns found: {some(self.header, 8) or 'none'}",
            hint="--task text, to read the text in images; or call the column of the classes label"
            if texts
            else f"name the {kind} column {either(COLUMNS.get(kind, TEXT_COLUMNS)[:5])} in the first line",
        )

    def _rows(self, reader: LabelReader) -> tuple[dict[str, list[str]], dict[str, list[object]], list[str]]:
        """Return the paths and the labels of every split, and notes."""
        paths: dict[str, list[str]] = defaultdict(list)
        found: dict[str, list[object]] = defaultdict(list)
        labels_of: dict[str, set[object]] = defaultdict(set)
        repeated, problems = [], _Problems()
        for line, row in self._lines():
            file, label, split = self._row(line, row, reader, problems)
            path = self._locate(file) if file else None
            if file and path is None:
                problems.missing.append(file)
            if path is None:
                continue
            if path in labels_of:
                repeated.append(path)
            labels_of[path].add(label)
            paths[split].append(path)
            found[split].append(label)
            if "group" in self.columns:
                self.groups[split].append(self._cell(row, "group") or f"\0{path}")  # without one, on its own
        self._refuse(problems, reader.missing)
        notes = [f"{count(len(repeated), 'row')} with an image that came before: {some(repeated)}"] if repeated else []
        if self.set_aside:
            are = "is" if len(self.set_aside) == 1 else "are"
            notes.append(f"{count(len(self.set_aside), 'row')} without a label, unsure or excluded {are} not used")
        if self.added:
            name, path = next(iter(self.added.items()))
            notes.append(f"{len(self.added):,} file names of the table have no suffix: {name} is {path}")
        if self.respelled:
            notes.append(respelled_note("the table", self.respelled))
        if "split" not in self.columns and (flags := [kind for kind in ("val", "test") if kind in self.columns]):
            pairs = ", ".join(f"{self.header[self.columns[kind]]} as {kind}" for kind in flags)
            notes.append(f"splits by the columns {pairs}")
        if conflicts := sorted(path for path, labels in labels_of.items() if len(labels) > 1):
            notes.append(f"{count(len(conflicts), 'image')} with more than one label: {some(conflicts)}")
        return dict(paths), dict(found), notes

    def _row(self, line: int, row: list[str], reader: LabelReader, problems: _Problems) -> tuple[str, object, str]:
        """Return file, label and split of one row; add missing ones to `problems`."""
        cells = {kind: self._cell(row, kind) for kind in self.columns}
        split, cell = self._split_of(cells)
        if not cells["file"]:
            problems.unnamed.append(line)
        label = reader.parse(row)
        if label is None:
            problems.unlabeled.append(line)
        if not split:
            problems.unknown_split.append(f"'{cell}' in line {line}")
        return cells["file"], label, split

    def _split_of(self, cells: dict[str, str]) -> tuple[str, str]:
        """Return the split of a row, "" for an unknown one, and the cell that states it."""
        if "split" in cells:
            return split_name(cells["split"]) or "", cells["split"]
        for kind in ("test", "val"):
            if kind in cells:
                flag = _BOOLEANS.get(cells[kind].lower())
                if flag is not False:
                    return kind if flag else "", cells[kind]
        return "train", ""

    def _cell(self, row: list[str], kind: str) -> str:
        return _cell_at(row, self.columns[kind]) if kind in self.columns else ""

    def entries(self) -> Iterator[dict[str, str]]:
        """Yield the cells of every row, also those without a label and those that are set aside: `file`, relative to
        the table's folder, `label`, `group`, `split`, and `given` and `checked` where the table has them.

        Raises `DataError` for files that do not exist, and for a table without a column of files.
        """
        if "file" not in self.columns:
            raise self._no_column("file")
        problems = _Problems()
        for _, row in self._all_lines():
            file = self._cell(row, "file")
            path = self._locate(file) if file else None
            if path is None:
                problems.missing.append(file)
                continue
            cells = {kind: self._cell(row, kind) for kind in self.columns}
            split = self._split_of(cells)[0] if {"split", "val", "test"} & self.columns.keys() else ""
            marks = {name: _cell_at(row, at) for name, at in self.marks.items()}
            yield {"label": "", "group": "", **cells, **marks, "split": split, "file": path}
        self._refuse(problems, "label")

    def _locate(self, file: str) -> str | None:
        """Find the path among the files, or None. Tables from Windows contain "cat\\1.jpg"."""
        for spelling in (file, file.replace("\\", "/")) if "\\" in file else (file,):
            path = posixpath.normpath(posixpath.join(self.folder, spelling))
            if "\0" not in path and (there := self.files.find(path)):
                if there != path:
                    self.respelled[file] = there
                return there
            if "\0" not in path and path != "." and not is_image(path):
                found = self._images_named(path)
                if len(found) == 1:  # several would be a guess
                    self.added[file] = found[0]
                    return found[0]
        return None

    def _images_named(self, path: str) -> list[str]:
        """Return the images with this path but for a suffix."""
        if path.startswith(("/", "../")):  # outside the files that are listed
            return [there for suffix in sorted(SUFFIXES) if (there := self.files.find(path + suffix))]
        return self._by_stem.get(nfc(path), [])

    @cached_property
    def _by_stem(self) -> dict[str, list[str]]:
        """Composed path without suffix → images; listed once, since a table may have millions of rows."""
        found: dict[str, list[str]] = defaultdict(list)
        for path in filter(is_image, self.files.paths):
            found[nfc(posixpath.splitext(path)[0])].append(path)
        return found

    def _refuse(self, problems: _Problems, label: str) -> None:
        if problems.unnamed or problems.unlabeled:
            lines, what = (problems.unnamed, "file") if problems.unnamed else (problems.unlabeled, label)
            what = f"{count(len(lines), 'row')} without a {what}"
            why = f"line {some(lines, 5)}"
            raise DataError(what, where=self.where, why=why, hint="fill them in, or delete the lines")
        if problems.unknown_split:
            what = f"{count(len(problems.unknown_split), 'row')} of an unknown split"
            hint = "write train, val or test" if "split" in self.columns else "write true or false"
            raise DataError(what, where=self.where, why=some(problems.unknown_split), hint=hint)
        if problems.missing:
            verb = "does" if len(problems.missing) == 1 else "do"
            what = f"{count(len(problems.missing), 'file')} of the table {verb} not exist"
            why = some(problems.missing)
            raise DataError(
                what,
                where=self.where,
                why=why,
                hint="paths are relative to the folder of the table, or to the current one if it is in memory",
            )


def _cell_at(row: Sequence[str], column: int) -> str:
    return row[column].strip() if column < len(row) else ""
