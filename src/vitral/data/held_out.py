"""Record of the images that a run holds out, by which they are found again after changes to its folder.

`held-out.jsonl` of a run: a first line with the digest of the training images and the images that were left out, then a
line for each held-out image.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitral import bounded
from vitral.data.checks.fingerprint import digest
from vitral.data.checks.groups import Sets, joined
from vitral.data.dataset import DataSet, Split, relative_names
from vitral.data.same import Identity, find, identities, short_name
from vitral.data.targets import Targets
from vitral.wording import some

MOST = 100_000
"""Held-out images up to which they are recorded, some 15 MB: all of them are read for it, once."""


MOST_NAMED = 10_000
"""Training images up to which their names are recorded, to name those that are missing later."""


@dataclass(frozen=True)
class HeldOutSplit:
    """The images of one split."""

    images: tuple[Identity, ...]
    labels: tuple[str, ...]
    """Their labels when the run began, as text."""
    sets: Sets = ()
    """Images that belong together, by number."""

    @classmethod
    def of(cls, split: Split, targets: Targets, classes: Sequence[str]) -> HeldOutSplit:
        """Record the images of a split; each is read."""
        return cls(tuple(identities(split)), _described(split, targets, classes), _sets(split.groups))


@dataclass(frozen=True, eq=False)
class FoundAgain:
    """The images of a record that are still there."""

    images: Split
    """In the order of the record, with their present labels."""
    places: np.ndarray
    """(n,) int64: their numbers in the data that were searched."""
    total: int
    """Number of images in the record."""
    removed: tuple[str, ...]
    """Names of those that are gone, or whose files have other content."""
    relabeled: int
    """Number of those with other labels than in the record."""
    unknown: int = 0
    """Number of those that now belong to classes that the network does not know, and were left out."""
    others: int = 0
    """Number of images of the split that are not in the record, and were left out."""

    @property
    def as_before(self) -> bool:
        """True if all images are there with the labels that they had."""
        return len(self.images) == self.total and not self.relabeled

    def describe(self, split: str) -> str:
        """Return a sentence on what has changed; empty if nothing has."""
        clauses = []
        if self.removed:
            many = len(self.removed) > 1
            verb = "were" if many else "was"
            clauses.append(f"{len(self.removed):,} {verb} removed or edited ({some(self.removed)})")
        if self.unknown:
            many = self.unknown > 1
            verb, noun = ("are", "classes") if many else ("is", "a class")
            clauses.append(f"{self.unknown:,} {verb} now of {noun} that the network does not know")
        if self.relabeled:
            many = self.relabeled > 1
            verb = "have" if many else "has"
            clauses.append(f"{self.relabeled:,} {verb} another label, and labels count as they are now")
        if self.others:
            them = "them" if self.others > 1 else "it"
            clauses.append(f"{self.others:,} more left out, because the network may have been trained on {them}")
        if not clauses:
            return ""
        return f"{len(self.images):,} of the {self.total:,} {split} images that the run held out: {'; '.join(clauses)}."


@dataclass(frozen=True)
class HeldOut:
    """The held-out images of a run."""

    splits: Mapping[str, HeldOutSplit]
    trained_on: str
    """Digest of the names and labels of the readable training images."""
    skipped: tuple[str, ...] = ()
    """Class folders and names of the unreadable images that the run left out."""
    trained: tuple[str, ...] = ()
    """Class folders and names of the training images; empty above `MOST_NAMED`, and in older records."""

    @classmethod
    def of(cls, dataset: DataSet) -> HeldOut | None:
        """Record the readable images of a run in its splits; None if the held-out ones are too many, or in shards."""
        held = {name: split for name, split in dataset.splits.items() if name != "train"}
        in_shards = any(split.shard_numbers() is not None for split in dataset.splits.values())
        if not held or in_shards or sum(map(len, held.values())) > MOST:
            return None
        splits = {name: HeldOutSplit.of(split, dataset.targets, dataset.classes) for name, split in held.items()}
        train = dataset["train"]
        trained = _short_names(train) if len(train) <= MOST_NAMED else ()
        return cls(splits, digest(train, dataset.classes), tuple(map(short_name, dataset.left_out)), trained)

    def to_lines(self) -> str:
        """Write as JSON lines, for `from_lines`."""
        head = {"trained_on": self.trained_on, "skipped": list(self.skipped), "trained": list(self.trained)}
        lines: list[dict[str, Any]] = [head]
        for name, split in self.splits.items():
            group = {image: number for number, one in enumerate(split.sets) for image in one}
            for number, (image, label) in enumerate(zip(split.images, split.labels, strict=True)):
                together = {"group": group[number]} if number in group else {}
                lines.append({"split": name, **image._asdict(), "label": label, **together})
        return "".join(json.dumps(line) + "\n" for line in lines)

    @classmethod
    def from_lines(cls, text: bytes) -> HeldOut:
        """Read `to_lines`' form; `ValueError`, `KeyError` or `TypeError` for anything else."""
        head, *lines = (bounded.parse(line, file_names=True) for line in text.splitlines())
        rows = defaultdict[str, list[Mapping[str, Any]]](list)
        for line in lines:
            rows[str(line["split"])].append(line)
        splits = {name: _read(ones) for name, ones in rows.items()}
        return cls(splits, str(head["trained_on"]), tuple(head["skipped"]), tuple(head.get("trained", ())))

    def find(self, split: str, data: DataSet, where: str, known: Sequence[str] | None) -> FoundAgain:
        """Find the images of `split` in the split `where` of the data as they are now.

        Images of other classes than the `known` ones are left out; with None, all are known.
        """
        held, there = self.splits[split], data[where]
        found = find(held.images, there)
        names = set(data.classes if known is None else known)
        labels = _described(there.select(list(found.values())), data.targets, data.classes)
        now = dict(zip(found, labels, strict=True))
        foreign = {number for number, label in now.items() if data.targets.one_class and label not in names}
        kept = [number for number in range(len(held.images)) if number in found and number not in foreign]
        places = np.array([found[number] for number in kept], np.int64)
        number_of = {number: place for place, number in enumerate(kept)}
        sets = [[number_of[number] for number in one if number in number_of] for one in held.sets]
        return FoundAgain(
            joined(there.select(places), [one for one in sets if len(one) > 1]),
            places,
            len(held.images),
            tuple(one.name for number, one in enumerate(held.images) if number not in found),
            sum(now[number] != held.labels[number] for number in kept),
            len(foreign),
            len(there) - len(found) if where == split else 0,
        )

    def without_skipped(self, split: Split) -> Split:
        """Return a split without the images that the run left out."""
        gone = set(self.skipped)
        return split.select([number for number, name in enumerate(_short_names(split)) if name not in gone])

    def missing(self, train: Split) -> list[str]:
        """Return the names of recorded training images that are not in `train`."""
        there = set(_short_names(train))
        return [name for name in self.trained if name not in there]


def _short_names(split: Split) -> tuple[str, ...]:
    """Class folder and name of each image."""
    return tuple(map(short_name, relative_names(split.names)))


def _described(split: Split, targets: Targets, classes: Sequence[str]) -> tuple[str, ...]:
    return tuple(targets.describe(label, classes) for label in split.labels)


def _sets(groups: np.ndarray | None) -> Sets:
    """Sets of the images (n,) that share a group."""
    if groups is None:
        return ()
    members = defaultdict[int, list[int]](list)
    for number, group in enumerate(groups.tolist()):
        members[group].append(number)
    return tuple(tuple(one) for one in members.values() if len(one) > 1)


def _read(rows: Sequence[Mapping[str, Any]]) -> HeldOutSplit:
    sets = defaultdict[int, list[int]](list)
    images, labels = list[Identity](), list[str]()
    for number, row in enumerate(rows):
        images.append(Identity(str(row["name"]), int(row["size"]), str(row["digest"])))
        labels.append(str(row["label"]))
        if "group" in row:
            sets[int(row["group"])].append(number)
    return HeldOutSplit(tuple(images), tuple(labels), tuple(map(tuple, sets.values())))
