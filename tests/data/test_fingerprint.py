"""Fingerprint of a data set: independent of its location, changed by everything except pixels."""

from __future__ import annotations

import dataclasses
import json
import shutil
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from images import MakeImages
from vitral.data import DataSet, Split, load
from vitral.data.checks.fingerprint import Fingerprint
from vitral.data.splits import with_validation

FOLDERS = {"train/cat": 6, "train/dog": 4, "test/cat": 2, "test/dog": 2}


def of(data: object) -> Fingerprint:
    dataset = load(data)  # type: ignore[arg-type]
    return Fingerprint.of(dataset, with_validation(dataset))


def listed(names: list[str], labels: list[int], classes: tuple[str, ...]) -> DataSet:
    """A data set of these names, which fails if an image is read."""

    def fetch(number: int) -> bytes:
        raise AssertionError(f"image {number} was read")

    return DataSet("made", classes, {"train": Split(names, np.array(labels, np.int64), fetch)}, "made")


def changes(before: DataSet, after: DataSet) -> tuple[str, ...]:
    return Fingerprint.of(before, before).changes(Fingerprint.of(after, after))


def test_json_round_trip(make_images: MakeImages) -> None:
    contents = of(make_images(FOLDERS))
    again = Fingerprint.from_json(json.loads(json.dumps(contents.to_json())))
    assert again == contents
    assert contents.changes(again) == ()
    assert contents.classes == ("cat", "dog")
    assert contents.images == {"train": (6, 4), "test": (2, 2)}
    assert list(contents.digests) == ["train", "val", "test"]
    assert contents.cuts_validation
    assert len(json.dumps(contents.to_json())) < 500, "no entries for single images"


@pytest.mark.parametrize("move", ["folder", "around", "tar", "relative"])
def test_moving_the_data_changes_nothing(
    make_images: MakeImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, move: str
) -> None:
    folder, elsewhere = make_images(FOLDERS), tmp_path / "else/where"
    before = of(folder)
    elsewhere.parent.mkdir()
    if move == "tar":
        elsewhere = elsewhere.with_suffix(".tar")
        with tarfile.open(elsewhere, "w") as tar:
            tar.add(folder, arcname="renamed")
    else:
        shutil.move(folder, elsewhere)
    if move == "relative":
        monkeypatch.chdir(elsewhere)
    assert of({"around": elsewhere.parent, "relative": "."}.get(move, elsewhere)) == before


def test_a_table_may_have_relative_and_absolute_paths(
    make_images: MakeImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its paths may be absolute; the table's own path does not matter."""
    folder = make_images({"a": 4, "b": 4})
    rows = [f"{folder if number < 2 else '.'}/{label}/{number}.png,{label}" for label in "ab" for number in range(4)]
    table = folder / "labels.csv"
    table.write_text("\n".join(["file,label", *rows]) + "\n")
    whole = of(table)
    monkeypatch.chdir(folder)
    assert of("labels.csv") == whole
    table.write_text("\n".join(["file,label", *rows[1:], rows[0]]) + "\n")
    assert of("labels.csv").digests["train"] != whole.digests["train"], "the order decides what is learned when"


@pytest.mark.parametrize("name", ["digits", "planted"])
def test_sets_by_name(name: str) -> None:
    assert of(name) == of(name)
    assert of(name).classes == load(name).classes


def test_idx_files_in_a_renamed_folder(tmp_path: Path) -> None:
    folder, labels = tmp_path / "one", bytes(range(8))
    folder.mkdir()
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte").write_bytes(struct.pack(">HBB3I", 0, 8, 3, 16, 2, 2) + bytes(64))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 16) + 2 * labels)
    before = of(folder)
    assert of(shutil.copytree(folder, tmp_path / "renamed")) == before
    (folder / "t10k-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, 16) + labels + labels[::-1])
    assert before.changes(of(folder)), "images that have only a number may have other labels"


def test_splits_are_hashed_independently(make_images: MakeImages) -> None:
    folder = make_images(FOLDERS)
    before = of(folder)
    shutil.copytree(folder / "train/dog", folder / "train/bird")  # every label after it is another number
    after = of(folder)
    assert after.digests["test"] == before.digests["test"]
    assert after.digests["train"] != before.digests["train"]


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "fewer": (lambda root: (root / "train/cat/5.png").unlink(), "1 training image of 'cat' fewer"),
    "more": (lambda root: shutil.copy(root / "test/cat/1.png", root / "test/cat/9.png"), "1 test image of 'cat' more"),
    "class is renamed": (
        lambda root: [(root / s / "dog").rename(root / s / "wolf") for s in ("train", "test")],
        "class 'dog' is now 'wolf'",
    ),
    "class is new": (lambda root: shutil.copytree(root / "train/dog", root / "train/bird"), "class 'bird' is new"),
    "relabeled": (
        lambda root: (root / "train/cat/5.png").rename(root / "train/dog/5.png"),
        "1 training image of 'cat' fewer; 1 training image of 'dog' more",
    ),
    "file is renamed": (
        lambda root: (root / "train/cat/5.png").rename(root / "train/cat/x.png"),
        "as many images of each class, but under other names, in another order or split otherwise",
    ),
    "no test": (lambda root: shutil.rmtree(root / "test"), "there are no test images any more"),
    "own validation": (
        lambda root: shutil.copytree(root / "test", root / "val"),
        "there are separate validation images now",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_are_reported(make_images: MakeImages, name: str) -> None:
    change, said = CHANGES[name]
    folder = make_images(FOLDERS)
    before = of(folder)
    change(folder)
    assert "; ".join(before.changes(of(folder))) == said
    assert before.changes(before) == ()


def test_long_lists_are_cut() -> None:
    many = [f"{kind}/{number}.jpg" for kind in "abcde" for number in range(1500)]
    labels = np.repeat(np.arange(5), 1500).tolist()
    before = listed(many, labels, tuple("abcde"))
    fewer = listed(many[1::2], labels[1::2], tuple("abcde"))
    assert changes(before, fewer) == ("3,750 images fewer (750 of 'a', 750 of 'b', 750 of 'c' and 2 more)",)
    gone, new = changes(before, listed(many, labels, tuple("vwxyz")))
    assert gone == "classes 'a', 'b', 'c' and 2 more are gone"
    assert new == "classes 'v', 'w', 'x' and 2 more are new"
    turned = dataclasses.replace(before, classes=tuple("edcba"))
    assert changes(before, turned) == ("the classes are in another order",)


def test_undecodable_and_similar_names() -> None:
    names = ["a/\udcff.png", "b/1\n.png", "b/c/2.png"]
    before = listed(names, [0, 1, 1], ("a", "b"))
    assert changes(before, listed(names, [0, 1, 1], ("a", "b"))) == ()
    assert changes(before, listed([*names[:2], "b/c2.png"], [0, 1, 1], ("a", "b")))
    assert changes(listed(["x/1", "y/12"], [0, 1], ("x", "y")), listed(["x/11", "y/2"], [0, 1], ("x", "y")))


def test_the_validation_split_depends_on_the_seed() -> None:
    dataset = load("digits")
    cut, same, other = (Fingerprint.of(dataset, with_validation(dataset, 0.2, seed)) for seed in (0, 0, 1))
    assert cut == same
    assert cut.images == other.images
    assert cut.digests["test"] == other.digests["test"]
    assert {"train", "val"} == {split for split in cut.digests if cut.digests[split] != other.digests[split]}
    assert not Fingerprint.of(dataset, dataset).cuts_validation
