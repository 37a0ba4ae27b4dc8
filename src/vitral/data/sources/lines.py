"""Images with a text each: a table with the columns file and text, or a folder of NAME.png + NAME.txt."""

from __future__ import annotations

import os
import posixpath
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitral.data.dataset import DataSet, split_name
from vitral.data.files import Files, Folder, is_image, splits_of
from vitral.data.sources.table import EXTENSIONS, Table
from vitral.data.targets import TEXT, Labeling
from vitral.data.targets.text import OneText
from vitral.data.tokens import SPECIAL, composed
from vitral.errors import DataError
from vitral.wording import some

_TEXT_LIMIT = 1 << 20
_HINT = "a .csv with the columns file,text, or a folder of NAME.png with NAME.txt"


def load_lines(data: str | Path) -> DataSet:
    """Load images with texts; no image is decoded yet.

    Raises `DataError` for data without texts, for images without a text, and for texts that are too long.
    """
    text = os.path.expanduser(str(data))
    if os.path.isdir(text):
        files: Files = Folder(text)
        tables = [path for path in files.paths if path.lower().endswith(EXTENSIONS)]
        name = os.path.basename(os.path.abspath(text)) or "data"
        dataset = _from_table(files, tables[0], name) if len(tables) == 1 else _from_pairs(files, name)
    elif os.path.isfile(text) and text.lower().endswith(EXTENSIONS):
        folder, file = os.path.split(text)
        files = Folder(folder)
        dataset = _from_table(files, file, os.path.splitext(file)[0])
    else:
        why = "it is neither a folder nor a table" if os.path.exists(text) else "there is no such file or folder"
        raise DataError("no images with texts", where=str(data), why=why, hint=_HINT)
    if "train" not in dataset.splits:
        why = f"splits found: {', '.join(dataset.splits) or 'none'}"
        raise DataError("no images to train on", where=str(data), why=why)
    dataset.targets.check(dataset.classes, str(data))
    known = np.unique(dataset["train"].labels)
    others = [dataset.classes[i] for i in range(len(SPECIAL), len(dataset.classes)) if i not in known]
    unseen = [f"Characters that no training text has: {some(others, 10)}."] if others else []
    return replace(dataset, source=str(data), notes=(*unseen, *dataset.notes, *files.notes))


def _from_table(files: Files, path: str, name: str) -> DataSet:
    return Table(files, path, files.prefix + path, Labeling(TEXT.task)).dataset(name)


def _from_pairs(files: Files, name: str) -> DataSet:
    """Read the text of NAME.png from NAME.txt."""
    paths: dict[str, list[str]] = defaultdict(list)
    texts: dict[str, list[str]] = defaultdict(list)
    without = []
    for path in filter(is_image, files.paths):
        own = files.find(posixpath.splitext(path)[0] + ".txt")
        if own is None:
            without.append(path)
            continue
        split = split_name(path.partition("/")[0] if "/" in path else "") or "train"
        paths[split].append(path)
        texts[split].append(_read(files, own))
    if without:
        what = f"{len(without):,} images without a text"
        raise DataError(what, where=files.where, why=f"no .txt beside {some(without)}", hint=_HINT)
    if not paths:
        raise DataError("no images with texts", where=files.where, why="there is no image", hint=_HINT)
    names, arrays = OneText().build(texts, files.where)
    return DataSet(name, names, splits_of(files, paths, arrays), files.where, targets=TEXT)


def _read(files: Files, path: str) -> str:
    try:
        text = files.read(path, _TEXT_LIMIT).decode("utf-8-sig")
    except (OSError, ValueError) as error:
        why = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
        raise DataError("cannot read a text", where=files.prefix + path, why=why, hint="save it in UTF-8") from error
    return composed(" ".join(text.split("\n")))
