"""Images with or without labels, for pretraining: class folders if there are any, else every image of the folder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitral.data.archives import ARCHIVES, open_files
from vitral.data.dataset import DataSet
from vitral.data.files import Files, Folder, build_dataset, is_image, other_files
from vitral.data.sources import load
from vitral.data.sources.archive import stem
from vitral.data.sources.layout import NoLabelsError
from vitral.data.splits import with_validation
from vitral.data.targets import ONE_CLASS, TARGETS
from vitral.errors import DataError

UNLABELED = "unlabeled"
"""The one class of images without labels."""


def load_images(data: str | Path, *, root: str | Path = "data") -> DataSet:
    """Load images as `load` does; without class folders, with a single one, or with classes of which no image can be
    held out, as one class `UNLABELED`.

    Raises the errors of `load`, except for missing labels.
    """
    try:
        dataset = load(data, root=root, tasks=[name for name, one in TARGETS.items() if not one.sequence])
    except NoLabelsError:
        return _all_images(str(data))
    if not dataset.targets.one_class:
        return _without_labels(dataset)
    if len(dataset.classes) > 1 and not _can_hold_out(dataset):
        return replace(_without_labels(dataset), notes=(*dataset.notes, NOT_HELD_OUT))
    return _all_images(str(data)) if len(dataset.classes) < 2 and _has_files(str(data)) else dataset


def _without_labels(dataset: DataSet) -> DataSet:
    """Drop several labels or numbers an image, which are not used to monitor features."""
    splits = {name: replace(split, labels=np.zeros(len(split), np.int64)) for name, split in dataset.splits.items()}
    return replace(dataset, classes=(UNLABELED,), splits=splits, targets=ONE_CLASS, reason="")


NOT_HELD_OUT = "labels are not used: no class has an image to hold out, as where every file is a class"
"""Note on labels that would measure no features."""


def _can_hold_out(dataset: DataSet) -> bool:
    """True if there are labeled images to measure features on, or some can be cut from train."""
    try:
        with_validation(dataset)
    except DataError:
        return False
    return True


def _has_files(data: str) -> bool:
    there = os.path.expanduser(data)
    return os.path.isdir(there) or (os.path.isfile(there) and there.lower().endswith(ARCHIVES))


def _all_images(data: str) -> DataSet:
    """Every image of a folder or an archive, in the order of their paths, in one split and one class."""
    there = os.path.expanduser(data)
    folder = os.path.isdir(there)
    files: Files = Folder(there) if folder else open_files(there)
    name = (os.path.basename(os.path.abspath(there)) or "data") if folder else stem(there)
    images = [path for path in files.paths if is_image(path)]
    notes = [*files.notes, *other_files([path for path in files.paths if not is_image(path)])]
    rows = {"train": (images, [UNLABELED] * len(images))}
    return replace(build_dataset(files, name, files.where, rows, notes), source=data)
