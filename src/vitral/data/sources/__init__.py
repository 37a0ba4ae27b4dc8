"""Where labelled pictures come from: one file for each kind of source, and one table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from vitral.data.dataset import DataSet, some
from vitral.data.sources import archive, digits, folder, named, planted, table
from vitral.errors import DataError, UsageError, VitralError, empty, nearest


class Source(Protocol):
    """A kind of source; a module with these two functions is one."""

    def accepts(self, data: str) -> bool:
        """Whether this kind of source is the one that was typed; looks at name and file type only."""

    def load(self, data: str, *, root: Path, download: bool) -> DataSet:
        """The data set, without reading the pictures; `DataError` where it is not what it should be."""


SOURCES: Mapping[str, Source] = {
    "folder": folder,
    "archive": archive,
    "csv": table,
    "digits": digits,
    "planted": planted,
    "named": named,
}
"""The first that accepts what was typed loads it. So a path that exists wins over a named set: where there is a folder
`mnist` here, `mnist` means that folder."""


def load(data: str | Path, *, root: str | Path = "data", download: bool = True) -> DataSet:
    """The labelled pictures that `data` names; no picture is decoded yet.

    `data` is a folder of class folders (with or without train, val, test above them), a folder of IDX files, a `.csv`
    with file and label columns, a `.tar`, `.zip` or `.tar.gz` of any of these, or the name of a set: `digits`
    (embedded), or `mnist`, `cifar10` … looked for under `root` and, where `download` allows it, fetched into it.

    Raises `DataError` (unreadable, empty, badly labelled) or `UsageError` (unknown name).
    """
    text = os.path.expanduser(str(data))
    if not text:
        raise empty("DATA", "a folder of pictures, or the name of a set: digits")
    for source in SOURCES.values():
        if source.accepts(text):
            dataset = source.load(text, root=Path(root).expanduser(), download=download)
            return replace(dataset, source=str(data))
    raise _refusal(text)


def _is_data(path: Path) -> bool:
    return path.is_dir() or path.name.lower().endswith((".csv", ".tar", ".zip", ".tar.gz"))


def _refusal(data: str) -> VitralError:
    """Why nothing accepts this."""
    if os.path.exists(data):
        return DataError(
            "cannot tell what kind of data this is",
            where=data,
            why="vitral reads folders, .csv, .tar, .zip, .tar.gz, and sets by name",
            hint="put the pictures into a folder for each class, DATA/cat/1.jpg, and give DATA",
        )
    if os.sep in data or os.path.splitext(data)[1]:
        parent = Path(data).parent
        while not parent.exists():
            parent = parent.parent
        inside = _data_in(parent)
        missing = Path(data).relative_to(parent).parts[0]
        near = nearest(missing, inside) or inside
        why = f"'{parent}' holds {some(near, 6)}" if inside else f"there are no data in '{parent}'"
        return DataError("no such file or folder", where=data, why=why, hint="check the path, or name a set: digits")
    names = ("digits", "planted", *named.NAMED)
    near = nearest(data, (*names, *_data_in(Path())))
    why = (
        f"nearest: {', '.join(near)}" if near else f"there is no such path here; sets have the names {', '.join(names)}"
    )
    return UsageError(f"unknown data set '{data}'", why=why, hint="a folder of pictures, or the name of a set")


def _data_in(folder: Path) -> list[str]:
    """Names of what may be data in a folder."""
    try:
        return sorted(one.name for one in folder.iterdir() if not one.name.startswith(".") and _is_data(one))
    except OSError:
        return []
