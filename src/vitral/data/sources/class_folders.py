"""Class folders: CLASS/…/1.jpg, with SPLIT/ above or below the classes, in any number of single folders around them.

A name that says split is a split, and folders that hold the same sub-folders are splits: such folders never become
classes without a word. Data that can be read in two ways are refused with both.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vitral.data.dataset import DataSet, split_name
from vitral.data.files import UNOPENED, Files, build_dataset, common_folders, is_image, is_like_image, other_files
from vitral.data.spellings import nfc
from vitral.data.targets import ANY, Labeling
from vitral.errors import DataError
from vitral.wording import shown, some

Rows = dict[str, tuple[list[str], list[str]]]
"""Paths and class names of every split."""


def read(files: Files, name: str, wanted: Labeling = ANY) -> DataSet | None:
    """Read images by class folder; None if there are no class folders. `DataError` if it is unclear what they are."""
    images = [path for path in files.paths if is_image(path)]
    if not images:
        return None
    tree = _Tree(images, len(_wrapping(images)), files.where)
    reading = _Reading(tree, wanted.class_folders)
    if not reading.rows:
        return None
    has_table = any(path.lower().endswith((".csv", ".tsv")) for path in files.paths)
    if has_table and len({label for _, labels in reading.rows.values() for label in labels}) < 2:
        return None  # one folder of images with a table that labels them
    notes = [*files.notes, *reading.notes]
    if len(images) < len(files.paths):
        notes += other_files([path for path in files.paths if not is_image(path)])
    used = sum(len(paths) for paths, _ in reading.rows.values())
    return build_dataset(
        files, name, files.where, reading.rows, notes, unused=sum(map(is_like_image, files.paths)) - used
    )


def _wrapping(images: list[str]) -> str:
    """The single folders, "a/b/", around all images: most images in folders below, and not named like a split."""
    wrapping = ""
    for part in common_folders(images):
        inner = f"{wrapping}{part}/"
        if split_name(part) or 2 * sum("/" not in path[len(inner) :] for path in images) >= len(images):
            break
        wrapping = inner
    return wrapping


class _Tree:
    """Images by their folders below the wrapping ones."""

    def __init__(self, images: Sequence[str], start: int, where: str):
        self.where = where
        self.folders = {path: tuple(path[start:].split("/")[:-1]) for path in images}
        self.nested = Counter(parts[0] for parts in self.folders.values() if len(parts) > 1)
        self.direct = Counter(parts[0] for parts in self.folders.values() if len(parts) == 1)
        self.inside: dict[str, set[str]] = defaultdict(set)
        """Top folder → its sub-folders with images, in NFC."""
        for path, parts in self.folders.items():
            if len(parts) > 1 and not path.endswith(UNOPENED):
                self.inside[parts[0]].add(nfc(parts[1]))

    @property
    def tops(self) -> list[str]:
        return sorted({*self.nested, *self.direct})

    def is_nested(self, top: str) -> bool:
        """True if most images of a top folder are in its sub-folders."""
        return self.nested[top] > self.direct[top]


@dataclass
class _Reading:
    """The splits and classes of a tree of folders."""

    tree: _Tree
    levels: str
    """As `Labeling.class_folders`."""
    rows: Rows = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        splits = self._split_tops()
        if splits:
            self._read_below(splits)
        elif self.levels == "auto" and self._splits_are_below():
            self._read_above()
        else:
            self._read_classes()

    # ------------------------------------------------------------ which folders are splits

    def _split_tops(self) -> dict[str, str]:
        """Top folders that are splits → split: by name, with class folders inside, and with more images in them than
        in folders of other names. So a class called "train" (the vehicle) among other classes stays a class. Refuses
        folders that look like splits without a name of one.
        """
        tree = self.tree
        named = {top: split for top in tree.tops if (split := split_name(top))}
        containers = [top for top in named if tree.is_nested(top)]
        if self.levels == "auto":
            self._refuse_unnamed_splits(containers)
        others = sum(tree.nested[top] + tree.direct[top] for top in tree.tops if top not in named)
        if sum(tree.nested[top] for top in containers) <= others:
            return {}
        splits = {top: named[top] for top in containers}
        if len(set(splits.values())) < len(splits):
            why, hint = "their names mean the same split", "put their images into one of them"
            raise DataError(
                f"two folders for one split: {', '.join(sorted(splits))}", where=tree.where, why=why, hint=hint
            )
        return splits

    def _refuse_unnamed_splits(self, containers: Sequence[str]) -> None:
        """Refuse top folders that share half of their sub-folders, unless their names say that they are splits."""
        tree = self.tree
        nested = [top for top in tree.tops if tree.is_nested(top)]
        unnamed = [top for top in nested if top not in containers]
        if containers:
            classes = set().union(*(tree.inside[top] for top in containers))
            alike = [top for top in unnamed if 2 * len(tree.inside[top] & classes) >= len(tree.inside[top] | classes)]
        elif len(nested) == len(tree.tops) > 1 and not any(map(split_name, set().union(*tree.inside.values()))):
            same = len({frozenset(tree.inside[top]) for top in nested}) == 1
            alike = unnamed if same and len(tree.inside[nested[0]]) > 1 else []
        else:
            alike = []
        if not alike:
            return
        inside = some(sorted(tree.inside[alike[0]]), 4)
        why = (
            f"{some([*containers, *alike], 4)} hold the same folders ({inside}): splits of these, or classes themselves"
        )
        hint = (
            "name the splits train, val and test; or --class-folders top, if these are the classes, or leaf, to take "
            "the innermost folders of all as classes"
        )
        raise DataError("splits or classes?", where=tree.where, why=why, hint=hint)

    def _splits_are_below(self) -> bool:
        """True for CLASS/SPLIT/1.jpg. Refuse images beside such splits."""
        tree = self.tree
        below = {name for top in tree.tops for name in tree.inside[top]}
        if len(tree.tops) < 2 or "train" not in set(map(split_name, below)) or not all(map(split_name, below)):
            return False
        if beside := [path for path, parts in tree.folders.items() if len(parts) == 1]:
            why = f"folders below the classes are splits ({some(sorted(below), 4)}), and {len(beside):,} images are"
            hint = "move them into a split's folder; or --class-folders top, which trains on all of them"
            raise DataError(
                "images of no split", where=tree.where, why=f"{why} beside them: {some(beside, 2)}", hint=hint
            )
        return True

    # ------------------------------------------------------------ what is read

    def _add(self, split: str, path: str, label: str) -> None:
        paths, labels = self.rows.setdefault(split, ([], []))
        paths.append(path)
        labels.append(nfc(shown(label)))

    def _class_of(self, folders: Sequence[str]) -> str:
        return folders[-1 if self.levels == "leaf" else 0]

    def _read_below(self, splits: Mapping[str, str]) -> None:
        """SPLIT/CLASS/…/1.jpg, also SPLIT/SPLIT/CLASS, as archives unpack."""
        skipped = self._skipped(splits)
        unused: dict[str, list[str]] = defaultdict(list)
        for path, parts in self.tree.folders.items():
            top = parts[0] if parts else ""
            inner = parts[1 + skipped.get(top, 0) :]
            if top in splits and inner:
                self._add(splits[top], path, self._class_of(inner))
            else:
                unused[top if split_name(top) else ""].append(path)
        self._without_labels(splits, unused)
        for top, paths in sorted(unused.items()):
            self._note_unused(paths, f"without class folders in {shown(top)}/" if top else "outside class folders")
        named = {top: split for top, split in splits.items() if top.lower() not in ("train", "val", "test")}
        if named:
            pairs = ", ".join(f"{shown(top)} as {split}" for top, split in sorted(named.items()))
            self.notes.append(f"splits by the names of folders: {pairs}")

    def _skipped(self, splits: Mapping[str, str]) -> dict[str, int]:
        """Split's folder → number of single folders inside it that are no classes: repetitions of its name, or folders
        around class folders, as those of train.
        """
        found: dict[str, int] = {}
        classes, around = set[str](), set[str]()
        for top in sorted(splits, key=lambda top: splits[top] != "train"):
            inside = [parts[1:] for parts in self.tree.folders.values() if parts[:1] == (top,) and len(parts) > 1]
            depth = 0
            while len(names := {parts[depth] for parts in inside if len(parts) > depth}) == 1:
                (name,) = names
                deeper = {parts[depth + 1] for parts in inside if len(parts) > depth + 1}
                repeated, wraps = split_name(name) == splits[top], len(deeper) > 1 and nfc(name) not in classes
                if not (repeated or wraps or (deeper and name in around)):
                    break
                around.add(name)
                depth += 1
            found[top] = depth
            classes = classes or {nfc(parts[depth]) for parts in inside if len(parts) > depth}
        return found

    def _without_labels(self, splits: Mapping[str, str], unused: dict[str, list[str]]) -> None:
        """Move images of val and test out of a single folder that is no class of train, as test/unlabeled/1.jpg."""
        classes = set(self.rows.get("train", ([], []))[1])
        for split in [name for name in self.rows if name != "train" and classes]:
            paths, labels = self.rows[split]
            if any(path.endswith(UNOPENED) for path in paths):
                continue  # reported as unreadable
            if len(names := set(labels)) == 1 and not names & classes and len(classes) > 1:
                top = next(top for top, name in splits.items() if name == split)
                unused[top] += paths
                del self.rows[split]

    def _read_above(self) -> None:
        """CLASS/SPLIT/…/1.jpg."""
        for path, parts in self.tree.folders.items():
            if len(parts) > 1:
                self._add(split_name(parts[1]) or "train", path, parts[0])
        loose = [path for path, parts in self.tree.folders.items() if len(parts) < 2]
        self._note_unused(loose)
        below = sorted({parts[1] for parts in self.tree.folders.values() if len(parts) > 1})
        self.notes.append(f"splits are the folders below the classes: {some(below)}")

    def _read_classes(self) -> None:
        """CLASS/…/1.jpg."""
        tree = self.tree
        if all(map(split_name, tree.tops)):
            return  # train/1.jpg, test/2.jpg: splits without classes
        for path, parts in tree.folders.items():
            if parts:
                self._add("train", path, self._class_of(parts))
        self._note_unused([path for path, parts in tree.folders.items() if not parts])
        if odd := [top for top in tree.tops if split_name(top) or top.lower() in UNLABELED]:
            names = some([f"'{shown(name)}'" for name in odd])
            self.notes.append(
                f"{names} {'is' if len(odd) == 1 else 'are'} taken for a class, since most images are in "
                "folders beside it: move it away if it holds a split, or images without labels"
            )
        leaves = {parts for parts in tree.folders.values() if parts}
        deeper = sum(tree.nested.values()) > sum(tree.direct.values())
        if self.levels == "auto" and deeper and len(leaves) > len(tree.tops):
            example = next(parts for parts in sorted(leaves) if len(parts) > 1)
            self.notes.append(
                f"images lie in {len(leaves):,} folders below {len(tree.tops):,} classes ({'/'.join(example)} counts "
                f"as {example[0]}): --class-folders leaf takes the innermost folders as classes"
            )

    def _note_unused(self, paths: Sequence[str], what: str = "outside class folders") -> None:
        if paths:
            one = len(paths) == 1
            verb = "is" if one else "are"
            self.notes.append(f"{len(paths):,} image{'' if one else 's'} {what} {verb} not used: {some(paths)}")


UNLABELED = ("pred", "prediction", "predictions", "predict", "unlabeled", "unlabelled", "seg_pred")
"""Names of folders, in lower case, that usually hold images without labels."""


_SYNSET = re.compile(r"(?:.*/)?(n\d{8})[_.].*")


def read_synset_names(files: Files, name: str) -> DataSet | None:
    """Read images of one folder by the WordNet id at the start of their names: n01440764_tench.JPEG, n01440764_18.JPEG.

    None if a name has no id, if images are in several folders, or if there is only one id.
    """
    images = [path for path in files.paths if is_image(path)]
    labels = [match[1] for match in map(_SYNSET.fullmatch, images) if match]
    folders = {path.rpartition("/")[0] for path in images}
    if len(labels) < len(images) or len(folders) != 1 or len(set(labels)) < 2:
        return None
    notes = [*files.notes, "classes are the WordNet ids at the start of the file names"]
    return build_dataset(files, name, files.where, {"train": (images, labels)}, notes)
