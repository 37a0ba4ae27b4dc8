"""What every source of pictures becomes: a `DataSet` of named `Split`s.

Nothing here reads a disk: a split holds names, labels and a picklable `Fetch`, so that it can be cut, reordered and
sent to worker processes before a single picture is opened.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np

from vitral.data.intake import read_image
from vitral.errors import DataError, ImageError

Fetch = Callable[[int], "bytes | np.ndarray"]
"""Picture number -> the bytes of an encoded file, or uint8 pixels (H, W) or (H, W, C). Picklable and thread-safe.

A fetch that can tell cheaply whether a picture is still the same has a method `identity`: picture number -> a text that
is another one when the picture has changed, and for every other picture."""

SPLITS = ("train", "val", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "test": "test",
    "testing": "test",
}
"""What people call a split (in lower case) -> what we call it."""


@dataclass(frozen=True, eq=False)
class Split:
    """Pictures of one split, each known by name."""

    names: Sequence[str]
    """As a person knows them: "photos/cat/1.jpg", "cifar10.tar:train/cat/0001.jpg", "mnist/train[17]"."""
    labels: np.ndarray
    """(n,) int64, indexes into `DataSet.classes`."""
    fetch: Fetch

    def __post_init__(self) -> None:
        if len(self.names) != len(self.labels):
            raise ValueError(f"{len(self.names)} names but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, indices: Sequence[int] | np.ndarray) -> Split:
        """The pictures with these numbers, in this order; nothing is read or copied."""
        index = np.asarray(indices, dtype=np.int64)
        return Split(_PickedNames.of(self.names, index), self.labels[index], _PickedFetch.of(self.fetch, index))

    def raw(self, index: int) -> bytes | np.ndarray:
        """What `fetch` gives for this picture; `ImageError` names the picture where the file cannot be read."""
        try:
            return self.fetch(index)
        except ImageError:
            raise
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise ImageError(self.names[index], why) from error

    def identity(self, index: int) -> str:
        """A text that is another one when the picture has changed, and for every other picture.

        Of files and archives it follows from path, size and time of the last change, so nothing is read; else from a
        hash of what `fetch` gives. What cannot be read has no identity of its own: it is said where it is decoded.
        """
        try:
            return _identity(self.fetch, index)
        except (OSError, ValueError):
            return "unreadable"

    def image(self, index: int, channels: int | None = None, *, at_least: tuple[int, int] | None = None) -> np.ndarray:
        """The picture as uint8 (H, W, C), upright, with 1 or 3 channels (None: as the picture has); a JPEG at 1/2, 1/4
        or 1/8 of its size where that is still `at_least` = (height, width).

        Raises `ImageError`, which names the picture.
        """
        return read_image(self.raw(index), name=self.names[index], channels=channels, at_least=at_least)


@dataclass(frozen=True, eq=False)
class DataSet:
    """Labelled pictures in splits that share one list of classes."""

    name: str
    """Short, for run folders and titles: "photos", "mnist"."""
    classes: tuple[str, ...]
    """Sorted naturally ("2" before "10"); the position is the label."""
    splits: Mapping[str, Split]
    """ "train" and, as found, "val" and "test"."""
    source: str
    """What was typed."""
    notes: tuple[str, ...] = ()
    """What the source left out or found odd, a sentence each; none of it stopped the reading."""

    def __getitem__(self, split: str) -> Split:
        """The split of this name; `DataError` says which there are."""
        if split not in self.splits:
            raise DataError(
                f"no '{split}' split in the data",
                where=self.source,
                why=f"found: {', '.join(self.splits)}",
                hint=f"put pictures into {split}/CLASS/, or choose one of the splits found",
            )
        return self.splits[split]


class LazyNames(Sequence[str]):
    """Names that are made when they are asked for: millions of them need not be held as strings."""

    def name(self, i: int) -> str:
        """One name."""
        raise NotImplementedError

    def part(self, which: slice) -> Sequence[str]:
        """Some of the names, lazy too."""
        raise NotImplementedError

    def within(self) -> list[str]:
        """All of them, without the place where the data lie."""
        raise NotImplementedError

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[str]: ...
    def __getitem__(self, i: int | slice) -> str | Sequence[str]:
        return self.part(i) if isinstance(i, slice) else self.name(i)


@dataclass(frozen=True, eq=False)
class _PickedNames(LazyNames):
    """Some of the names in another order, without a copy of the strings."""

    base: Sequence[str]
    order: np.ndarray

    @classmethod
    def of(cls, names: Sequence[str], index: np.ndarray) -> _PickedNames:
        return cls(names.base, names.order[index]) if isinstance(names, cls) else cls(names, index)

    def __len__(self) -> int:
        return len(self.order)

    def name(self, i: int) -> str:
        return self.base[int(self.order[i])]

    def part(self, which: slice) -> Sequence[str]:
        return _PickedNames(self.base, self.order[which])

    def within(self) -> list[str]:
        names = within(self.base)
        return [names[i] for i in self.order.tolist()]


def within(names: Sequence[str]) -> list[str]:
    """Names without the place where the data lie: these stay as they are when the data move."""
    return names.within() if isinstance(names, LazyNames) else list(names)


@dataclass(frozen=True, eq=False)
class _PickedFetch:
    base: Fetch
    index: np.ndarray

    @classmethod
    def of(cls, fetch: Fetch, index: np.ndarray) -> _PickedFetch:
        return cls(fetch.base, fetch.index[index]) if isinstance(fetch, cls) else cls(fetch, index)

    def __call__(self, i: int) -> bytes | np.ndarray:
        return self.base(int(self.index[i]))

    def identity(self, i: int) -> str:
        return _identity(self.base, int(self.index[i]))


def _identity(fetch: Fetch, i: int) -> str:
    if (identity := getattr(fetch, "identity", None)) is not None:
        return str(identity(i))
    raw = fetch(i)
    shape = raw.shape if isinstance(raw, np.ndarray) else "encoded"
    data = raw.tobytes() if isinstance(raw, np.ndarray) else raw
    return f"{shape} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


@dataclass(frozen=True)
class Numbered(Sequence[str]):
    """The names of pictures that have only a number: "mnist/train[0]", "mnist/train[1]" …"""

    prefix: str
    total: int

    def __len__(self) -> int:
        return self.total

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[str]: ...
    def __getitem__(self, i: int | slice) -> str | Sequence[str]:
        numbers = range(self.total)[i]
        return f"{self.prefix}[{numbers}]" if isinstance(numbers, int) else [f"{self.prefix}[{n}]" for n in numbers]


@dataclass(frozen=True, eq=False)
class Pixels:
    """Fetch from pictures that lie in memory, all of one size."""

    array: np.ndarray
    """uint8 (n, H, W) or (n, H, W, C)."""

    def __call__(self, i: int) -> np.ndarray:
        return self.array[i]


def natural(text: str) -> tuple[object, ...]:
    """Sort key under which "2" comes before "10" and case does not matter."""
    # Digits compare by length, then as text: int() refuses more than 4,300 of them, and a name may hold as many.
    parts = re.split(r"([0-9]+)", text.casefold())
    return (*((len(p.lstrip("0")), p.lstrip("0")) if i % 2 else p for i, p in enumerate(parts)), text)


def shown(name: str) -> str:
    """A name that can be printed and saved: control characters and undecodable bytes as escapes."""
    if name.isprintable():
        return name
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def some(items: Iterable[object], limit: int = 3) -> str:
    """The first few of a list for a message: "a, b, c and 9 more"."""
    texts = [shown(str(item)) for item in items]
    rest = f" and {len(texts) - limit:,} more" if len(texts) > limit else ""
    return ", ".join(texts[:limit]) + rest


def check_classes(dataset: DataSet) -> None:
    """`DataError` for data from which no network can learn to tell classes apart."""
    if len(dataset.classes) < 2:
        raise DataError(
            f"only one class: {some(dataset.classes)}",
            where=dataset.source,
            why="a classifier needs at least two classes to tell apart",
            hint="one folder for each class: DATA/cat/1.jpg, DATA/dog/2.jpg",
        )


def index_labels(labels: Mapping[str, Sequence[str]], source: str) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
    """The classes, sorted naturally, and for every split its labels (n,) int64 as indexes into them.

    The train split says which classes there are (all splits together where there is no train split); `DataError` where
    another split has more.
    """
    found = {split: set(texts) for split, texts in labels.items()}
    known = found.get("train") or set().union(*found.values())
    classes = tuple(sorted(known, key=natural))
    for split, names in found.items():
        if extra := sorted(names - known, key=natural):
            raise DataError(
                f"the {split} split has classes that train lacks: {some(extra, 5)}",
                where=source,
                why=f"train has {len(classes)}: {some(classes, 5)}",
                hint="give the classes the same names in every split, or take the others out",
            )
    position = {name: i for i, name in enumerate(classes)}
    return classes, {split: np.array([position[t] for t in texts], np.int64) for split, texts in labels.items()}


def in_order(splits: Mapping[str, Split]) -> dict[str, Split]:
    """The same splits, train first, then val, then test."""
    return {split: splits[split] for split in SPLITS if split in splits}
