"""Every source keeps the contract that packages test theirs by, and the contract refuses broken ones."""

from __future__ import annotations

import dataclasses
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from images import noise
from vitral.data import SOURCES, DataSet, Split, load
from vitral.data.shards.writing import write_shards
from vitral.data.tables_in_memory import as_path
from vitral.testing import SourceContract


def photos(folder: Path) -> Path:
    """Write a folder of two classes with train and test."""
    for seed, path in enumerate(
        f"{split}/{name}/{n}.png" for split in ("train", "test") for name in "ab" for n in "12"
    ):
        (folder / "photos" / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(seed)).save(folder / "photos" / path)
    return folder / "photos"


class TestFolder(SourceContract):
    source = SOURCES["folder"]
    others = ("digits", "a.csv", "s3://photos", "a.tar")

    def make_data(self, folder: Path) -> str:
        return str(photos(folder))


class TestTable(SourceContract):
    source = SOURCES["csv"]
    others = ("digits", "photos/", "a.tar")

    def make_data(self, folder: Path) -> str:
        rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in sorted(photos(folder).rglob("*.png"))]
        (folder / "photos.csv").write_text("\n".join(["file,label", *rows]))
        return str(folder / "photos.csv")


class TestArchive(SourceContract):
    source = SOURCES["archive"]

    def make_data(self, folder: Path) -> str:
        with tarfile.open(folder / "photos.tar", "w") as tar:
            tar.add(photos(folder), "photos")
        return str(folder / "photos.tar")


class TestShards(SourceContract):
    source = SOURCES["shards"]

    def make_data(self, folder: Path) -> str:
        write_shards(load(photos(folder)), folder / "shards")
        return str(folder / "shards")


class TestParquet(SourceContract):
    source = SOURCES["parquet"]

    def make_data(self, folder: Path) -> str:
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        files = sorted(photos(folder).rglob("*.png"))
        images = [{"bytes": path.read_bytes(), "path": path.name} for path in files]
        parquet.write_table(
            arrow.table({"image": images, "label": [path.parent.name for path in files]}), folder / "a.parquet"
        )
        return str(folder / "a.parquet")


class TestDigits(SourceContract):
    source = SOURCES["digits"]
    data = "digits"
    others = ("photos/", "a.csv", "digit", "")


class TestNamed(SourceContract):
    source = SOURCES["named"]
    data = "cifar10"

    def make_data(self, folder: Path) -> str:
        photos(folder).rename(folder / "cifar10")
        return "cifar10"


class TestMemory(SourceContract):
    source = SOURCES["memory"]
    others = ("digits", "here", "here.csv", "a.csv", "")

    def make_data(self, folder: Path) -> str:
        return as_path((np.stack([noise(seed) for seed in range(4)]), ["a", "b", "a", "b"]))


class TestPlanted(SourceContract):
    source = SOURCES["planted"]
    data = "planted"


def test_every_source_has_a_contract_here() -> None:
    tested = [one.source for one in SourceContract.__subclasses__() if one.__module__ == __name__]
    left = {name for name, source in SOURCES.items() if source not in tested}
    assert left == {"remote"}  # an object store: tests/data/test_remote_shards.py


def broken(**changes: Any) -> SimpleNamespace:
    """A source of four images; `changes` replace fields of its split or, as `classes`, of its data set."""

    def loaded(data: str, *, root: Path, download: bool) -> DataSet:
        pixels = np.stack([noise(seed) for seed in range(4)])
        split = Split([f"{n}.png" for n in "abcd"], np.array([0, 0, 1, 1]), pixels.__getitem__)
        fields = {name: value for name, value in changes.items() if name != "classes"}
        train = dataclasses.replace(split, **fields)
        return DataSet("x", changes.get("classes", ("a", "b")), {"train": train}, data)

    return SimpleNamespace(accepts=lambda data: data.startswith("x:"), load=loaded)


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (broken(classes=("b", "a")), "test_labels_belong_to_classes"),
        (broken(labels=np.array([0, 0, 1, 2])), "test_labels_belong_to_classes"),
        (broken(names=["a"] * 4), "test_labels_belong_to_classes"),
        (broken(fetch=lambda n: noise(n)), "test_images_are_read_by_other_processes_and_threads"),
        (broken(fetch=lambda n: np.random.bytes(8)), "test_images_are_decoded_the_same_every_time"),
        (SimpleNamespace(accepts=lambda data: True, load=broken().load), "test_it_accepts_its_own_arguments_alone"),
        (broken(), "test_what_cannot_be_loaded_is_refused_in_five_lines"),
    ],
)
def test_the_contract_refuses_a_broken_source(source: Any, test: str, tmp_path: Path) -> None:
    contract = type("TestX", (SourceContract,), {"source": source, "data": "x:", "refused": ("x:bad",)})
    check: Callable[[Path], None] = getattr(contract(), test)
    with pytest.raises(Exception):  # noqa: B017, PT011 - any failure of a test
        check(tmp_path)
