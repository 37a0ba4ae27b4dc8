"""Class folders: CLASS/…/1.jpg, or SPLIT/CLASS/…/1.jpg, in any number of single folders around them."""

from __future__ import annotations

from collections import Counter

from vitral.data.dataset import SPLIT_NAMES, DataSet, shown, some
from vitral.data.files import Files, common_folders, is_picture, kinds, labelled
from vitral.errors import DataError


def read(files: Files, name: str) -> DataSet | None:
    """The pictures by class folder; None where no folders tell them apart."""
    pictures = [path for path in files.paths if is_picture(path)]
    if not pictures:
        return None
    start = len(_wrapping(pictures))
    rows, strays = _sort(pictures, start, files.where)
    if not rows:
        return None
    has_table = any(path.lower().endswith((".csv", ".tsv")) for path in files.paths)
    if has_table and len({label for _, labels in rows.values() for label in labels}) < 2:
        return None  # one folder of pictures beside a table that says what they show
    notes = [*files.notes]
    if strays:
        notes.append(f"{len(strays):,} pictures outside class folders are not used: {some(strays)}")
    if len(pictures) < len(files.paths):
        others = [path for path in files.paths if not is_picture(path)]
        notes.append(f"{len(others):,} other files are not used: {kinds(others)}")
    return labelled(files, name, files.where, rows, notes)


def _wrapping(pictures: list[str]) -> str:
    """The folders, "a/b/", that wrap everything: each alone, without pictures of its own and not named like a split."""
    wrapping = ""
    for part in common_folders(pictures):
        inner = f"{wrapping}{part}/"
        if part.lower() in SPLIT_NAMES or any("/" not in path[len(inner) :] for path in pictures):
            break
        wrapping = inner
    return wrapping


def _sort(pictures: list[str], start: int, where: str) -> tuple[dict[str, tuple[list[str], list[str]]], list[str]]:
    """Paths and class names for every split, and the pictures in no class folder; `start` skips the wrapping."""
    tops = _split_folders(pictures, start)
    meant = {top: SPLIT_NAMES[top.lower()] for top in tops}
    if len(set(meant.values())) < len(meant):
        raise DataError(
            f"two folders for one split: {', '.join(sorted(tops))}",
            where=where,
            why="they mean the same",
            hint="put their pictures into one of them",
        )
    rows: dict[str, tuple[list[str], list[str]]] = {}
    strays = []
    for path in pictures:
        parts = path[start:].split("/")
        folders = parts[:-1] if tops else ["train", *parts[:-1]]
        split = meant.get(folders[0]) if tops and folders else "train"
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


def _split_folders(pictures: list[str], start: int) -> set[str]:
    """The top folders that are splits: named so, with class folders inside, and together holding most pictures.

    So a class that is called "train" (the vehicle) beside other classes stays a class.
    """
    nested = Counter(path[start : path.index("/", start)] for path in pictures if path.count("/", start) > 1)
    direct = Counter(path[start : path.index("/", start)] for path in pictures if path.count("/", start) == 1)
    tops = {top for top, n in nested.items() if top.lower() in SPLIT_NAMES and n > direct[top]}
    return tops if 2 * sum(nested[top] for top in tops) > len(pictures) else set()
