"""How labelled pictures lie in a folder or an archive: one table, tried in order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vitral.data.dataset import DataSet, some
from vitral.data.files import Files, is_picture, kinds
from vitral.data.sources import class_folders, idx, synset_names, table
from vitral.errors import DataError

LAYOUTS: Mapping[str, Callable[[Files, str], DataSet | None]] = {
    "idx": idx.read,
    "synset names": synset_names.read,
    "class folders": class_folders.read,
    "table": table.read,
}
"""Each reads files that lie its way, and gives None for others. Class folders come before a table, so a stray .csv
beside them changes nothing; type the .csv itself to use it."""


def read_layout(files: Files, name: str) -> DataSet:
    """The pictures among these files by the first layout that fits; `DataError` where none does."""
    for read in LAYOUTS.values():
        if (dataset := read(files, name)) is not None:
            return dataset
    raise _refusal(files)


def _refusal(files: Files) -> DataError:
    if not files.paths:
        return DataError(
            "no files", where=files.where, why="empty, or only hidden files", hint="wanted: DATA/CLASS/1.jpg"
        )
    pictures = [path for path in files.paths if is_picture(path)]
    if not pictures:
        return DataError(
            "no pictures",
            where=files.where,
            why=f"{len(files.paths):,} files: {kinds(files.paths)}",
            hint="JPEG, PNG, WebP, BMP, GIF, TIFF and PPM are read, from folders named after the classes",
        )
    return DataError(
        "pictures without class folders",
        where=files.where,
        why=f"nothing says what the {len(pictures):,} pictures show (first: {some(pictures, 1)[:200]})",
        hint="one folder for each class (DATA/cat/1.jpg), or a .csv with the columns file,label",
    )
