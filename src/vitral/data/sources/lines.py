"""Images with a text each: a table with the columns file and text (and split), or a folder of NAME.png + NAME.txt."""

from __future__ import annotations

import csv
import io
import os
import posixpath
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vitral.data.dataset import DataSet, Split, in_order, shown, some, split_name
from vitral.data.files import Files, Folder, Names, is_image
from vitral.data.sources.labeling import TEXTS
from vitral.data.sources.table import COLUMNS, EXTENSIONS, TABLE_LIMIT
from vitral.data.targets import TEXT
from vitral.data.text import composed, encode, vocabulary
from vitral.errors import DataError

TEXT_COLUMNS = (*TEXTS, "label")
"""Names of the column with the text, in lower case; the first in the table counts."""
LONGEST = 1_000
"""Most characters of a text; a longer one is a paragraph, or a mistake."""
_TEXT_LIMIT = 1 << 20
_HINT = "a .csv with the columns file,text, or a folder of NAME.png with NAME.txt"

Rows = dict[str, list[tuple[str, str]]]
"""Split → (path, text) of each image."""


def load_lines(data: str | Path, *, root: str | Path = "data") -> DataSet:
    """Load images with texts; no image is decoded yet. `root` is unused: no such set has a name.

    Raises `DataError` for data without texts, for images without a text, and for texts that are too long.
    """
    text = os.path.expanduser(str(data))
    if os.path.isdir(text):
        files: Files = Folder(text)
        tables = [path for path in files.paths if path.lower().endswith(EXTENSIONS)]
        rows = _from_table(files, tables[0]) if len(tables) == 1 else _from_pairs(files)
        name = os.path.basename(os.path.abspath(text)) or "data"
    elif os.path.isfile(text) and text.lower().endswith(EXTENSIONS):
        folder, file = os.path.split(text)
        files, name = Folder(folder), os.path.splitext(file)[0]
        rows = _from_table(files, file)
    else:
        why = "it is no folder and no table" if os.path.exists(text) else "there is no such file or folder"
        raise DataError("no images with texts", where=str(data), why=why, hint=_HINT)
    dataset = _dataset(files, name, rows, str(data))
    return replace(dataset, notes=(*dataset.notes, *files.notes))


def _dataset(files: Files, name: str, rows: Mapping[str, Sequence[tuple[str, str]]], source: str) -> DataSet:
    texts = {split: [text for _, text in own] for split, own in rows.items()}
    every = [text for own in texts.values() for text in own]
    longest = max(map(len, every), default=0)
    if longest > LONGEST:
        first = shown(max(every, key=len)[:40])
        why = f"“{first}…” has {longest:,} characters, and the most is {LONGEST:,}"
        raise DataError("a text is too long", where=source, why=why, hint="one line of text in each image")
    if "train" not in texts:
        raise DataError("no images to train on", where=source, why=f"splits found: {', '.join(texts) or 'none'}")
    names = vocabulary(every)
    splits = {}
    for split, own in rows.items():
        paths = [path for path, _ in own]
        splits[split] = Split(Names(files.prefix, paths), encode(texts[split], names, longest + 1), files.fetch(paths))
    dataset = DataSet(name, names, in_order(splits), source, _unseen(texts), targets=TEXT)
    dataset.targets.check(names, source)
    return dataset


def _unseen(texts: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Note on characters that training never shows."""
    train = set().union(*texts["train"])
    others = sorted(set().union(*(set().union(*own) for own in texts.values())) - train)
    return (f"Characters that no training text has: {some(others, 10)}.",) if others else ()


# ---- NAME.png + NAME.txt


def _from_pairs(files: Files) -> Rows:
    rows: Rows = defaultdict(list)
    without = []
    for path in filter(is_image, files.paths):
        own = posixpath.splitext(path)[0] + ".txt"
        if not files.has(own):
            without.append(path)
            continue
        rows[split_name(path.partition("/")[0] if "/" in path else "") or "train"].append((path, _read(files, own)))
    if without:
        what = f"{len(without):,} images without a text"
        raise DataError(what, where=files.where, why=f"no .txt beside {some(without)}", hint=_HINT)
    if not rows:
        raise DataError("no images with texts", where=files.where, why="there is no image", hint=_HINT)
    return rows


def _read(files: Files, path: str) -> str:
    try:
        text = files.read(path, _TEXT_LIMIT).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError("cannot read a text", where=files.prefix + path, why=why, hint="save it in UTF-8") from error
    return composed(" ".join(text.split("\n")))


# ---- a table


def _from_table(files: Files, path: str) -> Rows:
    where, folder = shown(files.prefix + path), posixpath.dirname(path)
    try:
        text = files.read(path, TABLE_LIMIT).decode("utf-8-sig")
        first = text.partition("\n")[0]
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t|", key=first.count)))
    except (OSError, ValueError, csv.Error) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError("cannot read table", where=where, why=why, hint="save it as CSV in UTF-8") from error
    header = [column.strip().lower() for column in lines[0]] if lines else []
    named = {"file": COLUMNS["file"], "text": TEXT_COLUMNS, "split": COLUMNS["split"]}
    found = {kind: next((n for n in names if n in header), None) for kind, names in named.items()}
    for kind in ("file", "text"):
        if found[kind] is None:
            why = f"columns found: {some(header, 8) or 'none'}"
            raise DataError(f"no {kind} column in the table", where=where, why=why, hint=_HINT)
    columns = {kind: header.index(name) for kind, name in found.items() if name is not None}
    rows: Rows = defaultdict(list)
    problems = []
    for number, line in enumerate(lines[1:], 2):
        if not any(cell.strip() for cell in line):
            continue
        cells = {kind: line[i].strip() if i < len(line) else "" for kind, i in columns.items()}
        split = split_name(cells.get("split", "train"))
        there = _locate(files, folder, cells["file"])
        if there is None or split is None or not cells["text"]:
            what = "no such file" if there is None else "unknown split" if split is None else "no text"
            problems.append(f"line {number}: {what}")
        else:
            rows[split].append((there, composed(cells["text"])))
    if problems:
        what = f"{len(problems):,} rows cannot be used"
        raise DataError(what, where=where, why=some(problems), hint="file,text of each image, and train, val or test")
    if not rows:
        raise DataError("the table has no rows", where=where, hint=_HINT)
    return rows


def _locate(files: Files, folder: str, file: str) -> str | None:
    """The path of a table's file among the files; None if it is not there."""
    if not file:
        return None
    path = posixpath.normpath(posixpath.join(folder, file.replace("\\", "/")))
    return path if files.has(path) else None
