"""Fingerprint of a data set, without opening an image: a run stores it to detect later changes of its data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitral.data.dataset import DataSet, LazyNames, Split, relative_names
from vitral.data.files import common_folders
from vitral.wording import count, some


@dataclass(frozen=True)
class Fingerprint:
    """Classes, images per class, and a digest of every split's names and labels.

    Equal fingerprints mean the same image names under the same labels in the same splits, at any location. Pixels are
    not compared.
    """

    classes: tuple[str, ...]
    images: Mapping[str, tuple[int, ...]]
    """Split of the data → images of each class."""
    digests: Mapping[str, str]
    """Split of the run → digest of its images' names and classes, in order."""

    @classmethod
    def of(cls, dataset: DataSet, parts: DataSet) -> Fingerprint:
        """Fingerprint of a data set and of the splits (`parts`) that a run makes of it."""
        count = len(dataset.classes)
        return cls(
            dataset.classes,
            {name: tuple(dataset.targets.counts(s.labels, count).tolist()) for name, s in dataset.splits.items()},
            {name: digest(split, parts.classes) for name, split in parts.splits.items()},
        )

    @property
    def cuts_validation(self) -> bool:
        """True if the run cuts its validation split from train: it then has one split more than the data."""
        return len(self.digests) > len(self.images)

    def may_have_moved(self, now: Fingerprint, split: str) -> bool:
        """True if training images may have moved to another split: `now` has more images of a class there, and fewer
        in train.
        """

        def change(split: str, name: str) -> int:
            before, after = (dict(zip(one.classes, one.images.get(split, ()), strict=False)) for one in (self, now))
            return after.get(name, 0) - before.get(name, 0)

        return any(change("train", name) < 0 < change(split, name) for name in self.classes)

    def may_overlap(self, now: Fingerprint) -> bool:
        """True if training images may be held out in `now`: as many images of the same classes, held out otherwise."""
        if (self.classes, self.images) != (now.classes, now.images):
            return False
        return any(self.digests.get(name) != one for name, one in now.digests.items() if name != "train")

    def to_json(self) -> dict[str, object]:
        """Convert to plain data, for `from_json`."""
        images = {split: list(counts) for split, counts in self.images.items()}
        return {"classes": list(self.classes), "images": images, "digests": dict(self.digests)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fingerprint:
        """Read `to_json`'s form; `KeyError`, `TypeError` or `AttributeError` for anything else."""
        images = {split: tuple(counts) for split, counts in data["images"].items()}
        return cls(tuple(data["classes"]), images, dict(data["digests"].items()))

    def changes(self, now: Fingerprint) -> tuple[str, ...]:
        """Describe the changes from this fingerprint to `now`, a clause each; empty if they are equal."""
        if self == now:
            return ()
        changes = (*self._changed_classes(now), *self._changed_splits(now), *self._changed_counts(now))
        return changes or ("as many images of each class, but under other names, in another order or split otherwise",)

    def _changed_classes(self, now: Fingerprint) -> Iterator[str]:
        before, after = set(self.classes), set(now.classes)
        gone = [name for name in self.classes if name not in after]
        new = [name for name in now.classes if name not in before]
        if len(gone) == len(new) == 1 and self._counts_of(gone[0]) == now._counts_of(new[0]):
            yield f"class '{gone[0]}' is now '{new[0]}'"
            return
        for names, what in ((gone, "gone"), (new, "new")):
            if names:
                one = len(names) == 1
                yield f"{'class' if one else 'classes'} {_quoted(names)} {'is' if one else 'are'} {what}"
        if not gone and not new and self.classes != now.classes:
            yield "the classes are in another order"

    def _counts_of(self, name: str) -> dict[str, int]:
        """Split → images of this class."""
        place = self.classes.index(name)
        return {split: counts[place] for split, counts in self.images.items()}

    def _changed_splits(self, now: Fingerprint) -> Iterator[str]:
        for split in (name for name in self.images if name not in now.images):
            yield f"there are no {_KIND[split]} images any more"
        for split in (name for name in now.images if name not in self.images):
            yield f"there are separate {_KIND[split]} images now"

    def _changed_counts(self, now: Fingerprint) -> Iterator[str]:
        """Describe changed counts of the classes and splits in both fingerprints."""
        for split in (name for name in self.images if name in now.images):
            kind = f"{_KIND[split]} " if len(self.images) > 1 else ""
            before, after = (dict(zip(one.classes, one.images[split], strict=True)) for one in (self, now))
            more = {name: after[name] - count for name, count in before.items() if name in after}
            for sign, word in ((-1, "fewer"), (1, "more")):
                if counts := {name: sign * n for name, n in more.items() if sign * n > 0}:
                    yield _counted(counts, kind, word)


_KIND = {"train": "training", "val": "validation", "test": "test"}


def _counted(counts: Mapping[str, int], kind: str, word: str) -> str:
    """ "3 training images of 'ants' fewer", "5 images more (3 of 'ants', 2 of 'bees')"."""
    total = sum(counts.values())
    images = count(total, f"{kind}image")
    if len(counts) == 1:
        return f"{images} of {_quoted(counts)} {word}"
    each = some([f"{count:,} of '{name}'" for name, count in counts.items()])
    return f"{images} {word} ({each})"


def _quoted(names: Iterable[str]) -> str:
    return some([f"'{name}'" for name in names])


def digest(split: Split, classes: Sequence[str]) -> str:
    """Hash names and class names in order.

    Folders shared by all names are left out, so that renaming an archive or a folder around the data changes nothing.
    Classes without an image in the split do not count.
    """
    if split.labels.ndim > 1:  # several labels or numbers an image: every row counts
        hashed = hashlib.sha256(json.dumps([*classes]).encode())
        hashed.update(_all_names(split.names))
        hashed.update(split.labels.astype("<f8").tobytes())
        return hashed.hexdigest()
    present, labels = np.unique(split.labels, return_inverse=True)
    hashed = hashlib.sha256(json.dumps([classes[label] for label in present]).encode())
    hashed.update(_all_names(split.names))
    hashed.update(labels.astype("<i8").tobytes())
    return hashed.hexdigest()


def _all_names(names: Sequence[str]) -> bytes:
    if isinstance(names, LazyNames) and (short := names.digest):
        return f"\0{short}".encode()
    relative = relative_names(names)
    shared = sum(len(folder) + 1 for folder in common_folders(relative))
    # no name contains a NUL; undecodable names contain lone surrogates
    return "".join(f"\0{name[shared:]}" for name in relative).encode("utf-8", "surrogatepass")
