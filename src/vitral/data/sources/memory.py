"""Data of this process: torch data sets, arrays, DataFrames and Hugging Face data sets become one `DataSet`.

(images, labels)                 arrays of all images and all labels
[(image, label), …]              a torch Dataset, or any sequence, of pairs or of {"image": …, "label": …}
table                            a DataFrame with paths: read as a .csv with the same columns
data set with `features`         of Hugging Face, which need not be installed
{"train": …, "val": …}           any of these by split
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Subset

from vitral import activity
from vitral.data.dataset import (
    FILE_COLUMNS,
    LABEL_COLUMNS,
    DataSet,
    Numbered,
    Split,
    case_notes,
    in_order,
    split_name,
)
from vitral.data.files import Folder
from vitral.data.images.decode import read_image
from vitral.data.images.levels import Levels, Limits, array_levels
from vitral.data.sources.table import Table
from vitral.data.tables_in_memory import EXAMPLES, columns_of, is_examples, why_no_examples
from vitral.data.targets import ANY, Labeling
from vitral.data.targets.classes import index_labels
from vitral.errors import DataError, ImageError, UsageError, type_of
from vitral.model.own import HERE, is_own, own_part
from vitral.wording import count, some


def accepts(data: str) -> bool:
    """True for the name of data that `vitral.train` got as an object."""
    return data.startswith(f"{HERE}:data_") and is_own(data)


def load(data: str, *, root: Path, download: bool, wanted: Labeling = ANY) -> DataSet:
    """Load the object of this process that has this name. Raises `UsageError` in another process."""
    return of_memory(own_part("data", data), wanted)


def of_memory(data: object, wanted: Labeling = ANY) -> DataSet:
    """Return labeled images of this process as a data set. Raises `DataError` or `UsageError` for other objects."""
    if isinstance(data, DataSet):
        return data
    splits = _splits(data)
    where = f"{type(data).__name__} in memory"
    if all(_is_table(one) for one in splits.values()):
        return _of_tables(splits, where, wanted)
    parts = {split: _part(one, f"{where}, {split}") for split, one in splits.items()}
    names = dict.fromkeys(part.classes for part in parts.values() if part.classes is not None)
    if len(names) > 1:
        raise DataError("the splits have other classes", where=where, why="; ".join(some(one, 5) for one in names))
    texts = {split: [str(label) for label in part.labels] for split, part in parts.items()}
    if classes := next(iter(names), None):
        labels = {split: _numbers(part.labels, classes, where) for split, part in parts.items()}
    else:
        classes, labels = index_labels(texts, where)
    name = "data" if isinstance(data, Mapping | Sequence) else type(data).__name__
    made = {
        split: Split(Numbered(f"{name}/{split}", len(part.labels)), labels[split], part.fetch)
        for split, part in parts.items()
    }
    notes = [note for part in parts.values() for note in part.notes]
    return DataSet(name, classes, in_order(made), where, (*notes, *case_notes(classes)))


def _splits(data: object) -> dict[str, object]:
    """Return the data by split: "train" for data without splits."""
    if not isinstance(data, Mapping) or _is_table(data):
        return {"train": data}
    named = {split_name(str(name)): one for name, one in data.items()}
    if None in named or len(named) < len(data) or not named:
        what = f"the splits {some([repr(str(name)) for name in data])} are not clear"
        raise UsageError(what, why="a dict has data by split", hint='{"train": …, "val": …, "test": …}')
    return {str(split): one for split, one in named.items()}


def _is_table(data: object) -> bool:
    """True for columns by name of which one holds paths; a data set of Hugging Face decodes images itself."""
    columns = None if hasattr(data, "features") else columns_of(data)
    return columns is not None and any(name.lower() in FILE_COLUMNS for name in columns)


def _of_tables(tables: Mapping[str, Any], where: str, wanted: Labeling) -> DataSet:
    """Read tables as one .csv in the current folder, to which their paths are relative."""
    text, several = io.StringIO(), len(tables) > 1
    writer, header = csv.writer(text), columns_of(next(iter(tables.values()))) or []
    writer.writerow([*header, *(["split"] if several else [])])
    for split, table in tables.items():
        if columns_of(table) != header:
            raise DataError("the tables of the splits have other columns", where=where, why=some(header))
        columns = [[_cell(one, where) for one in table[name]] for name in header]
        writer.writerows([*row, *([split] if several else [])] for row in zip(*columns, strict=True))
    files = _InMemory(text.getvalue())
    return replace(Table(files, _TABLE, where, wanted).dataset("data"), source=where)


_TABLE = "table.csv"


class _InMemory(Folder):
    """The files of the current folder and one table, which is not on the disk."""

    def __init__(self, text: str):
        super().__init__(os.curdir)
        self.prefix, self.text = "", text

    def read(self, path: str, limit: int) -> bytes:
        return self.text.encode() if path == _TABLE else super().read(path, limit)


def _cell(value: object, where: str) -> object:
    """Return a cell of a table as the csv module writes it. Raises `DataError` for an image."""
    value = value.as_py() if hasattr(value, "as_py") else value
    if isinstance(value, Image.Image | np.ndarray | Tensor | bytes):
        hint = "(list(table['image']), table['label']), with the names of your columns"
        raise DataError("a table has images instead of their paths", where=where, why=type_of(value), hint=hint)
    return os.fspath(value) if isinstance(value, os.PathLike) else value


@dataclass(frozen=True, eq=False)
class _Part:
    """The images of one split."""

    labels: Sequence[int | str]
    fetch: ItemFetch
    classes: tuple[str, ...] | None = None
    """Names of the labels that are numbers, if they are known."""
    notes: tuple[str, ...] = ()


def _part(data: Any, where: str) -> _Part:
    if hasattr(data, "features") and columns_of(data) is not None:
        return _of_hugging_face(data, where)
    if _is_pair_of_arrays(data):
        images, labels = data
        if len(images) != len(labels):
            raise DataError(f"{len(images):,} images and {len(labels):,} labels", where=where)
        return _Part(_checked_labels(labels, where), ItemFetch(images, None, _levels(images, where)))
    columns = None if isinstance(data, Dataset) else columns_of(data)
    if columns is not None and not isinstance(data, Mapping):
        why = f"its columns are {some(columns, 8)}"
        raise DataError("no column of image files", where=where, why=why, hint="rename the columns to path and label")
    if not is_examples(data):
        raise UsageError(f"{type_of(data)} is not a data set", why=why_no_examples(data), hint=EXAMPLES)
    if not len(data):
        raise DataError("no images", where=where)
    image, label = _keys(data[0], where)
    fetch = ItemFetch(data, image)
    names = getattr(data.dataset if isinstance(data, Subset) else data, "classes", None)
    classes = tuple(map(str, names)) if isinstance(names, list | tuple) else None
    labels = _checked_labels(_labels(data, label), where)
    return _Part(labels, fetch, classes if isinstance(labels[0], int) else None, _random(fetch, len(labels)))


def _is_pair_of_arrays(data: object) -> bool:
    if not isinstance(data, tuple | list) or len(data) != 2:
        return False
    first, second = data
    images = isinstance(first, np.ndarray | Tensor) and first.ndim in (3, 4)
    listed = isinstance(first, list) and bool(first) and not isinstance(first[0], int | float)
    return (images or listed) and hasattr(second, "__len__") and not isinstance(second, str)


def _keys(item: object, where: str) -> tuple[object, object]:
    """Return the keys of image and label in an example."""
    if isinstance(item, Mapping):
        lower = {str(name).lower(): name for name in item}
        image = next((lower[name] for name in (*FILE_COLUMNS, *_PIXELS) if name in lower), None)
        label = next((lower[name] for name in LABEL_COLUMNS if name in lower), None)
        if image is not None and label is not None:
            return image, label
    elif isinstance(item, tuple | list) and len(item) >= 2:
        return 0, 1
    got = f"a dict with {some(list(map(str, item)))}" if isinstance(item, Mapping) else type_of(item)
    raise DataError("an example is not (image, label)", where=where, why=f"the first one is {got}", hint=EXAMPLES)


_PIXELS = ("pixel_values", "pixels", "x")


def _labels(data: Any, key: Any) -> Sequence[object]:
    """Return the labels of all examples: as the data set lists them, if they are its own, otherwise by reading it."""
    if isinstance(data, Subset):
        return [_labels(data.dataset, key)[i] for i in data.indices]
    for name in ("targets", "labels"):
        listed = getattr(data, name, None)
        unchanged = getattr(data, "target_transform", None) is None
        if unchanged and isinstance(listed, list | tuple | np.ndarray | Tensor) and len(listed) == len(data):
            ends = (0, len(data) - 1)
            if all(_plain(listed[i]) == _plain(data[i][key]) for i in ends):
                return list(listed.tolist() if isinstance(listed, np.ndarray | Tensor) else listed)
    activity.tell(f"reading the labels of {len(data):,} examples")
    return [data[i][key] for i in range(len(data))]


def _plain(label: Any) -> Any:
    """Return a label as a number or text of Python."""
    return label.item() if hasattr(label, "item") and np.ndim(label) == 0 else label


def _checked_labels(labels: Any, where: str) -> list[int | str]:
    """Return labels as whole numbers or texts. Raises `DataError` for others, which are of another task."""
    found = [_plain(label) for label in (labels.tolist() if hasattr(labels, "tolist") else labels)]
    found = [int(label) if isinstance(label, bool) else label for label in found]
    kinds = {type(label) for label in found}
    if not found or kinds - {int, str} or len(kinds) > 1:
        odd = next(
            (f"{label!r:.40}" for label in found if type(label) not in (int, str)), some(sorted(map(str, kinds)))
        )
        why = f"labels are class numbers or names, and there is {odd}" if found else "there are none"
        hint = "for numbers or several labels per image, a DataFrame with paths and columns"
        raise DataError("labels cannot be read", where=where, why=why, hint=hint)
    if negative := [label for label in found if isinstance(label, int) and label < 0]:
        raise DataError(f"{count(len(negative), 'label')} below 0", where=where, why="-1 often stands for no label")
    return found


def _numbers(labels: Sequence[int | str], classes: Sequence[str], where: str) -> np.ndarray:
    """Return labels that are numbers of classes, (n,) int64."""
    numbers = np.array([int(label) for label in labels], np.int64)
    if numbers.max() >= len(classes):
        raise DataError(f"label {numbers.max()} of {len(classes)} classes", where=where, why=some(classes, 5))
    return numbers


def _of_hugging_face(data: Any, where: str) -> _Part:
    """Read a data set whose features say which column holds images and which holds classes."""
    features: Mapping[str, object] = data.features
    image = _column(features, "Image", FILE_COLUMNS)
    label = _column(features, "ClassLabel", LABEL_COLUMNS)
    if image is None or label is None:
        what = f"no column of {'images' if image is None else 'classes'}"
        hint = "rename_column(…, 'image') and rename_column(…, 'label')"
        raise DataError(what, where=where, why=f"there are {some(list(features))}", hint=hint)
    names = getattr(features[label], "names", None)
    labels = _checked_labels(list(data[label]), where)
    return _Part(labels, ItemFetch(data, image), tuple(names) if names else None)


def _column(features: Mapping[str, object], kind: str, names: Sequence[str]) -> str | None:
    """Return the first column of this type of feature, otherwise one with a usual name."""
    typed = [name for name, one in features.items() if type(one).__name__ == kind]
    named = [name for name in features if name.lower() in names]
    return next(iter((*typed, *named)), None)


def _levels(images: object, where: str) -> Levels | None:
    """Return black and white of an array of floats; None for others."""
    if isinstance(images, Tensor):
        images = images.detach().cpu().numpy()
    if not isinstance(images, np.ndarray) or images.dtype.kind != "f":
        return None
    try:
        return array_levels(Limits.of([images]), None)
    except ValueError as error:
        hint = "uint8, or floats from 0 to 1 before standardization"
        raise DataError("images cannot be read", where=where, why=str(error), hint=hint) from error


@dataclass(frozen=True, eq=False)
class ItemFetch:
    """Fetch of an image of an example: `data[i][key]`, or `data[i]` without a key."""

    data: Any
    key: object
    levels: Levels | None = None

    def __call__(self, i: int) -> bytes | np.ndarray:
        item = self.data[i]
        return _raw(item if self.key is None else item[self.key], self.levels)


def _raw(image: object, levels: Levels | None) -> bytes | np.ndarray:
    """Return an encoded file, or pixels uint8 (H, W, C). Raises `ValueError` or `OSError` for other objects."""
    if isinstance(image, Mapping) and {"bytes", "path"} & image.keys():  # an image that Hugging Face has not decoded
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str | os.PathLike):
        return Path(image).read_bytes()
    if isinstance(image, bytes):
        return image
    if isinstance(image, Tensor):
        pixels = image.detach().cpu().numpy()
        image = np.moveaxis(pixels, 0, 2) if pixels.ndim == 3 else pixels
    if isinstance(image, np.ndarray) and image.dtype.kind == "f":
        levels = levels or array_levels(Limits.of([image]), None)
    if not isinstance(image, np.ndarray | Image.Image):
        raise ValueError(f"{type_of(image)} is not an image")
    return read_image(image, levels=levels)


_COMPARED = 16
"""Images that are read twice, to find random transforms."""


def _random(fetch: ItemFetch, images: int) -> tuple[str, ...]:
    """Return a note if the data set changes its images at random; a flip alone leaves half of them as they are."""
    try:
        same = all(_equal(fetch(i), fetch(i)) for i in range(min(images, _COMPARED)))
    except (ImageError, OSError, ValueError):  # reported by name when all images are read
        return ()
    if same:
        return ()
    return ("the data set changes its images at random, and vitral keeps them as read: pass the transform as augment=",)


def _equal(first: bytes | np.ndarray, second: bytes | np.ndarray) -> bool:
    return np.array_equal(np.asarray(first), np.asarray(second))
