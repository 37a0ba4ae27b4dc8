"""Write findings as a table, and move the files of findings out of a data set, never deleting or replacing a file.

write_found(found, path)                       one row per finding
move_found(found, dataset, folder) -> int      to FOLDER/KIND/…; FOLDER/moved.csv has the old and the new paths
move_back(folder) -> int                       the files of FOLDER/moved.csv to their old paths
"""

from __future__ import annotations

import csv
import io
import os
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from vitral.atomic import write_text
from vitral.data.checks.findings import Found
from vitral.data.dataset import DataSet, relative_names
from vitral.errors import UsageError
from vitral.filesystem import relative

MOVED = "moved.csv"
"""Table of the moved files, in the folder that they are in now."""


def write_found(found: Sequence[Found], path: Path) -> None:
    """Write one row per finding, with the file relative to the table."""
    text, folder = io.StringIO(), path.absolute().parent
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["file", "finding", "split", "label", "why", "like"])
    for one in found:
        place = one.place
        writer.writerow([_seen_from(folder, place.name), one.kind, place.split, place.label, one.why, one.like])
    write_text(path, text.getvalue())


def _seen_from(folder: Path, name: str) -> str:
    return (relative(name, folder) if os.path.exists(name) else None) or name


def check_movable(dataset: DataSet, folder: Path) -> None:
    """Raise `UsageError` unless the data are a folder of files, and the target is outside of it."""
    data = os.path.expanduser(dataset.source)
    if not os.path.isdir(data) or not any(os.path.isfile(name) for name in _first_names(dataset)):
        why = "files can be moved out of a folder of images only"
        raise UsageError(f"cannot move files of {dataset.source}", why=why, hint="list them: --write findings.csv")
    inside = Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(data))
    if inside:
        raise UsageError("the folder of --move-to is inside the data", where=folder, hint="choose a folder elsewhere")
    if folder.exists() and not (folder.is_dir() and ((folder / MOVED).exists() or not any(folder.iterdir()))):
        raise UsageError("the folder of --move-to has other files", where=folder, hint="choose a new folder")


def _first_names(dataset: DataSet) -> list[str]:
    return [name for split in dataset.splits.values() for name in split.names[:50]]


def move_found(found: Sequence[Found], dataset: DataSet, folder: Path) -> int:
    """Move the files of findings to FOLDER/KIND/…, each once, by its first finding. Returns how many were moved.

    The table is written before the first file is moved, so that `move_back` also mends a move that broke off.
    """
    short = {name: relative_names(split.names) for name, split in dataset.splits.items()}
    planned = dict[str, Path]()
    taken = set[Path]()
    for one in found:
        place = one.place
        if place.name in planned or not os.path.isfile(place.name):
            continue
        target = folder / one.kind / PurePosixPath(short[place.split][place.index])
        planned[place.name] = _free(target, taken)
        taken.add(planned[place.name])
    rows = [(os.path.abspath(name), target.relative_to(folder).as_posix()) for name, target in planned.items()]
    _write_moved(folder, [*_read_moved(folder), *rows])
    for name, target in planned.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(name, target)
    return len(planned)


def _free(target: Path, taken: set[Path]) -> Path:
    """Return the path, or one with a number if there is such a file."""
    free, number = target, 2
    while free in taken or os.path.lexists(free):
        free = target.with_name(f"{target.stem} ({number}){target.suffix}")
        number += 1
    return free


def move_back(folder: Path) -> int:
    """Move the files of FOLDER/moved.csv to their old paths, and return how many.

    A file whose old path is taken again gets a number behind its name.
    """
    if not (folder / MOVED).is_file():
        raise UsageError(f"there is no {MOVED}", where=folder, hint="name the folder of --move-to")
    rows = _read_moved(folder)
    waiting = [(Path(old), folder / new) for old, new in rows if (folder / new).is_file()]
    for old, new in waiting:
        old.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(new, _free(old, set()))
    _write_moved(folder, [])
    return len(waiting)


def _read_moved(folder: Path) -> list[tuple[str, str]]:
    if not (folder / MOVED).is_file():
        return []
    with open(folder / MOVED, newline="", encoding="utf-8") as file:
        return [(row["old"], row["new"]) for row in csv.DictReader(file)]


def _write_moved(folder: Path, rows: Sequence[tuple[str, str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["old", "new"])
    writer.writerows(rows)
    write_text(folder / MOVED, text.getvalue())
