"""What a data set holds, told without opening a picture: a run keeps it, to find out later whether its data changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitral.data.dataset import DataSet, Split, some, within
from vitral.data.files import common_folders


@dataclass(frozen=True)
class Contents:
    """The classes, how many pictures each has, and a digest of every split's names and labels.

    Equal contents are the same pictures under the same labels in the same splits, wherever they lie. What a picture
    shows is not looked at.
    """

    classes: tuple[str, ...]
    pictures: Mapping[str, tuple[int, ...]]
    """Split that the data themselves have → pictures of each class."""
    digests: Mapping[str, str]
    """Split that a run makes of them → digest of its pictures' names and classes, in their order."""

    @classmethod
    def of(cls, dataset: DataSet, parts: DataSet) -> Contents:
        """Of a data set as it lies, and in the `parts` that a run makes of it."""
        count = len(dataset.classes)
        return cls(
            dataset.classes,
            {name: tuple(np.bincount(s.labels, minlength=count).tolist()) for name, s in dataset.splits.items()},
            {name: digest(split, parts.classes) for name, split in parts.splits.items()},
        )

    @property
    def cuts(self) -> bool:
        """Whether the run cuts validation pictures from train: then it has a split more than the data."""
        return len(self.digests) > len(self.pictures)

    def moved(self, now: Contents, split: str) -> bool:
        """Whether training pictures may have become those of another split: of some class it has more in `now`, and
        train fewer.
        """

        def change(split: str, name: str) -> int:
            before, after = (dict(zip(one.classes, one.pictures.get(split, ()), strict=False)) for one in (self, now))
            return after.get(name, 0) - before.get(name, 0)

        return any(change("train", name) < 0 < change(split, name) for name in self.classes)

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the way back."""
        pictures = {split: list(counts) for split, counts in self.pictures.items()}
        return {"classes": list(self.classes), "pictures": pictures, "digests": dict(self.digests)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Contents:
        """Read `to_json`'s form; `KeyError`, `TypeError` or `AttributeError` for anything else."""
        pictures = {split: tuple(counts) for split, counts in data["pictures"].items()}
        return cls(tuple(data["classes"]), pictures, dict(data["digests"].items()))

    def changes(self, now: Contents) -> tuple[str, ...]:
        """What has changed from these contents to those of `now`, a clause each; none where they are equal."""
        if self == now:
            return ()
        found = (*self._changed_classes(now), *self._changed_splits(now), *self._changed_counts(now))
        return found or ("as many pictures of each class, but under other names, in another order or split otherwise",)

    def _changed_classes(self, now: Contents) -> Iterator[str]:
        known, found = set(self.classes), set(now.classes)
        gone = [name for name in self.classes if name not in found]
        new = [name for name in now.classes if name not in known]
        if len(gone) == len(new) == 1 and self._of(gone[0]) == now._of(new[0]):
            yield f"class '{gone[0]}' is now '{new[0]}'"
            return
        for names, what in ((gone, "gone"), (new, "new")):
            if names:
                one = len(names) == 1
                yield f"{'class' if one else 'classes'} {_quoted(names)} {'is' if one else 'are'} {what}"
        if not gone and not new and self.classes != now.classes:
            yield "the classes are in another order"

    def _of(self, name: str) -> dict[str, int]:
        """Split → pictures of this class."""
        place = self.classes.index(name)
        return {split: counts[place] for split, counts in self.pictures.items()}

    def _changed_splits(self, now: Contents) -> Iterator[str]:
        for split in (name for name in self.pictures if name not in now.pictures):
            yield f"there are no {_KIND[split]} pictures any more"
        for split in (name for name in now.pictures if name not in self.pictures):
            yield f"there are {_KIND[split]} pictures of their own now"

    def _changed_counts(self, now: Contents) -> Iterator[str]:
        """Of classes and splits that there are both times."""
        for split in (name for name in self.pictures if name in now.pictures):
            kind = f"{_KIND[split]} " if len(self.pictures) > 1 else ""
            before, after = (dict(zip(one.classes, one.pictures[split], strict=True)) for one in (self, now))
            more = {name: after[name] - count for name, count in before.items() if name in after}
            for sign, word in ((-1, "fewer"), (1, "more")):
                if counts := {name: sign * n for name, n in more.items() if sign * n > 0}:
                    yield _counted(counts, kind, word)


_KIND = {"train": "training", "val": "validation", "test": "test"}


def _counted(counts: Mapping[str, int], kind: str, word: str) -> str:
    """ "3 training pictures of 'ants' fewer", "5 pictures more (3 of 'ants', 2 of 'bees')"."""
    total = sum(counts.values())
    pictures = f"{total:,} {kind}picture{'s' * (total > 1)}"
    if len(counts) == 1:
        return f"{pictures} of {_quoted(counts)} {word}"
    each = some([f"{count:,} of '{name}'" for name, count in counts.items()])
    return f"{pictures} {word} ({each})"


def _quoted(names: Iterable[str]) -> str:
    return some([f"'{name}'" for name in names])


def digest(split: Split, classes: Sequence[str]) -> str:
    """A hash of names and class names in their order. Folders that all the names share are left out: an archive, or a
    folder around the data, that is renamed holds the same. Classes that have no picture here play no part.
    """
    names = within(split.names)
    shared = sum(len(folder) + 1 for folder in common_folders(names))
    present, labels = np.unique(split.labels, return_inverse=True)
    found = hashlib.sha256(json.dumps([classes[label] for label in present]).encode())
    # no name holds a NUL; one that is no text has lone surrogates
    found.update("".join(f"\0{name[shared:]}" for name in names).encode("utf-8", "surrogatepass"))
    found.update(labels.astype("<i8").tobytes())
    return found.hexdigest()
