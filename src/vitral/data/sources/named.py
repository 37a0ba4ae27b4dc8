"""Well-known sets by name: read from a root folder in any supported layout, else downloaded by torchvision.

Search order: torchvision's own download under ROOT; ROOT/NAME (a folder), ROOT/NAME.tar, .zip or .tar.gz; for the IDX
sets ROOT itself. Then torchvision downloads into ROOT and verifies checksums.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from vitral.data.archives import ARCHIVES, open_files
from vitral.data.dataset import DataSet, Numbered, Pixels, Split
from vitral.data.files import Folder, FolderFetch, Names
from vitral.data.images.lazy_torchvision import torchvision
from vitral.data.sources import idx
from vitral.data.sources.layout import read_layout
from vitral.errors import DataError
from vitral.wording import natural

TIMEOUT = 30.0
"""Timeout of a download's connection, in seconds."""

FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
"""Classes of Fashion-MNIST by number (Xiao, Rasul and Vollgraf 2017, table 2)."""


@dataclass(frozen=True)
class Named:
    """One well-known set."""

    fetch: Callable[[Path, bool], DataSet]
    """(root, download) -> the set by torchvision; raises if it is not available."""
    by_hand: str
    """Files to put under the root by hand."""
    is_idx: bool = False
    classes: tuple[str, ...] | None = None
    """Names for IDX labels 0, 1, 2 …"""


def accepts(data: str) -> bool:
    """True for the name of a set, in any spelling: "fashion-mnist", "FashionMNIST"."""
    return _spelling(data) in {_spelling(name) for name in NAMED}


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """Load the set from `root` or from the network."""
    name = next(name for name in NAMED if _spelling(name) == _spelling(data))
    named = NAMED[name]
    with contextlib.suppress(OSError, RuntimeError):  # torchvision raises these if the set is not there
        return _fetch(named, root, False)
    if (local := _find_local(name, named, root)) is not None:
        classes = named.classes if named.classes and local.classes == tuple("0123456789") else local.classes
        return replace(local, name=name, classes=classes)
    why = f"not under '{root}', and downloading is off"
    if download:
        new = not root.exists()
        try:
            return _fetch(named, root, True)
        except (OSError, RuntimeError, ValueError, EOFError) as error:
            why = f"not under '{root}', and it could not be downloaded: {error}"
            if new:
                _remove_empty(root)
    hint = f"put {named.by_hand} into '{root}', or give its location with --data-root DIR"
    raise DataError(f"cannot get the data set '{name}'", where=str(root), why=why, hint=hint)


def _spelling(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _find_local(name: str, named: Named, root: Path) -> DataSet | None:
    """Find the set under the root, put there by hand; None if it is not there."""
    folder = root / name
    if folder.is_dir() and Folder(str(folder)).paths:
        return read_layout(Folder(str(folder)), name)
    for extension in ARCHIVES:
        if (archive := root / (name + extension)).is_file():
            return read_layout(open_files(str(archive)), name)
    # MNIST and Fashion-MNIST have the same file names; the folder's name may tell them apart.
    if named.is_idx and root.is_dir() and ("fashion" in name) == ("fashion" in root.resolve().name.lower()):
        return idx.read(FlatFolder(str(root)), name)
    return None


class FlatFolder(Folder):
    """The files of one folder without its subfolders."""

    @property
    def paths(self) -> list[str]:
        return sorted(entry.name for entry in os.scandir(self.root) if entry.is_file())


def _fetch(named: Named, root: Path, download: bool) -> DataSet:
    """Get torchvision's set, with its output on standard error and a timeout."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(TIMEOUT)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return named.fetch(root, download)
    finally:
        socket.setdefaulttimeout(before)


def _remove_empty(root: Path) -> None:
    """Remove the empty folders that torchvision creates before a download."""
    for folder, _, _ in os.walk(root, topdown=False):
        with contextlib.suppress(OSError):  # it is not empty
            os.rmdir(folder)


def _in_memory(maker: str, name: str, classes: tuple[str, ...] | None = None) -> Callable[[Path, bool], DataSet]:
    """Build a loader for a set that torchvision holds as one array of pixels, with train and test splits."""

    def fetch(root: Path, download: bool) -> DataSet:
        datasets = torchvision().datasets

        splits = {}
        for split in ("train", "test"):
            data = getattr(datasets, maker)(str(root), train=split == "train", download=download)
            pixels, labels = np.asarray(data.data), np.asarray(data.targets, np.int64)
            splits[split] = Split(Numbered(f"{name}/{split}", len(labels)), labels, Pixels(pixels))
        return DataSet(name, classes or tuple(data.classes), splits, name)

    return fetch


def _places365(root: Path, download: bool) -> DataSet:
    """Load the 36,500 small images of the validation split as train split (the write-up uses a random part of it)."""
    datasets = torchvision().datasets

    data = datasets.Places365(str(root), split="val", small=True, download=download)
    if not all(os.path.isfile(path) for path, _ in (data.imgs[0], data.imgs[-1])):
        raise FileNotFoundError("the lists of Places365 are there, but not its images")
    classes = tuple(sorted((name[3:] for name in data.classes), key=natural))  # "/a/airfield" -> "airfield"
    position = {name: i for i, name in enumerate(classes)}
    labels = np.array([position[data.classes[target][3:]] for _, target in data.imgs], np.int64)
    notes = ("the validation split of Places365 (small images) is used as train split",)
    return DataSet(
        "places365", classes, {"train": _on_disk([path for path, _ in data.imgs], labels)}, "places365", notes
    )


def _imagenet(root: Path, download: bool) -> DataSet:
    """Load the 2012 classification set from its official archives in ROOT/imagenet, where torchvision unpacks them."""
    datasets = torchvision().datasets

    if not (root / "imagenet" / "ILSVRC2012_devkit_t12.tar.gz").is_file():
        raise FileNotFoundError("ImageNet cannot be downloaded without an account at image-net.org")
    splits = {}
    for split in ("train", "val"):
        data = datasets.ImageNet(str(root / "imagenet"), split=split)
        splits[split] = _on_disk([path for path, _ in data.samples], np.asarray(data.targets, np.int64))
    return DataSet("imagenet", tuple(", ".join(names) for names in data.classes), splits, "imagenet")


def _on_disk(paths: list[str], labels: np.ndarray) -> Split:
    return Split(Names("", paths), labels, FolderFetch(os.getcwd(), paths))


NAMED: Mapping[str, Named] = {
    "mnist": Named(
        _in_memory("MNIST", "mnist", tuple("0123456789")),
        "its four .gz files, in a folder mnist/,",
        is_idx=True,
    ),
    "fashion-mnist": Named(
        _in_memory("FashionMNIST", "fashion-mnist", FASHION),
        "its four .gz files, in a folder fashion-mnist/,",
        is_idx=True,
        classes=FASHION,
    ),
    "cifar10": Named(_in_memory("CIFAR10", "cifar10"), "cifar-10-batches-py/, or cifar10.tar with class folders,"),
    "cifar100": Named(_in_memory("CIFAR100", "cifar100"), "cifar-100-python/, or cifar100.tar with class folders,"),
    "places365": Named(_places365, "val_256/, places365_val.txt and categories_places365.txt"),
    "imagenet": Named(_imagenet, "imagenet/train/CLASS/ and imagenet/val/CLASS/"),
}
