"""Layouts of labeled images in a folder or an archive: one table, tried in order."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence

from vitral.data.dataset import DataSet
from vitral.data.files import Files, count_extensions, is_hidden, is_image
from vitral.data.images.decode import READ
from vitral.data.sources import class_folders, idx, table
from vitral.data.targets import ANY, Labeling
from vitral.errors import DataError
from vitral.wording import shown, some

LAYOUTS: Mapping[str, Callable[..., DataSet | None]] = {
    "idx": idx.read,
    "synset names": class_folders.read_synset_names,
    "class folders": class_folders.read,
    "table": table.read,
}
"""Each reads files in its layout, and returns None for others. Class folders come before a table, so a stray .csv next
to them changes nothing; type the .csv itself to use it."""


class NoLabelsError(DataError):
    """There are images, but nothing labels them."""


def read_layout(files: Files, name: str, wanted: Labeling = ANY) -> DataSet:
    """Read images by the first layout that fits; `DataError` if none does. A table is read as `wanted`."""
    for layout, read in LAYOUTS.items():
        options = {"wanted": wanted} if layout in ("class folders", "table") else {}
        if (dataset := read(files, name, **options)) is not None:
            return dataset
    raise _refusal(files)


def _unlabeled(images: Sequence[str]) -> str:
    """Describe images without labels, with the name of the first one."""
    first = some(images[:1])[:200]
    if len(images) == 1:
        return f"the only image, {first}, has no label"
    return f"the {len(images):,} images have no labels (first: {first})"


def _refusal(files: Files) -> DataError:
    if not files.paths:
        return DataError(
            "no files",
            where=files.where,
            why="it is empty or contains only hidden files",
            hint="put images into one folder per class: DATA/cat/1.jpg",
        )
    images = [path for path in files.paths if is_image(path)]
    if not images:
        why = f"{len(files.paths):,} files: {count_extensions(files.paths)}"
        hint = f"put images ({READ}) into one folder per class: DATA/cat/1.jpg"
        return DataError("no images", where=files.where, why=why, hint=hint)
    return NoLabelsError(
        "images without class folders",
        where=files.where,
        why=_unlabeled(images),
        hint=_how_to_label(files.where),
    )


def _how_to_label(where: str) -> str:
    """Suggest the ways to label images, and the folder above if this one may be one of its classes."""
    ways = (
        f"sort them in the browser with vitral label {shlex.quote(where)}, move them into one folder per class "
        "(DATA/cat/1.jpg), or write a .csv with the columns file,label"
    )
    above = os.path.dirname(os.path.normpath(where)) or "."
    if os.path.isdir(where) and len(_folders_with_images(above)) > 1:
        name = shown(os.path.basename(os.path.normpath(where)))
        return f"if {name} is a class, type the folder above, {shlex.quote(above)}; otherwise {ways}"
    return ways


def _folders_with_images(folder: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(folder) as inside:
        return [one.name for one in inside if one.is_dir() and not is_hidden(one.name) and _has_image(one.path)]
    return []


def _has_image(folder: str) -> bool:
    with contextlib.suppress(OSError), os.scandir(folder) as inside:
        return any(is_image(one.name) and not is_hidden(one.name) for one in itertools.islice(inside, 100))
    return False
