"""Find the images to label, with the labels that folders or a table give them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vitral.data import load
from vitral.data.dataset import DataSet
from vitral.data.files import Folder as Files
from vitral.data.files import FolderFetch
from vitral.data.label_table import CHECKED, fits_a_cell
from vitral.data.sources.table import EXTENSIONS, Table
from vitral.data.spellings import nfc
from vitral.data.targets import ANY
from vitral.errors import DataError, UsageError
from vitral.inference.sources import Archive, Folder, ListFile, Shards, find
from vitral.wording import count, some

MOST_IMAGES = 200_000
"""Images of one session: the page keeps a few bytes of each."""


@dataclass(frozen=True)
class Found:
    """An image of the data."""

    path: str
    """Absolute."""
    label: str = ""
    given: str = ""
    checked: str = "no"
    split: str = ""
    group: str = ""


def collect(data: Sequence[str], *, labels: bool = True) -> tuple[list[Found], list[str]]:
    """Return the images of folders, tables, lists and files in their order, each once, and notes on what is left out.

    Without `labels`, images come in unlabeled. Raises `DataError` for data without images, for more than `MOST_IMAGES`
    and for archives, whose images a table cannot name; the errors of `find`.
    """
    found: dict[str, Found] = {}
    notes: list[str] = []
    for one in data:
        images, own = of_table(one) if is_table(one) else _of_source(one, labels)
        notes += own
        for image in images:
            found.setdefault(image.path, image if labels else replace(image, label="", given="", checked="no"))
    kept = [image for path, image in found.items() if fits_a_cell(path)]
    if left := [path for path in found if not fits_a_cell(path)]:
        are = "is" if len(left) == 1 else "are"
        notes.append(f"{count(len(left), 'image')} {are} left out, because no table can hold the name: {some(left)}")
    if not kept:
        raise DataError("no images to label", where=", ".join(data) or None, hint="vitral label FOLDER")
    if len(kept) > MOST_IMAGES:
        why = f"{len(kept):,} images, and the page shows at most {MOST_IMAGES:,}"
        raise DataError("too many images", where=", ".join(data), why=why, hint="label one of the folders at a time")
    return kept, notes


def is_table(path: str) -> bool:
    """True for a file with a table's extension."""
    return path.lower().endswith(EXTENSIONS) and os.path.isfile(path)


def of_table(path: str) -> tuple[list[Found], list[str]]:
    """Return the images of a table, also those without a label."""
    folder, name = os.path.split(os.path.abspath(path))
    images = []
    for row in Table(Files(folder), name, path, ANY).entries():
        checked = row.get("checked", "")
        images.append(
            Found(
                os.path.normpath(os.path.join(folder, row["file"])),
                nfc(row["label"]),
                nfc(row.get("given", row["label"])),
                checked if checked in CHECKED else "no",
                row["split"],
                row["group"],
            )
        )
    return images, []


def _of_source(path: str, labels: bool) -> tuple[list[Found], list[str]]:
    (source,) = find([path], "label")
    if isinstance(source, Archive | Shards):
        why = "the table of labels names files"
        raise UsageError("images in an archive cannot be labeled", where=path, why=why, hint="unpack it first")
    if isinstance(source, ListFile):
        return [Found(os.path.abspath(one)) for _, one in source], list(source.notes)
    if isinstance(source, str):
        return [Found(os.path.abspath(source))], []
    known = _folder_labels(path) if labels else {}
    paths = [(os.path.join(path, one), known.get(one, ("", ""))) for one in _images(source)]
    return [Found(os.path.abspath(one), label, label, split=split) for one, (label, split) in paths], list(source.notes)


def _images(source: Folder) -> list[str]:
    """Return the images of a folder, relative to it, in natural order."""
    return [os.path.relpath(one, source.where) for one in source.paths]


def _folder_labels(path: str) -> dict[str, tuple[str, str]]:
    """Return class and split by relative path, where the folders of the data name classes; else nothing."""
    try:
        dataset = load(path, download=False)
    except (DataError, UsageError):  # folders that name no classes
        return {}
    if not dataset.targets.one_class or len(dataset.classes) < 2:
        return {}
    named = len(dataset.splits) > 1
    return {
        file: (dataset.classes[label], split if named else "")
        for split, files in _files(dataset).items()
        for file, label in zip(files, dataset.splits[split].labels.tolist(), strict=True)
    }


def _files(dataset: DataSet) -> dict[str, Sequence[str]]:
    """Return the paths of each split, relative to the folder; none of splits that are no files of a folder."""
    fetches = {split: images.fetch for split, images in dataset.splits.items()}
    return {split: fetch.paths for split, fetch in fetches.items() if isinstance(fetch, FolderFetch)}
