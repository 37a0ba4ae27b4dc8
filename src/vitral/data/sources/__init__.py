"""Sources of labeled images: one file for each kind of source, and one table."""

from __future__ import annotations

import inspect
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from vitral.data.dataset import DataSet
from vitral.data.files import respelled
from vitral.data.sources import archive, digits, folder, lines, memory, named, parquet, planted, remote, shards, table
from vitral.data.tables_in_memory import Examples, as_path, is_in_memory
from vitral.data.targets import ANY, Labeling, targets_of
from vitral.errors import DataError, UsageError, VitralError, empty, nearest
from vitral.kinds import checked
from vitral.plugins import Extensible
from vitral.wording import some


class Source(Protocol):
    """A kind of source: a module with these two functions. The `load` of one that may hold a table also has a parameter
    `wanted`, the `Labeling` that the caller asks for.
    """

    def accepts(self, data: str) -> bool:
        """True if the typed argument names a source of this kind, by name and file type only."""

    def load(self, data: str, *, root: Path, download: bool) -> DataSet:
        """Load the data set without decoding images; `DataError` if it is malformed."""


SOURCES: Mapping[str, Source] = Extensible(
    "vitral.sources",
    {
        "memory": memory,
        "shards": shards,
        "remote": remote,
        "parquet": parquet,
        "folder": folder,
        "archive": archive,
        "csv": table,
        "digits": digits,
        "planted": planted,
        "named": named,
    },
)
"""The first source that accepts the typed argument loads it. So an existing path wins over a named set: with a folder
`mnist` in the current directory, `mnist` means that folder."""


@partial(checked, but=("data",))  # `as_path` checks it
def load(
    data: str | Path | DataSet | Examples,
    *,
    root: str | Path = "data",
    download: bool = True,
    wanted: Labeling = ANY,
    tasks: Sequence[str] = ("class",),
) -> DataSet:
    """Load labeled images; no image is decoded yet.

    A table may also have several labels per image (`labels`) or numbers (`numbers`). vitral infers the task from the
    columns, or you state it as `wanted`. For texts, you must state it, because a table of texts looks like a table of
    classes (`vitral.data.sources.lines`).

    Args:
        data: A folder of class folders (with or without train, val, test above them), a folder of IDX files, a `.csv`
            with columns of files and labels, a `.tar`, `.zip` or `.tar.gz` of any of these, a folder of shards or
            Parquet files, a pattern of their paths (`shards/train-{000000..000009}.tar`), here or in an object store,
            or the name of a data set such as `digits` or `cifar10`. Or data of this process: a torch Dataset of (image,
            label), a tuple of arrays (images, labels), a DataFrame with paths and labels, a Hugging Face data set, or a
            dict of these by split. A `DataSet` is returned as it is.
        root: Folder for data sets that vitral downloads by name, such as `cifar10`.
        download: Download a data set that is not in `root`.
        wanted: The task and the columns to read (default: as the data state them).
        tasks: Tasks that the caller supports; data for other tasks raise an error.

    Returns:
        The images in splits, and the names of the classes.

    Raises:
        DataError: The data are empty, badly labeled, or cannot be read.
        UsageError: The name of the data set is not known.

    Example:
        data = vitral.load_data("photos/")
        print(data.classes, data["train"].image(0).shape)
    """
    if is_in_memory(data):
        if wanted.task and targets_of(wanted.task).sequence:
            raise UsageError(f"--task {wanted.task} needs files", why="data in memory are read with other labels")
        dataset = memory.of_memory(data, wanted)
        _check_task(dataset, wanted, tasks)
        return dataset
    text = os.path.expanduser(as_path(data))
    if not text:
        raise empty("DATA", "give a folder of images, or the name of a data set, such as digits")
    if not os.path.exists(text):
        text = respelled(text) or text
    if wanted.task and targets_of(wanted.task).sequence:
        return lines.load_lines(str(data))
    for kind, source in SOURCES.items():
        if source.accepts(text):
            may_hold_a_table = "wanted" in inspect.signature(source.load).parameters
            options: dict[str, object] = {"wanted": wanted} if may_hold_a_table else {}
            dataset = _loaded(kind, source, text, root=Path(root).expanduser(), download=download, **options)
            _check_task(dataset, wanted, tasks)
            return replace(dataset, source=str(data))
    raise _refusal(text)


def _loaded(kind: str, source: Source, data: str, **options: Any) -> DataSet:
    """Load a data set, and check that of a package's source; `DataError` with its name if it is malformed."""
    if kind in cast(Extensible[Source], SOURCES).built_in:
        return source.load(data, **options)
    what = f"the source {kind} is broken"
    try:
        dataset = source.load(data, **options)
        labels = [np.asarray(split.labels) for split in dataset.splits.values()]
    except VitralError:
        raise
    except Exception as error:  # a package may fail in any way
        raise DataError(what, where=data, why=f"{type(error).__name__}: {error}") from error
    count, bad = len(dataset.classes), [own for own in labels if own.dtype.kind not in "iu" or own.ndim != 1]
    if dataset.targets.one_class and (bad or any(own.min() < 0 or own.max() >= count for own in labels if len(own))):
        why = f"its labels are not numbers from 0 to {count - 1}, one an image"
        raise DataError(what, where=data, why=why, hint=f"mend it, or uninstall the package that adds {kind}")
    return dataset


def _check_task(dataset: DataSet, wanted: Labeling, tasks: Sequence[str]) -> None:
    """Raise `UsageError` for data of another task than the wanted one, `DataError` for one that is not supported."""
    task = dataset.targets.task
    if wanted.task not in (None, task) or ((wanted.separator or wanted.columns) and not dataset.reason):
        typed = f"--task {wanted.task}" if wanted.task not in (None, task) else "--label-separator or --targets"
        why = "all but tables have one class per image"
        raise UsageError(f"{typed} needs a table", where=dataset.source, why=why, hint="use a .csv with file,labels")
    if task not in tasks:
        why = f"{dataset.reason}, and this command is for one class per image"
        raise DataError(
            f"data of --task {task}",
            where=dataset.source,
            why=why,
            hint="vitral train, evaluate and predict support this task; a column class or label is read as classes",
        )


_SHEETS = (".xlsx", ".xls", ".xlsm", ".ods", ".numbers")


def _refusal(data: str) -> VitralError:
    """The error for an argument that no source accepts."""
    if os.path.exists(data) and data.lower().endswith(_SHEETS):
        return DataError("a spreadsheet is not read", where=data, hint="save it as CSV, with the columns file,label")
    if os.path.exists(data):
        why = "vitral reads folders, .csv, .tar, .zip, .tar.gz, and sets by name"
        hint = "put the images into a folder for each class, DATA/cat/1.jpg, and give DATA"
        return DataError("unknown kind of data", where=data, why=why, hint=hint)
    if os.sep in data or os.path.splitext(data)[1]:
        parent = Path(data).parent
        while not parent.exists():
            parent = parent.parent
        inside = _data_in(parent)
        missing = Path(data).relative_to(parent).parts[0]
        near = nearest(missing, inside) or inside
        place = "the current folder" if parent == Path() else f"'{parent}'"
        why = f"{place} contains {some(near, 6)}" if inside else f"{place} contains no data"
        hint = "correct the path, or name a known data set, such as digits"
        if len(near) == 1:
            hint = f"use {shlex.quote(str(parent / near[0]))}, or name a known data set, such as digits"
        return DataError("no such file or folder", where=data, why=why, hint=hint)
    names = ("digits", "planted", *named.NAMED)
    near = nearest(data, (*names, *_data_in(Path())))
    why = (
        f"nearest: {', '.join(near)}"
        if near
        else f"there is no such path here; data sets with a name are {', '.join(names)}"
    )
    return UsageError(f"unknown data set '{data}'", why=why, hint="give a folder of images, or the name of a data set")


def _data_in(folder: Path) -> list[str]:
    """Names of possible data in a folder."""
    try:
        found = [one for one in folder.iterdir() if not one.name.startswith(".")]
        kinds = (".csv", ".tar", ".zip", ".tar.gz")
        return sorted(one.name for one in found if one.is_dir() or one.name.lower().endswith(kinds))
    except OSError:
        return []
