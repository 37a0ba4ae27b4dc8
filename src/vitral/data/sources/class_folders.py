"""Class folders: CLASS/…/1.jpg, or SPLIT/CLASS/…/1.jpg, in any number of single folders around them."""

from __future__ import annotations

from collections import Counter

from vitral.data.dataset import SPLIT_NAMES, DataSet, shown, some
from vitral.data.files import Files, build_dataset, common_folders, count_extensions, is_image
from vitral.errors import DataError


def read(files: Files, name: str) -> DataSet | None:
    """Read images by class folder; None if there are no class folders."""
    images = [path for path in files.paths if is_image(path)]
    if not images:
        return None
    start = len(_wrapping(images))
    rows, strays = _sort(images, start, files.where)
    if not rows:
        return None
    has_table = any(path.lower().endswith((".csv", ".tsv")) for path in files.paths)
    if has_table and len({label for _, labels in rows.values() for label in labels}) < 2:
        return None  # one folder of images with a table that labels them
    notes = [*files.notes]
    if strays:
        notes.append(f"{len(strays):,} images outside class folders are not used: {some(strays)}")
    if len(images) < len(files.paths):
        others = [path for path in files.paths if not is_image(path)]
        notes.append(f"{len(others):,} other files are not used: {count_extensions(others)}")
    return build_dataset(files, name, files.where, rows, notes)


def _wrapping(images: list[str]) -> str:
    """The single folders, "a/b/", around all images: without images directly inside, and not named like a split."""
    wrapping = ""
    for part in common_folders(images):
        inner = f"{wrapping}{part}/"
        if part.lower() in SPLIT_NAMES or any("/" not in path[len(inner) :] for path in images):
            break
        wrapping = inner
    return wrapping


def _sort(images: list[str], start: int, where: str) -> tuple[dict[str, tuple[list[str], list[str]]], list[str]]:
    """Return paths and class names per split, and the images outside class folders; `start` skips the wrapping."""
    tops = _split_folders(images, start)
    split_of = {top: SPLIT_NAMES[top.lower()] for top in tops}
    if len(set(split_of.values())) < len(split_of):
        raise DataError(
            f"two folders for one split: {', '.join(sorted(tops))}",
            where=where,
            why="their names mean the same split",
            hint="put their images into one of them",
        )
    rows: dict[str, tuple[list[str], list[str]]] = {}
    strays = []
    for path in images:
        parts = path[start:].split("/")
        folders = parts[:-1] if tops else ["train", *parts[:-1]]
        split = split_of.get(folders[0]) if tops and folders else "train"
        if split and len(folders) > 1:
            paths, labels = rows.setdefault(split, ([], []))
            paths.append(path)
            labels.append(shown(folders[1]))
        else:
            strays.append(path)
    classes = {label.lower() for _, labels in rows.values() for label in labels}
    if not tops and classes <= SPLIT_NAMES.keys():
        return {}, strays  # train/1.jpg, test/2.jpg: splits without classes
    return rows, strays


def _split_folders(images: list[str], start: int) -> set[str]:
    """The top folders that are splits: by name, with class folders inside, and together containing most images.

    So a class called "train" (the vehicle) among other classes stays a class.
    """
    nested = Counter(path[start : path.index("/", start)] for path in images if path.count("/", start) > 1)
    direct = Counter(path[start : path.index("/", start)] for path in images if path.count("/", start) == 1)
    tops = {top for top, n in nested.items() if top.lower() in SPLIT_NAMES and n > direct[top]}
    return tops if 2 * sum(nested[top] for top in tops) > len(images) else set()
