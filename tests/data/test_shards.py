"""Shards: written once, read by us and by webdataset, killed at any time, damaged in every way."""

from __future__ import annotations

import dataclasses
import gc
import io
import json
import os
import pickle
import shutil
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset
from PIL import Image

import vitral
from images import MakeImages, noise
from running import TINY, as_json, printed, same_bits, weights_of
from vitral.data import DataSet, load
from vitral.data.checks.fingerprint import Fingerprint
from vitral.data.checks.validate import check
from vitral.data.dataset import relative_names
from vitral.data.loader import Batches
from vitral.data.shards import packing, writing
from vitral.data.shards.index import MANIFEST, RECORD, Manifest
from vitral.data.shards.patterns import braces, is_pattern
from vitral.data.shards.reading import sha256_of
from vitral.data.shards.writing import Written, write_shards
from vitral.errors import DataError, ImageError, UsageError

COUNTS = {"train/cat": 9, "train/dog": 7, "val/cat": 2, "val/dog": 3}
SMALL = 12_288
"""Bytes of a shard of four records."""


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    return make_images(COUNTS)


@pytest.fixture
def shards(photos: Path, tmp_path: Path) -> Path:
    write_shards(load(photos), tmp_path / "shards", shard_bytes=SMALL)
    return tmp_path / "shards"


def by_name(dataset: DataSet, split: str) -> dict[str, tuple[str, bytes]]:
    """Relative name → class and bytes of each image."""
    images = dataset[split]
    names = [name.rpartition(":")[2] for name in images.names]
    assert len(set(names)) == len(names)
    return {
        name: (dataset.classes[images.labels[i]], bytes(images.fetch(i)))  # type: ignore[arg-type]
        for i, name in enumerate(names)
    }


def test_the_images_are_those_of_the_folder(photos: Path, shards: Path) -> None:
    dataset = load(shards)
    assert (dataset.name, dataset.classes, list(dataset.splits)) == ("photos", ("cat", "dog"), ["train", "val"])
    for split, count in (("train", 16), ("val", 5)):
        found = by_name(dataset, split)
        assert len(found) == count
        for name, (label, data) in found.items():
            assert name.split("/")[:2] == [split, label]
            assert data == (photos / name).read_bytes()
    assert dataset["train"].names[0].startswith(f"{shards}/train-000000.tar:train/")
    assert len(set(dataset["train"].labels[:5].tolist())) == 2, "a shard has images of all classes"
    assert [p.name for p in sorted(shards.iterdir())] == [
        "shards.json",
        "train-000000.tar",
        "train-000001.tar",
        "train-000002.tar",
        "train-000003.tar",
        "train.index.npy",
        "train.names",
        "val-000000.tar",
        "val-000001.tar",
        "val.index.npy",
        "val.names",
    ]


def test_webdataset_reads_them(photos: Path, shards: Path) -> None:
    urls = str(shards / "train-{000000..000003}.tar")
    with warnings.catch_warnings(category=ResourceWarning, action="ignore"):  # webdataset leaves the last file open
        samples = list(webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode("rgb8"))
        gc.collect()
    dataset = load(shards)
    images = dataset["train"]
    assert [sample["__key__"] for sample in samples] == [f"{n:09}" for n in range(16)]
    for i, sample in enumerate(samples):
        assert np.array_equal(sample["png"], images.image(i))
        assert sample["cls"] == images.labels[i]
        assert sample["json"] == {"name": images.names[i].rpartition(":")[2], "class": dataset.classes[sample["cls"]]}


def test_pixels_become_lossless_files(tmp_path: Path) -> None:
    digits = load("digits")
    few = DataSet("few", digits.classes, {"train": digits["train"].select(range(40))}, "digits")
    write_shards(few, tmp_path / "out")
    again = load(tmp_path / "out")
    places = {name.rpartition(":")[2]: i for i, name in enumerate(again["train"].names)}
    assert again.classes == digits.classes
    for i in range(40):
        j = places[relative_names(few["train"].names)[i]]
        assert np.array_equal(few["train"].image(i), again["train"].image(j))
        assert few["train"].labels[i] == again["train"].labels[j]


def test_equal_arguments_give_equal_bytes(photos: Path, shards: Path, tmp_path: Path) -> None:
    for seed, same in ((0, True), (1, False)):
        write_shards(load(photos), tmp_path / f"again{seed}", shard_bytes=SMALL, seed=seed)
        files = {p.name: p.read_bytes() for p in (tmp_path / f"again{seed}").iterdir()}
        assert (files == {p.name: p.read_bytes() for p in shards.iterdir()}) == same


def test_hashes_are_those_of_the_files(shards: Path) -> None:
    manifest = json.loads((shards / MANIFEST).read_text())
    rows = [row for split in manifest["splits"].values() for row in split["shards"]]
    assert len(rows) == 6
    for name, _, size, digest in rows:
        assert os.path.getsize(shards / name) == size
        assert sha256_of(shards / name) == digest


# ---------------------------------------------------------------- every command takes them


def test_training_on_shards_is_training_on_the_folder_in_the_same_order(
    photos: Path, shards: Path, tmp_path: Path
) -> None:
    """The weights have the same bits if the images come in the order of the shards."""
    images = load(shards)["train"]
    rows = ["file,label,split"]
    for split in ("train", "val"):
        images = load(shards)[split]
        names = [name.rpartition(":")[2] for name in images.names]
        rows += [f"{photos / name},{name.split('/')[1]},{split}" for name in names]
    (tmp_path / "order.csv").write_text("\n".join(rows) + "\n")
    for data, out in ((shards, "a"), (tmp_path / "order.csv", "b")):
        vitral.train(str(data), out=str(tmp_path / out), quiet=True, **{**TINY, "epochs": 2})
    assert same_bits(weights_of(tmp_path / "a"), weights_of(tmp_path / "b"))


def test_commands(photos: Path, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    vitral.train(str(shards), out=run, quiet=True, **TINY)
    of_shards = as_json(capsys, "evaluate", run, str(shards))
    assert of_shards["accuracy"] == as_json(capsys, "evaluate", run, str(photos))["accuracy"]
    checked = as_json(capsys, "data", "check", str(shards))
    assert (checked["images"], checked["invalidates_results"]) == (21, False)
    found = as_json(capsys, "predict", run, str(shards))["predictions"]
    assert len(found) == 21
    pattern = str(shards / "val-*.tar")
    assert as_json(capsys, "predict", run, pattern)["predictions"] == found[16:]
    printed(capsys, "predict", run, str(shards), "--out", str(tmp_path / "rows.csv"))
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 22
    assert len(vitral.load(run)(str(shards))) == 21


def test_the_command_writes_them(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    shutil.rmtree(photos / "val")
    found = as_json(
        capsys, "data", "shard", str(photos), "--out", str(out), "--val-fraction", "0.25", "--shard-mb", "1"
    )
    assert found["splits"]["train"] | {"bytes": 0} == {"shards": 1, "images": 12, "bytes": 0}
    assert found["splits"]["val"]["images"] == 4
    assert list(load(out).splits) == ["train", "val"]
    _, err = printed(capsys, "data", "shard", str(photos), "--out", str(out), code=2)
    assert "already has shards" in err
    _, err = printed(capsys, "data", "shard", str(photos), "--out", str(photos), code=2)
    assert "not empty" in err
    assert (photos / "train").is_dir()
    assert "at least 1" in printed(capsys, "data", "shard", str(photos), "--out", "x", "--shard-mb", "0", code=2)[1]


def test_worker_processes_read_them(shards: Path) -> None:
    import torch

    from vitral.data.images.augmentation import Augmentation
    from vitral.data.images.preprocessing import Preprocessing

    images = load(shards)["train"]
    copied = pickle.loads(pickle.dumps(images.select(range(3, 9)).fetch))  # noqa: S301 - written here
    assert [copied(i) for i in range(6)] == [images.fetch(i) for i in range(3, 9)]
    assert len(pickle.dumps(images.fetch)) < 2000, "the index is mapped again, not copied"
    preprocessing = Preprocessing(image_size=(8, 8), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    batches = Batches(
        images,
        preprocessing,
        batch_size=4,
        device=torch.device("cpu"),
        residency="stream",
        workers=2,
        augmentation=Augmentation(crop="random-resized"),
    )
    try:
        seen = np.concatenate([batch.indices for batch in batches.epoch(0)])
    finally:
        batches.close()
    assert sorted(seen.tolist()) == list(range(16))


# ---------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a-{08..11}.tar", ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]),
        ("a-{8..10}", ["a-8", "a-9", "a-10"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}-{0..1}", ["a-0", "a-1", "b-0", "b-1"]),
        ("plain", ["plain"]),
    ],
)
def test_braces_are_expanded_as_by_shells(text: str, words: list[str]) -> None:
    import braceexpand

    assert braces(text) == words == list(braceexpand.braceexpand(text))
    assert is_pattern(text) == (text != "plain")


def test_a_pattern_selects_shards(shards: Path) -> None:
    whole = load(shards)["train"]
    assert [*load(shards / "train-{000000..000003}.tar")["train"].names] == [*whole.names]
    some = load(f"{shards}/train-{{000001,000003}}.tar")
    assert list(some.splits) == ["train"]
    wanted = [name for name in whole.names if "000001" in name or "000003" in name]
    assert [*some["train"].names] == wanted
    assert load(f"{shards}/*.tar").classes == ("cat", "dog")
    with pytest.raises(DataError, match="not in the index"):
        load(f"{shards}/train-{{000003..000005}}.tar")
    with pytest.raises(DataError, match="matches no file"):
        load(f"{shards}/nothing-*.tar")
    with pytest.raises(UsageError, match="more than"):
        load(f"{shards}/{{0..9999999}}.tar")


# ---------------------------------------------------------------- interruptions


def interrupt_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the writer as Ctrl-C does, before record number `count`."""
    original = packing.ShardWriter.add
    done = []

    def add(self: packing.ShardWriter, record: packing.Record, key: str) -> None:
        if len(done) == count:
            raise KeyboardInterrupt
        done.append(key)
        original(self, record, key)

    monkeypatch.setattr(packing.ShardWriter, "add", add)


@pytest.mark.parametrize("count", [0, 3, 7, 15, 18])
def test_an_interrupted_command_continues_to_the_same_bytes(
    count: int, photos: Path, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "again"
    with monkeypatch.context() as patch:
        interrupt_after(count, patch)
        with pytest.raises(KeyboardInterrupt):
            write_shards(load(photos), out, shard_bytes=SMALL)
    assert not (out / MANIFEST).exists()
    left = sorted(out.glob("*.tar"))
    times = [path.stat().st_mtime_ns for path in left]
    written = write_shards(load(photos), out, shard_bytes=SMALL)
    assert written.kept == len(left)
    assert [path.stat().st_mtime_ns for path in left] == times
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {p.name: p.read_bytes() for p in shards.iterdir()}


def test_an_unfinished_folder_of_other_images_is_refused(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        interrupt_after(9, patch)
        with pytest.raises(KeyboardInterrupt):
            write_shards(load(photos), tmp_path / "out", shard_bytes=SMALL)
    with pytest.raises(UsageError, match="unfinished folder of other shards"):
        write_shards(load(photos), tmp_path / "out", shard_bytes=SMALL, seed=1)


def test_the_unfinished_command_is_printed(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_after(0, monkeypatch)
    _, err = printed(capsys, "data", "shard", str(photos), "--out", str(tmp_path / "out"), code=130)
    assert f"data shard {photos} --out {tmp_path / 'out'}" in err


# ---------------------------------------------------------------- damage


def test_an_unreadable_image_stops_or_is_left_out(photos: Path, tmp_path: Path) -> None:
    bad = photos / "train/cat/4.png"
    bad.write_bytes(bad.read_bytes()[:60])
    with pytest.raises(DataError, match=r"train/cat/4\.png"):
        write_shards(load(photos), tmp_path / "out", shard_bytes=SMALL)
    written = write_shards(load(photos), tmp_path / "out", shard_bytes=SMALL, skip=True)
    assert written.left_out == (str(bad),)
    assert len(load(tmp_path / "out")["train"]) == 15
    shutil.rmtree(tmp_path / "out")
    for path in (photos / "val").rglob("*.png"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="no readable image in the val split"):
        write_shards(load(photos), tmp_path / "out", skip=True)


def flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_every_flipped_bit_of_an_image_is_found(shards: Path) -> None:
    index = Manifest.read(shards).splits["train"]
    record = index.records[2]
    name = load(shards)["train"].names[2]
    flip(shards / "train-000000.tar", int(record["offset"]) + int(record["size"]) // 2)
    images = load(shards)["train"]
    with pytest.raises(ImageError, match="not those that were written") as caught:
        images.image(2)
    assert caught.value.name == name
    found = check(load(shards))
    assert [one.name for one in found.unreadable] == [name]


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:4000])


@pytest.mark.parametrize(("damage", "why"), [(remove, "missing"), (cut, "4,000 bytes instead of")])
def test_a_broken_shard_is_named_and_counted(
    damage: Callable[[Path], None], why: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    count = Manifest.read(shards).splits["train"].shards[1].records
    damage(shards / "train-000001.tar")
    dataset = load(shards)
    assert dataset.notes[0].startswith(f"1 of 4 shards, with {count} images, are broken: train-000001.tar ({why}")
    found = as_json(capsys, "data", "check", str(shards), code=1)
    assert {one["name"].partition(":")[0] for one in found["unreadable"]} == {f"{shards}/train-000001.tar"}
    missing = {one["reason"] for one in found["unreadable"]} == {"train-000001.tar is missing"}
    assert missing == (damage is remove)
    with pytest.raises(DataError, match=r"unreadable images?\n.*\n.*train-000001\.tar"):
        vitral.train(str(shards), out=str(tmp_path / "a"), quiet=True, **TINY)
    run = vitral.train(str(shards), out=str(tmp_path / "b"), quiet=True, bad_images="skip", **TINY)
    assert run.folder.is_dir()


def test_verify_names_the_shards_that_changed(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(capsys, "verify", str(shards))["whole"] is True
    flip(shards / "train-000002.tar", 5)
    (shards / "val-000000.tar").unlink()
    found = as_json(capsys, "verify", str(shards), code=1)["files"]
    damaged = [Path(one["file"]).name for one in found if one["state"] == "damaged"]
    assert (damaged, len(found)) == (["train-000002.tar", "val-000000.tar"], 7)
    flip(shards / MANIFEST, 60)
    assert "damaged" in printed(capsys, "verify", str(shards), code=1)[1]


@pytest.mark.parametrize("file", ["train.index.npy", "train.names", MANIFEST])
def test_a_damaged_index_is_refused(file: str, shards: Path) -> None:
    flip(shards / file, os.path.getsize(shards / file) // 2)
    with pytest.raises(DataError, match="cannot read the index of the shards"):
        load(shards)
    (shards / file).unlink()
    if file != MANIFEST:
        with pytest.raises(DataError, match="cannot read the index of the shards"):
            load(shards)


def test_rows_outside_the_shards_are_refused(shards: Path) -> None:
    index = Manifest.read(shards).splits["train"]
    index.check(classes=2)
    for field, value in (("offset", 1 << 40), ("label", 2), ("name", 1 << 40)):
        rows = index.records.copy()
        rows[field][3] = value
        wrong = type(index)(index.shards, rows, index.names, index.digest)
        with pytest.raises(ValueError, match="rows point outside"):
            wrong.check(classes=2)
    assert RECORD.itemsize == 32


def test_a_shard_outside_the_folder_is_refused(shards: Path, tmp_path: Path) -> None:
    manifest = Manifest.read(shards)
    index = manifest.splits["val"]
    outside = dataclasses.replace(index.shards[0], name="../photos.tar")
    moved = type(index)((outside, index.shards[1]), index.records, index.names, index.digest)
    Manifest(manifest.name, manifest.classes, {"val": moved}).save(tmp_path / "evil")
    with pytest.raises(DataError, match="outside the folder"):
        load(tmp_path / "evil")


# ---------------------------------------------------------------- fingerprints


def test_fingerprints_notice_other_images(photos: Path, shards: Path, tmp_path: Path) -> None:
    def of(folder: Path) -> Fingerprint:
        dataset = load(folder)
        return Fingerprint.of(dataset, dataset)

    moved = shutil.copytree(shards, tmp_path / "elsewhere")
    assert of(moved) == of(shards)
    (photos / "train/cat/0.png").unlink()
    write_shards(load(photos), tmp_path / "other", shard_bytes=SMALL)
    assert of(shards).changes(of(tmp_path / "other")) == ("1 training image of 'cat' fewer",)


# ---------------------------------------------------------------- shards of other programs


def test_shards_without_an_index(photos: Path, shards: Path) -> None:
    """The names and classes are in the shards, too."""
    before = {split: by_name(load(shards), split) for split in ("train", "val")}
    for path in shards.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    dataset = load(shards)
    assert {split: by_name(dataset, split) for split in ("train", "val")} == before
    assert dataset.classes == ("cat", "dog")
    again = load(shards)
    assert again["train"].fetch.index.files is not None, "the index is read from the cache"  # type: ignore[attr-defined]
    assert sorted(load(shards / "train-*.tar")["train"].labels.tolist()) == sorted(dataset["train"].labels.tolist())


def write_foreign(path: Path, labels: list[str], suffix: str = "cls") -> None:
    """Write a shard with webdataset's own writer."""
    with webdataset.TarWriter(str(path), encoder=False) as sink:
        for i, label in enumerate(labels):
            pixels = Image.fromarray(noise(i))
            pixels.save(path.with_suffix(".png"))
            data = path.with_suffix(".png").read_bytes()
            sink.write({"__key__": f"a/{i:04}", "png": data, suffix: label.encode()})
    path.with_suffix(".png").unlink()


def test_shards_by_webdataset(tmp_path: Path) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    write_foreign(folder / "set-train-0000.tar", ["0", "10", "2"])
    write_foreign(folder / "set-train-0001.tar", ["2"])
    write_foreign(folder / "set-validation-0000.tar", ["2", "10"])
    dataset = load(folder)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 4, "val": 2}
    assert dataset.classes == ("0", "2", "10")
    assert dataset["train"].labels.tolist() == [0, 2, 1, 1]
    assert np.array_equal(dataset["train"].image(1), noise(1))
    assert dataset["train"].names[3] == f"{folder}/set-train-0001.tar:a/0000"
    (folder / "classnames.txt").write_text("\n".join(f"kind {n}" for n in range(11)))
    assert load(folder).classes == ("kind 0", "kind 2", "kind 10")


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(seed)).save(file, "PNG")
    return file.getvalue()


def write_members(path: Path, *members: tuple[str, bytes]) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return path


def test_every_image_of_a_shard_is_read_or_counted(tmp_path: Path) -> None:
    """Dots in names, a name twice, two images of a key, a mask, images without a class, files without an image."""
    write_members(
        tmp_path / "s/train-0.tar",
        ("p0.png", png(0)),
        ("p0.cls", b"0"),
        ("p0.1.png", png(1)),
        ("p0.1.cls", b"1"),
        ("p0.2.png", png(2)),
        ("p0.seg.png", png(3)),
        ("p1.png", png(4)),
        ("p1.jpeg", png(5)),
        ("p1.cls", b"1"),
        ("p2.png", png(6)),
        ("p3.png", png(7)),
        ("p3.cls", b"-1"),
        ("p4.png", png(8)),
        ("p4.cls", b"nan"),
        ("p5.txt", b"a"),
        ("p6.png", png(9)),
        ("p6.cls", b"0"),
        ("p6.png", png(10)),
    )
    dataset = load(tmp_path / "s")
    names = [name.rpartition(":")[2] for name in dataset["train"].names]
    assert names == ["p0", "p0.1", "p1", "p6"]
    for i, seed in enumerate((0, 1, 4, 10)):
        assert np.array_equal(dataset["train"].image(i), noise(seed))
    assert dataset["train"].labels.tolist() == [0, 1, 1, 0]
    assert set(dataset.notes) == {
        "3 images beside another of the same key are not used: train-0.tar:p0.2.png, train-0.tar:p0.seg.png, "
        "train-0.tar:p1.jpeg",
        "3 images without a class are not used: train-0.tar:p2.png, train-0.tar:p3.png, train-0.tar:p4.png",
        "1 record without an image is not used: train-0.tar:p5",
        "1 file whose name comes again is not used: train-0.tar:p6.png",
    }


def test_a_shard_that_was_cut_off_is_noted(tmp_path: Path) -> None:
    path = write_members(tmp_path / "s/0.tar", ("a.png", png(0)), ("a.cls", b"0"), ("b.png", png(1)), ("b.cls", b"1"))
    size = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(tarfile.BLOCKSIZE * (sum(-(-len(png(i)) // 512) + 3 for i in (0, 1))))
    assert path.stat().st_size < size
    assert load(path.parent).notes == ("1 shard without an end mark, perhaps cut off: 0.tar",)


def test_a_file_of_an_unknown_split_is_refused(tmp_path: Path) -> None:
    for name in ("train-0", "heldout-0"):
        write_foreign_in(tmp_path / "s" / f"{name}.tar", ["0", "1"])
    with pytest.raises(DataError, match="1 file of an unknown split") as caught:
        load(tmp_path / "s")
    assert caught.value.why == "heldout-0.tar, beside train"
    assert len(load(tmp_path / "s/train-*.tar")["train"]) == 2


def write_foreign_in(path: Path, labels: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    write_foreign(path, labels)


def test_names_of_classes_beside_the_shards_are_read_anew(tmp_path: Path) -> None:
    write_foreign_in(tmp_path / "s/train-0.tar", ["0", "1"])
    for names in (("ant", "bee"), ("cat", "dog")):
        (tmp_path / "s/classnames.txt").write_text("\n".join(names))
        assert load(tmp_path / "s").classes == names
    (tmp_path / "s/classnames.txt").unlink()
    assert load(tmp_path / "s").classes == ("0", "1")


def test_a_folder_with_brackets_is_no_pattern(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_foreign_in(Path("[x]/train-0.tar"), ["0", "1"])
    write_foreign_in(Path("x/train-0.tar"), ["2", "3"])
    for data in ("[x]", "[x]/train-*.tar", "[x]/train-{0..0}.tar"):
        assert load(data).classes == ("0", "1")
    assert load("?/train-0.tar").classes == ("2", "3")


def test_shards_without_labels_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "captions"
    folder.mkdir()
    write_foreign(folder / "0.tar", ["a cat", "a dog"], suffix="txt")
    with pytest.raises(DataError, match="no labeled images"):
        load(folder)
    (folder / "0.tar").write_bytes(b"nothing" * 1000)
    with pytest.raises(DataError, match="cannot read archive"):
        load(folder)
    with tarfile.open(folder / "0.tar", "w"):
        pass
    with pytest.raises(DataError, match="no labeled images"):
        load(folder)


def test_result_as_plain_data(tmp_path: Path) -> None:
    written = Written(tmp_path, {"train": (2, 30, 4000)}, 1, ("a",))
    assert json.loads(json.dumps(written.to_json()))["splits"]["train"] == {"shards": 2, "images": 30, "bytes": 4000}
    assert writing.SHARD_BYTES == 1 << 28
