"""`DataSet`: named `Split`s of labeled images, from any source.

Nothing here reads a disk: a split holds names, labels and a picklable `Fetch`, so that it can be cut, reordered and
sent to worker processes before any image is opened.
"""

from __future__ import annotations

import hashlib
import importlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, overload

import numpy as np
from torch import Tensor

from vitral.console import Described
from vitral.data.images.decode import read_image
from vitral.data.targets import ONE_CLASS, Targets
from vitral.errors import DataError, ImageError
from vitral.wording import some

if TYPE_CHECKING:
    from vitral.data.images.augmentation import Augmentation
    from vitral.data.images.preprocessing import Preprocessing

Fetch = Callable[[int], "bytes | np.ndarray"]
"""Image number -> the bytes of an encoded file, or uint8 pixels (H, W) or (H, W, C). Picklable and thread-safe.

A fetch that can detect changes cheaply has a method `identity`: image number -> a string that differs after the image
has changed, and from that of every other image. One that knows sizes without reading has a method `size`: image number
-> bytes of what it returns."""

SPLITS = ("train", "val", "test")
SPLIT_NAMES = {
    "train": "train",
    "training": "train",
    "trainset": "train",
    "val": "val",
    "valid": "val",
    "validate": "val",
    "validation": "val",
    "valset": "val",
    "dev": "val",
    "development": "val",
    "test": "test",
    "testing": "test",
    "testset": "test",
}
"""Common name of a split (in lower case) -> its name here."""
_FILLERS = {"set", "data", "dataset", "images", "image", "imgs", "img", "seg", "split", "folder", "files", "photos"}


def split_name(text: str) -> str | None:
    """Return the split that a name states: "train", "training_set", "seg_test", "Val2017"; None for other names."""
    words = [word for word in re.split(r"[^a-z]+", text.lower()) if word and word not in _FILLERS]
    return SPLIT_NAMES.get(words[0]) if len(words) == 1 else None


FILE_COLUMNS = (
    *("file", "filename", "file_name", "filepath", "filepaths", "file_path"),
    *("path", "image", "image_path", "img"),
)
"""Names of the column of files of a table, in lower case."""
LABEL_COLUMNS = ("label", "labels", "class", "class_name", "category", "target")
"""Names of the label column of a table, in lower case."""


def spread(count: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers below `count`, in order and evenly spread: (n,) int64."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).round().astype(int))


@dataclass(frozen=True, eq=False)
class Split:
    """Named images of one split."""

    names: Sequence[str]
    """Names for messages: "photos/cat/1.jpg", "cifar10.tar:train/cat/0001.jpg", "mnist/train[17]"."""
    labels: np.ndarray
    """A row for each image, as `DataSet.targets` describes: by default (n,) int64, indexes into `DataSet.classes`."""
    fetch: Fetch
    groups: np.ndarray | None = None
    """(n,) int64: images of one number stay on one side of a cut, as those of a patient; None if all are apart."""
    levels: tuple[int, int] | None = None
    """Values of more than 8 bits that `image` shows as black and white; None: those of `vitral.data.images.pixels`."""

    def __post_init__(self) -> None:
        if len(self.names) != len(self.labels):
            raise ValueError(f"{len(self.names)} names but {len(self.labels)} labels")

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Split({len(self):,} images)"

    def select(self, indices: Sequence[int] | np.ndarray) -> Split:
        """Select images by number, in this order; nothing is read or copied."""
        index = np.asarray(indices, dtype=np.int64)
        groups = None if self.groups is None else self.groups[index]
        names, fetch = _PickedNames.of(self.names, index), _PickedFetch.of(self.fetch, index)
        return Split(names, self.labels[index], fetch, groups, self.levels)

    def spread(self, most: int) -> Split:
        """At most so many images, evenly spread: folders are in the order of their classes."""
        return self.select(spread(len(self), most))

    def with_levels(self, levels: tuple[int, int] | None) -> Split:
        """The same images with the levels of a network's preprocessing; their own remain if it has none."""
        return self if levels in (None, self.levels) else replace(self, levels=levels)

    def raw(self, index: int) -> bytes | np.ndarray:
        """Fetch an image, still encoded; `ImageError`, which names the image, if its file cannot be read, or the reader
        of a package's source fails in any way.
        """
        try:
            return self.fetch(index)
        except (ImageError, MemoryError):
            raise
        except (OSError, ValueError) as error:
            raise ImageError(self.names[index], getattr(error, "strerror", None) or str(error)) from error
        except Exception as error:
            raise ImageError(self.names[index], f"its reader failed: {type(error).__name__}: {error}") from error

    def identity(self, index: int) -> str:
        """A string that differs after the image has changed, and from that of every other image.

        For files and archives it is made of path, inode, size and times, without reading; else of a hash of what
        `fetch` returns. All unreadable images share one: decoding reports them.
        """
        try:
            return _identity(self.fetch, index)
        except Exception:  # the image has the reason
            return UNREADABLE

    def size(self, index: int) -> int:
        """Bytes of what `fetch` returns, for files and archives without reading it; -1 for an unreadable image."""
        try:
            return _size(self.fetch, index)
        except Exception:  # the image has the reason
            return -1

    def shard_numbers(self) -> np.ndarray | None:
        """Number of the shard of each image, (n,) int64; None for images that are not in shards."""
        numbers = getattr(self.fetch, "shard_numbers", None)
        return None if numbers is None else numbers(np.arange(len(self)))

    def image(self, index: int, channels: int | None = None, *, at_least: tuple[int, int] | None = None) -> np.ndarray:
        """Decode an image to uint8 (H, W, C), upright, with 1 or 3 channels (None: the image's own).

        With `at_least` = (height, width), a JPEG may be decoded at 1/2, 1/4 or 1/8 of its size as long as it stays that
        large. Raises `ImageError`, which names the image.
        """
        return read_image(
            self.raw(index), name=self.names[index], channels=channels, at_least=at_least, levels=self.levels
        )


class Loader(Protocol):
    """The batches of a split for a loop of one's own. Each iteration is one epoch: of training images the next one.

    A batch is (images, labels): images (B, C, H, W) fp32, standardized, and labels (B,), or (B, K) of images that mixup
    or CutMix has mixed. A training batch that would be incomplete is dropped. Order and augmentation are a function of
    the seed and `epoch`, which you may set.
    """

    epoch: int
    """Number of the next epoch."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]: ...
    def close(self) -> None:
        """Stop the worker processes, if there are any."""


@dataclass(frozen=True, eq=False, repr=False)
class DataSet(Described):
    """Labeled images in splits that share one list of classes.

    Example:
        data = vitral.load_data("photos/").with_validation()
        print(data.classes, len(data["train"]))
        for images, labels in data.loader("train", image_size=64, batch_size=4):
            print(images.shape, labels)
    """

    name: str
    """Short name for run folders and titles: "photos", "mnist"."""
    classes: tuple[str, ...]
    """Sorted naturally ("2" before "10"); the position is the label."""
    splits: Mapping[str, Split]
    """ "train" and, if present, "val" and "test"."""
    source: str
    """The data argument as typed."""
    notes: tuple[str, ...] = ()
    """Warnings of the source, a sentence each: files left out, oddities."""
    left_out: tuple[str, ...] = ()
    """Names of unreadable images left out on request."""
    unused: int = 0
    """Number of image files that were left out, including formats that vitral does not read; `notes` list some."""
    targets: Targets = ONE_CLASS
    """The meaning of the labels: one class per image, or another task."""
    reason: str = ""
    """Why this task was chosen, if the columns of a table determined it; otherwise empty."""

    def described(self) -> dict[str, str]:
        """Return the facts that `repr` and notebooks show, as a dict from name to text."""
        sizes = {name: f"{name}: {len(split):,} images" for name, split in self.splits.items()}
        return {"name": self.name, "classes": f"{len(self.classes):,} classes", **sizes}

    def __getitem__(self, split: str) -> Split:
        """The split of this name; `DataError`, which lists the splits, if there is none."""
        if split not in self.splits:
            what = f"no '{split}' split in the data"
            hint = f"put images into {split}/CLASS/, or choose one of the splits found"
            raise DataError(what, where=self.source, why=f"found: {', '.join(self.splits)}", hint=hint)
        return self.splits[split]

    def loader(
        self,
        split: str = "train",
        *,
        batch_size: int = 64,
        image_size: int | tuple[int, int] = 224,
        channels: int = 3,
        shuffle: bool | None = None,
        augmentation: Augmentation | None = None,
        preprocessing: Preprocessing | None = None,
        device: str = "cpu",
        seed: int = 0,
        workers: int | None = None,
    ) -> Loader:
        """Return batches of (images, labels) for a loop of your own: images (B, C, H, W) fp32, standardized.

        The training split is shuffled, unless `shuffle` says otherwise, and only shuffled images are augmented.
        `preprocessing` takes the place of `image_size` and `channels`; by default images are stretched, with mean and
        standard deviation 0.5.

        Raises `DataError` for a split that does not exist, `ImageError` for an image that cannot be read.

        Example:
            for images, labels in vitral.load_data("digits").loader("train", image_size=32): ...
        """
        loop = importlib.import_module("vitral.data.loop")  # it needs this module
        made: Loader = loop.loader_of(
            self,
            split,
            preprocessing=preprocessing or loop.preprocessing_of(image_size, channels),
            batch_size=batch_size,
            shuffle=split == "train" if shuffle is None else shuffle,
            augmentation=augmentation,
            device=device,
            seed=seed,
            workers=workers,
        )
        return made

    def with_validation(self, fraction: float | None = None, *, seed: int = 0) -> DataSet:
        """Return the data with a "val" split. If there is none, split off the same fraction of every class from train.

        `fraction` is of the training images. None takes 10%, or one image of every class with two or more if these are
        more images, but never more than 2,500 images.
        """
        splits = importlib.import_module("vitral.data.splits")  # it needs this module
        cut: DataSet = splits.with_validation(self, fraction, seed)
        return cut


UNREADABLE = "unreadable"
"""The identity of each image that cannot be read."""


class LazyNames(Sequence[str]):
    """Names built on access, so that millions of them are not held as strings."""

    def name(self, i: int) -> str:
        """Build one name."""
        raise NotImplementedError

    def part(self, which: slice) -> Sequence[str]:
        """A slice of the names, lazy as well."""
        raise NotImplementedError

    def relative(self) -> list[str]:
        """All names, relative to the data's location."""
        raise NotImplementedError

    @property
    def digest(self) -> str | None:
        """A short text that stands for `relative()`, so that millions of names need not be built; None without one."""
        return None

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[str]: ...
    def __getitem__(self, i: int | slice) -> str | Sequence[str]:
        return self.part(i) if isinstance(i, slice) else self.name(i)


@dataclass(frozen=True, eq=False)
class _PickedNames(LazyNames):
    """A selection of names, without a copy of the strings."""

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

    def relative(self) -> list[str]:
        names = relative_names(self.base)
        return [names[i] for i in self.order.tolist()]

    @property
    def digest(self) -> str | None:
        base = self.base.digest if isinstance(self.base, LazyNames) else None
        return base and f"{base} {hashlib.sha256(self.order.astype('<i8').tobytes()).hexdigest()}"


def relative_names(names: Sequence[str]) -> list[str]:
    """Names relative to the data's location: they do not change when the data are moved, or their path is typed in
    another way.
    """
    return names.relative() if isinstance(names, LazyNames | Numbered) else list(names)


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

    def size(self, i: int) -> int:
        return _size(self.base, int(self.index[i]))

    def shard_numbers(self, index: np.ndarray) -> np.ndarray | None:
        numbers = getattr(self.base, "shard_numbers", None)
        return None if numbers is None else numbers(self.index[index])


def _identity(fetch: Fetch, i: int) -> str:
    if (identity := getattr(fetch, "identity", None)) is not None:
        return str(identity(i))
    raw = fetch(i)
    shape = raw.shape if isinstance(raw, np.ndarray) else "encoded"
    data = raw.tobytes() if isinstance(raw, np.ndarray) else raw
    return f"{shape} {hashlib.blake2b(data, digest_size=16).hexdigest()}"


def _size(fetch: Fetch, i: int) -> int:
    if (size := getattr(fetch, "size", None)) is not None:
        return int(size(i))
    raw = fetch(i)
    return raw.nbytes if isinstance(raw, np.ndarray) else len(raw)


@dataclass(frozen=True)
class Numbered(Sequence[str]):
    """Names of images that have only a number: "mnist/train[0]", "mnist/train[1]" …"""

    prefix: str
    total: int

    def __len__(self) -> int:
        return self.total

    def relative(self) -> list[str]:
        """All names without the folder of the data: "train[0]" …"""
        split = self.prefix.rpartition("/")[2]
        return [f"{split}[{number}]" for number in range(self.total)]

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[str]: ...
    def __getitem__(self, i: int | slice) -> str | Sequence[str]:
        numbers = range(self.total)[i]
        return f"{self.prefix}[{numbers}]" if isinstance(numbers, int) else [f"{self.prefix}[{n}]" for n in numbers]


@dataclass(frozen=True, eq=False)
class Pixels:
    """Fetch of images in memory, all of one size."""

    array: np.ndarray
    """uint8 (n, H, W) or (n, H, W, C)."""

    def __call__(self, i: int) -> np.ndarray:
        return self.array[i]


def case_notes(classes: Iterable[str]) -> list[str]:
    """Return a note on class names that differ in case only; none without such names."""
    alike = defaultdict[str, list[str]](list)
    for name in classes:
        alike[name.casefold()].append(name)
    groups = [" and ".join(f"'{name}'" for name in names) for names in alike.values() if len(names) > 1]
    return [f"classes whose names differ only in case: {some(groups, 3)}"] if groups else []


def in_order(splits: Mapping[str, Split]) -> dict[str, Split]:
    """Order the splits: train, val, test."""
    return {split: splits[split] for split in SPLITS if split in splits}
