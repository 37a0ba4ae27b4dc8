"""What is wrong with a data set: every picture is read and decoded once, and everything found is named.

check(dataset) -> DataCheck       counts, sizes, kinds, unreadable files, duplicates, classes that are thin or absent
readable(dataset, unreadable, bad) -> DataSet       refuse unreadable pictures by name, or go on without them
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from vitral.console import stderr, table
from vitral.data.dataset import DataSet, Split, natural, some
from vitral.data.intake import probe, read_image
from vitral.data.kernels import expect
from vitral.errors import DataError, ImageError, UsageError

SMALL_CLASS = 10
"""A class with fewer train pictures than this is called small."""
IMBALANCE = 10.0
"""Largest over smallest class in train from which the set is called unbalanced."""
CHUNK = 64
"""Pictures that a thread takes at a time."""
WITHOUT = "--bad-images skip leaves them out"
"""What helps where pictures are unreadable."""

OnProgress = Callable[[int, int], object]
"""Called with (pictures done, pictures in all)."""


@dataclass(frozen=True)
class Unreadable:
    """A picture that cannot be read."""

    split: str
    index: int
    name: str
    reason: str


@dataclass(frozen=True)
class Place:
    """Where a picture stands in the data set."""

    split: str
    index: int
    name: str
    label: str


@dataclass(frozen=True)
class Sizes:
    """Sizes in pixels, upright; each range is (least, median, greatest)."""

    height: tuple[int, int, int]
    width: tuple[int, int, int]
    most_common: tuple[tuple[int, int, int], ...]
    """(height, width, pictures), the most frequent first."""


@dataclass(frozen=True)
class DataCheck:
    """What `check` found."""

    name: str
    source: str
    classes: tuple[str, ...]
    counts: Mapping[str, tuple[int, ...]]
    """Split -> pictures of each class, unreadable ones included."""
    sizes: Sizes | None
    """None where no picture is readable."""
    modes: Mapping[str, int]
    """Kinds of pixels by Pillow's names, "RGB", "L", "CMYK" …, with pictures of each."""
    formats: Mapping[str, int]
    """ "JPEG", "PNG" …; "pixels" where the source holds arrays."""
    unreadable: tuple[Unreadable, ...]
    duplicates: tuple[tuple[Place, ...], ...]
    """Groups of pictures that are equal in every pixel once decoded; the files may differ."""
    notes: tuple[str, ...]
    """What the source left out."""

    @property
    def images(self) -> int:
        """Pictures in all splits."""
        return sum(sum(counts) for counts in self.counts.values())

    @property
    def leaks(self) -> tuple[tuple[Place, ...], ...]:
        """The groups of duplicates that stand in more than one split."""
        return tuple(group for group in self.duplicates if len({place.split for place in group}) > 1)

    @property
    def conflicts(self) -> tuple[tuple[Place, ...], ...]:
        """The groups of duplicates that have more than one label."""
        return tuple(group for group in self.duplicates if len({place.label for place in group}) > 1)

    @property
    def is_sound(self) -> bool:
        """Whether nothing was found that makes a result wrong: unreadable files, leaks, contradicting labels."""
        return not (self.unreadable or self.leaks or self.conflicts)

    def absent(self) -> dict[str, tuple[str, ...]]:
        """Split -> classes of which it has no picture, for the splits where there are any."""
        gaps = {
            split: tuple(name for name, n in zip(self.classes, counts, strict=True) if not n)
            for split, counts in self.counts.items()
        }
        return {split: names for split, names in gaps.items() if names}

    def small(self) -> dict[str, int]:
        """The classes with fewer than `SMALL_CLASS` train pictures, and how many they have."""
        train = zip(self.classes, self.counts.get("train", ()), strict=False)
        return {name: n for name, n in train if n < SMALL_CLASS}

    @property
    def imbalance(self) -> float | None:
        """Pictures of the largest class over those of the smallest in train; None where one has none."""
        fewest, most = min(self.counts.get("train", (0,))), max(self.counts.get("train", (0,)))
        return most / fewest if fewest else None

    def findings(self) -> list[tuple[str, str]]:
        """What a person should know, worst first: (heading, sentence)."""
        found = []
        if self.unreadable:
            named = some(f"{bad.name} ({bad.reason})" for bad in self.unreadable)
            told = f"{_counted(len(self.unreadable), 'picture')}: {named}; in training {WITHOUT}"
            found.append(("unreadable", told))
        groups = (("leak between splits", self.leaks), ("contradicting labels", self.conflicts))
        for heading, group in groups:
            if group:
                found.append((heading, f"{len(group):,} pictures, as {some(map(_told, group), 2)}"))
        rest = [group for group in self.duplicates if group not in self.leaks and group not in self.conflicts]
        if rest:
            found.append(("duplicates", f"{len(rest):,} pictures more than once, as {some(map(_told, rest), 2)}"))
        if len(self.classes) < 2:
            found.append(
                ("one class", f"every picture is {some(self.classes)}: there is nothing to learn from it alone")
            )
        for split, names in self.absent().items():
            found.append(("absent classes", f"{split} has no picture of {some(names, 5)}"))
        if small := self.small():
            told = some((f"{name} ({n})" for name, n in small.items()), 5)
            found.append(("small classes", f"fewer than {SMALL_CLASS} train pictures: {told}"))
        if self.imbalance is not None and self.imbalance >= IMBALANCE:
            found.append(
                ("imbalance", f"the largest class has {self.imbalance:.0f} times the pictures of the smallest")
            )
        return found + [("source", note) for note in self.notes]

    def to_json(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        counts = {split: dict(zip(self.classes, n, strict=True)) for split, n in self.counts.items()}

        def groups(duplicates: Sequence[Sequence[Place]]) -> list[list[dict[str, Any]]]:
            return [[asdict(place) for place in group] for group in duplicates]

        return {
            "data": self.source,
            "name": self.name,
            "sound": self.is_sound,
            "images": self.images,
            "classes": list(self.classes),
            "counts": counts,
            "sizes": asdict(self.sizes) if self.sizes else None,
            "modes": dict(self.modes),
            "formats": dict(self.formats),
            "unreadable": [asdict(bad) for bad in self.unreadable],
            "duplicates": groups(self.duplicates),
            "leaks": groups(self.leaks),
            "conflicts": groups(self.conflicts),
            "absent_classes": {split: list(names) for split, names in self.absent().items()},
            "small_classes": self.small(),
            "imbalance": self.imbalance,
            "notes": list(self.notes),
        }

    def print_table(self, console: Console, most_classes: int = 20) -> None:
        """Counts, sizes and findings for people."""
        counts = f"{_counted(self.images, 'picture')}, {_counted(len(self.classes), 'class')}"
        console.print(Text(f"{self.source}: {counts}", style="bold"))
        console.print(self._counts_table(most_classes))
        facts = table(header=False)
        if self.sizes:
            low, middle, high = zip(self.sizes.height, self.sizes.width, strict=True)
            common = ", ".join(f"{h} × {w} ({n:,})" for h, w, n in self.sizes.most_common)
            facts.add_row("height × width", f"{_by(low)} to {_by(high)}, median {_by(middle)}; most common {common}")
        for title, kinds in (("pixels", self.modes), ("formats", self.formats)):
            facts.add_row(title, ", ".join(f"{kind} ({n:,})" for kind, n in kinds.items()) or "none")
        for heading, sentence in self.findings():
            facts.add_row(Text(heading, style="yellow"), Text(sentence))
        if self.is_sound:
            facts.add_row(Text("sound", style="green"), "every picture is readable, none is in two splits or classes")
        console.print(facts)

    def _counts_table(self, most_classes: int) -> Table:
        rows = table()
        rows.add_column("class", overflow="fold")
        for split in self.counts:
            rows.add_column(split, justify="right")
        lines = list(zip(self.classes, *self.counts.values(), strict=True))
        for name, *numbers in lines[:most_classes]:
            rows.add_row(Text(name), *(f"{n:,}" for n in numbers))
        if rest := lines[most_classes:]:
            rows.add_row(f"… {len(rest):,} more", *(f"{sum(n):,}" for n in list(zip(*rest, strict=True))[1:]))
        rows.add_row("all", *(f"{sum(counts):,}" for counts in self.counts.values()))
        return rows


def _counted(count: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{count:,} {what}{plural * (count != 1)}"


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"


def _told(group: Sequence[Place]) -> str:
    return " = ".join(f"{place.name} [{place.label}]" for place in group[:2])


# ---------------------------------------------------------------- the pass over the pictures


class _Seen(NamedTuple):
    """What one picture told, or why it could not be read."""

    digest: bytes = b""
    height: int = 0
    width: int = 0
    mode: str = ""
    format: str = ""
    reason: str = ""


def check(dataset: DataSet, progress: OnProgress | None = None) -> DataCheck:
    """Read and decode every picture of every split once, in threads, and tell what is wrong.

    `progress` is called as pictures are done; None shows a bar on standard error where that is a terminal. Duplicates
    are found by a hash of the decoded pixels, so copies with another name, format or metadata count, re-compressed
    ones do not. Nothing that is found raises.
    """
    seen: dict[str, list[_Seen]] = {}
    with _bar(progress) as tell:
        total, done = sum(map(len, dataset.splits.values())), 0
        for split, pictures in dataset.splits.items():
            seen[split] = []
            for chunk in _in_threads(pictures):
                seen[split] += chunk
                done += len(chunk)
                tell(done, total)
    good = [one for ones in seen.values() for one in ones if not one.reason]
    classes = len(dataset.classes)
    return DataCheck(
        name=dataset.name,
        source=dataset.source,
        classes=dataset.classes,
        counts={s: tuple(np.bincount(p.labels, minlength=classes).tolist()) for s, p in dataset.splits.items()},
        sizes=_sizes(good),
        modes=dict(Counter(one.mode for one in good).most_common()),
        formats=dict(Counter(one.format for one in good).most_common()),
        unreadable=tuple(
            Unreadable(split, i, dataset.splits[split].names[i], one.reason)
            for split, ones in seen.items()
            for i, one in enumerate(ones)
            if one.reason
        ),
        duplicates=_duplicates(dataset, seen),
        notes=dataset.notes,
    )


def _in_threads(split: Split) -> Iterator[list[_Seen]]:
    """What each picture told, in order, a chunk at a time."""

    def look(start: int) -> list[_Seen]:
        return [_look(split, i) for i in range(start, min(start + CHUNK, len(split)))]

    expect(len(split))
    pool = ThreadPoolExecutor(min(os.cpu_count() or 1, 16))
    try:
        yield from pool.map(look, range(0, len(split), CHUNK))
    finally:  # after Ctrl-C, do not finish the queue first
        pool.shutdown(cancel_futures=True)


def _look(split: Split, index: int) -> _Seen:
    try:
        raw = split.raw(index)
        pixels = read_image(raw, name=split.names[index])
    except ImageError as error:
        return _Seen(reason=error.why or "unreadable")
    height, width, channels = pixels.shape
    mode, kind = "L" if channels == 1 else "RGB", "pixels"
    if not isinstance(raw, np.ndarray):
        header = probe(raw)
        mode, kind = header.mode, header.format
    digest = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    digest.update(pixels.data)
    return _Seen(digest.digest(), height, width, mode, kind)


def _sizes(seen: Sequence[_Seen]) -> Sizes | None:
    if not seen:
        return None
    sizes = np.array([(one.height, one.width) for one in seen])
    ranges = [(int(n.min()), int(np.median(n)), int(n.max())) for n in sizes.T]
    common = Counter((one.height, one.width) for one in seen).most_common(3)
    return Sizes(ranges[0], ranges[1], tuple((height, width, n) for (height, width), n in common))


def _duplicates(dataset: DataSet, seen: Mapping[str, Sequence[_Seen]]) -> tuple[tuple[Place, ...], ...]:
    """Groups of pictures with the same digest, in the order of the splits."""
    repeated = Counter(one.digest for ones in seen.values() for one in ones if one.digest)
    groups: dict[bytes, list[Place]] = {}
    for name, ones in seen.items():
        split = dataset.splits[name]
        for i, one in enumerate(ones):
            if repeated[one.digest] > 1:
                place = Place(name, i, split.names[i], dataset.classes[split.labels[i]])
                groups.setdefault(one.digest, []).append(place)
    return tuple(map(tuple, groups.values()))


@contextmanager
def _bar(progress: OnProgress | None) -> Iterator[OnProgress]:
    """The caller's function, or a progress bar on standard error where a person sees it."""
    if progress is not None:
        yield progress
        return
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("reading pictures"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stderr(), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def readable(
    dataset: DataSet, unreadable: Iterable[Unreadable], bad: Literal["error", "skip"] = "error", hint: str | None = None
) -> DataSet:
    """The data set without its unreadable pictures ("skip"), or one `DataError` that names them ("error") and says what
    to type, or `hint`.

    Labels and classes stay as they are. With "skip", too, a split without a readable picture is an error, and a class
    without one to learn from.
    """
    if bad not in ("error", "skip"):
        raise UsageError(f"unknown choice '{bad}' for bad pictures", why="known: error, skip")
    found = sorted(unreadable, key=lambda one: (one.split, natural(one.name)))
    if not found:
        return dataset
    told = some(f"{one.name} ({one.reason})" for one in found)
    if bad == "error":
        raise DataError(
            f"{len(found):,} unreadable picture{'s' * (len(found) > 1)}",
            where=dataset.source,
            why=told,
            hint=hint or f"{WITHOUT}; `vitral data check {dataset.source}` names them all",
        )
    splits = dict(dataset.splits)
    for split, pictures in dataset.splits.items():
        kept = np.setdiff1d(np.arange(len(pictures)), [one.index for one in found if one.split == split])
        if not len(kept):
            raise DataError(f"no readable picture in the {split} split", where=dataset.source, why=told)
        gone = np.setdiff1d(pictures.labels, pictures.labels[kept])
        if split == "train" and len(gone):
            names = some([f"'{dataset.classes[label]}'" for label in gone])
            raise DataError(f"no readable picture of {names} to learn from", where=dataset.source, why=told)
        if len(kept) < len(pictures):
            splits[split] = pictures.select(kept)
    return replace(dataset, splits=splits)


def left_out(names: Sequence[str]) -> str:
    """What to say where work goes on without these pictures; nothing where there are none."""
    return f"left out {len(names):,} unreadable picture{'s' * (len(names) > 1)}: {some(names, 5)}" if names else ""
