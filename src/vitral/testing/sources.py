"""The contract of a source of data (`vitral.sources`)."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from vitral.data import DataSet, Split
from vitral.data import load as load_data
from vitral.data.dataset import SPLITS
from vitral.errors import VitralError, type_of
from vitral.wording import natural

_OTHERS = ("digits", "no-such-data", "photos/", "a.csv", "")
"""Arguments that belong to other sources, or to none."""


class SourceContract:
    """Inherit, and set `source` and `data`, or `make_data` for data in files."""

    source: Any
    """The module, or any object, with `accepts` and `load`."""
    data: str = ""
    """An argument that the source accepts."""
    refused: Sequence[str] = ()
    """Arguments that the source accepts by their form, and cannot load."""
    others: Sequence[str] = _OTHERS
    """Arguments that the source does not accept."""

    def make_data(self, folder: Path) -> str:
        """Write data into an empty folder, if they are files, and return the argument for them."""
        return self.data

    def _load(self, folder: Path) -> DataSet:
        loaded = self.source.load(self.make_data(folder), root=folder, download=False)
        assert isinstance(loaded, DataSet), f"load returned {type_of(loaded)}"
        return loaded

    def test_it_accepts_its_own_arguments_alone(self, tmp_path: Path) -> None:
        assert self.source.accepts(self.make_data(tmp_path)) is True
        assert [other for other in self.others if self.source.accepts(other)] == []

    def test_labels_belong_to_classes(self, tmp_path: Path) -> None:
        dataset = self._load(tmp_path)
        assert dataset.splits, "no splits"
        assert set(dataset.splits) <= set(SPLITS), f"splits are named {', '.join(SPLITS)}"
        assert list(dataset.classes) == sorted(set(dataset.classes), key=natural), "classes: unique, in natural order"
        for split in dataset.splits.values():
            assert split.labels.dtype == np.int64, "labels are int64"
            assert split.labels.shape == (len(split),)
            assert 0 <= split.labels.min() <= split.labels.max() < len(dataset.classes)
            assert len(set(split.names)) == len(split.names), "each image has its own name"

    def test_images_are_decoded_the_same_every_time(self, tmp_path: Path) -> None:
        for split, index in _probes(self._load(tmp_path)):
            image = split.image(index)
            assert image.dtype == np.uint8
            assert image.ndim == 3
            assert image.shape[2] in (1, 3)
            assert np.array_equal(image, split.image(index)), f"{split.names[index]} changes"
            assert split.image(index, 3).shape[2] == 3
            assert split.identity(index) == split.identity(index)

    def test_loading_again_gives_the_same(self, tmp_path: Path) -> None:
        first = self._load(_empty(tmp_path, "a"))
        again = self.source.load(self.make_data(_empty(tmp_path, "b")), root=tmp_path / "b", download=False)
        assert (first.classes, list(first.splits)) == (again.classes, list(again.splits))
        for name, split in first.splits.items():
            assert np.array_equal(split.labels, again[name].labels)
            assert np.array_equal(split.image(0), again[name].image(0))

    def test_images_are_read_by_other_processes_and_threads(self, tmp_path: Path) -> None:
        """Workers receive the split as bytes: a function inside a function cannot be sent."""
        probes = _probes(self._load(tmp_path))
        for split, index in probes:
            sent: Split = pickle.loads(pickle.dumps(split))  # noqa: S301 - written on this line
            assert np.array_equal(sent.image(index), split.image(index))
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(lambda one: one[0].image(one[1]), probes * 8))
        assert all(np.array_equal(a, b) for a, b in zip(together, together[: len(probes)] * 8, strict=True))

    def test_images_are_read_after_a_fork(self, tmp_path: Path) -> None:
        """Workers are forked from a process that has read images: what it has open is open in each of them, too."""
        if "fork" not in multiprocessing.get_all_start_methods():
            return
        probes = _probes(self._load(tmp_path))
        wanted = [split.image(index) for split, index in probes]
        context = multiprocessing.get_context("fork")
        equal = context.Queue()

        def read() -> None:
            for (split, index), image in zip(probes * 4, wanted * 4, strict=True):
                equal.put(np.array_equal(split.image(index), image))

        processes = [context.Process(target=read) for _ in range(2)]
        for process in processes:
            process.start()
        found = [equal.get(timeout=60) for _ in range(2 * 4 * len(probes))]
        for process in processes:
            process.join()
        assert all(found)

    def test_vitral_finds_it(self, tmp_path: Path) -> None:
        """The package is installed, and no earlier source takes its argument."""
        data = self.make_data(tmp_path)
        found = load_data(data, root=tmp_path, download=False)
        assert found.source == data
        assert found.classes == self.source.load(data, root=tmp_path, download=False).classes

    def test_what_cannot_be_loaded_is_refused_in_five_lines(self, tmp_path: Path) -> None:
        for data in self.refused:
            error = self._refusal(data, tmp_path)
            assert error is not None, f"'{data}' was loaded"
            assert len(str(error).splitlines()) <= 5, str(error)

    def _refusal(self, data: str, folder: Path) -> VitralError | None:
        try:
            self.source.load(data, root=folder, download=False)
        except VitralError as error:
            return error
        return None


def _probes(dataset: DataSet) -> list[tuple[Split, int]]:
    """Return the first and the last image of each split."""
    return [(split, index) for split in dataset.splits.values() for index in (0, len(split) - 1)]


def _empty(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
