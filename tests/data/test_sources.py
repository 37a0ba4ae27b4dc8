from __future__ import annotations

import csv
import io
import os
import pickle
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from images import MakeImages, noise
from vitral.data import SOURCES, DataSet, load
from vitral.data.checks.validate import check
from vitral.data.sources.layout import LAYOUTS
from vitral.errors import DataError, ImageError, UsageError, VitralError
from vitral.wording import natural, shown

SPLIT_FOLDERS = {"train/cat": 3, "train/dog": 2, "val/cat": 1, "val/dog": 1, "test/dog": 2}


def refusal(data: object, **options: object) -> str:
    """The message of the refusal, after the checks that every refusal must pass."""
    with pytest.raises(VitralError) as caught:
        load(data, **{"download": False, "root": "nowhere", **options})  # type: ignore[arg-type]
    assert not isinstance(caught.value, ImageError)
    message = str(caught.value)
    assert len(message.splitlines()) <= 5
    return message


def pack_tar(folder: Path, name: str, mode: str = "w") -> Path:
    archive = folder.parent / name
    with tarfile.open(archive, mode) as tar:
        tar.add(folder, arcname=folder.name)
    return archive


def pack_zip(folder: Path, name: str = "photos.zip", compression: int = zipfile.ZIP_DEFLATED) -> Path:
    archive = folder.parent / name
    with zipfile.ZipFile(archive, "w", compression) as packed:
        for path in sorted(folder.rglob("*")):
            packed.write(path, path.relative_to(folder.parent))
    return archive


def tar_of(path: Path, *members: tuple[tarfile.TarInfo, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for info, data in members:
            info.size = len(data) if data else info.size
            tar.addfile(info, io.BytesIO(data))
    return path


def png(seed: int = 0) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(seed)).save(file, "PNG")
    return file.getvalue()


def same(a: DataSet, b: DataSet) -> bool:
    return (
        (a.name, a.classes, list(a.splits)) == (b.name, b.classes, list(b.splits))
        and all(np.array_equal(a[s].labels, b[s].labels) for s in a.splits)
        and all(np.array_equal(a[s].image(i), b[s].image(i)) for s in a.splits for i in range(len(a[s])))
    )


# ---------------------------------------------------------------- class folders


def test_class_folders_without_splits_are_train(make_images: MakeImages) -> None:
    folder = make_images({"dog": 2, "cat": 3})
    dataset = load(folder)
    assert (dataset.name, dataset.classes, dataset.source) == ("photos", ("cat", "dog"), str(folder))
    assert list(dataset.splits) == ["train"]
    assert dataset["train"].labels.tolist() == [0, 0, 0, 1, 1]
    assert dataset["train"].labels.dtype == np.int64
    assert dataset["train"].names[0] == f"{folder}/cat/0.png"
    assert np.array_equal(dataset["train"].image(0), np.asarray(Image.open(folder / "cat/0.png")))


@pytest.mark.parametrize(
    ("train", "val", "test"),
    [("train", "val", "test"), ("training", "validation", "testing"), ("Train", "valid", "TEST")],
)
def test_split_folders_by_any_name(make_images: MakeImages, train: str, val: str, test: str) -> None:
    counts = {f"{train}/a": 2, f"{train}/b": 2, f"{val}/a": 1, f"{test}/b": 3}
    dataset = load(make_images(counts))
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 4, "val": 1, "test": 3}
    assert dataset["test"].labels.tolist() == [1, 1, 1]


@pytest.mark.parametrize("wrapping", ["hymenoptera", "a/b/c", "my photos/data"])
def test_single_wrapping_folders_are_skipped(make_images: MakeImages, wrapping: str) -> None:
    dataset = load(make_images({f"{wrapping}/{folder}": n for folder, n in SPLIT_FOLDERS.items()}))
    assert dataset.classes == ("cat", "dog")
    assert list(dataset.splits) == ["train", "val", "test"]
    plain = load(make_images({f"{wrapping}/x": 1, f"{wrapping}/y": 1}, name="plain"))
    assert plain.classes == ("x", "y")


def test_only_a_train_folder(make_images: MakeImages) -> None:
    assert load(make_images({"train/a": 1, "train/b": 1})).classes == ("a", "b")


def test_a_class_called_train_stays_a_class(make_images: MakeImages) -> None:
    dataset = load(make_images({"train": 2, "car": 2, "bus": 1}))
    assert dataset.classes == ("bus", "car", "train")
    nested = load(make_images({"train/steam": 1, "car": 2, "bus": 1}, name="nested"))
    assert nested.classes == ("bus", "car", "train")


def test_classes_are_sorted_naturally(make_images: MakeImages) -> None:
    names = ("1", "2", "10", "a2", "a10", "B", "c")
    assert load(make_images(dict.fromkeys(reversed(names), 1))).classes == names
    assert natural("9" * 5000) < natural("1" + "0" * 5000)  # more digits than int() takes


def test_deeper_folders_belong_to_their_class(make_images: MakeImages) -> None:
    dataset = load(make_images({"cat/tabby": 2, "cat/old/siamese": 1, "dog": 1}))
    assert dataset.classes == ("cat", "dog")
    assert len(dataset["train"]) == 4


def test_hidden_and_foreign_files_are_left_out_and_reported(make_images: MakeImages) -> None:
    folder = make_images({"cat": 2, "dog": 2, "__MACOSX/cat": 1, ".cache/x": 1})
    (folder / "cat/._0.png").write_bytes(b"resource fork")
    (folder / "cat/notes.txt").write_text("hello")
    (folder / "LICENSE").write_text("hello")
    (folder / "stray.png").write_bytes(png())
    (folder / "owl").mkdir()
    dataset = load(folder)
    assert dataset.classes == ("cat", "dog")
    assert len(dataset["train"]) == 4
    notes = "\n".join(dataset.notes)
    assert "1 image outside class folders is not used: stray.png" in notes
    assert "2 other files are not used: LICENSE, cat/notes.txt" in notes
    assert "1 folder without files is not used: owl" in notes


def test_images_outside_split_folders_are_reported(make_images: MakeImages) -> None:
    dataset = load(make_images({**SPLIT_FOLDERS, "to predict": 2}))
    assert dataset.classes == ("cat", "dog")
    assert "2 images outside class folders" in dataset.notes[0]


def test_links_are_followed_but_not_in_circles(make_images: MakeImages, tmp_path: Path) -> None:
    folder = make_images({"cat": 1, "dog": 1})
    elsewhere = make_images({"owls": 2}, name="elsewhere")
    (folder / "owl").symlink_to(elsewhere / "owls")
    (folder / "cat/up").symlink_to(folder)
    (folder / "dog/gone.png").symlink_to(tmp_path / "nothing")
    os.mkfifo(folder / "dog/pipe.png")
    dataset = load(folder)
    assert dataset.classes == ("cat", "dog", "owl")
    assert len(dataset["train"]) == 5
    assert [(one.name, one.reason) for one in check(dataset).unreadable] == [
        (str(folder / "dog/gone.png"), f"a broken link to {tmp_path / 'nothing'}")
    ], "an image that was not fetched is named; it is not left out in silence"


def test_a_file_that_vanishes_or_breaks_is_named(make_images: MakeImages) -> None:
    folder = make_images({"cat": 2, "dog": 1})
    split = load(folder)["train"]
    (folder / "cat/0.png").unlink()
    (folder / "cat/1.png").write_bytes(b"not an image")
    for i, why in enumerate(("No such file", "it is a text")):
        with pytest.raises(ImageError, match=why) as caught:
            split.image(i)
        assert caught.value.name == f"{folder}/cat/{i}.png"


def test_unprintable_names_are_escaped_in_messages(make_images: MakeImages) -> None:
    folder = make_images({"cat": 1, "dog": 1})
    wild = os.fsencode(folder) + b"/d\xffg\n\x1b[2J"
    os.mkdir(wild)
    with open(wild + b"/1.png", "wb") as file:
        file.write(png())
    dataset = load(folder)
    assert dataset.classes[1] == "d\\xffg\\n\\x1b[2J"
    assert dataset["train"].names[2].isprintable()
    assert dataset["train"].image(2).shape == (8, 10, 3)
    assert shown("Käfer 甲虫 ×") == "Käfer 甲虫 ×"


def test_refusals_of_folders(make_images: MakeImages, tmp_path: Path) -> None:
    assert "no such file or folder" in refusal(tmp_path / "photo")
    assert "no such file or folder" in refusal("photos.zip")
    (tmp_path / "empty").mkdir()
    assert "no files" in refusal(tmp_path / "empty")
    (tmp_path / "empty/.hidden.png").write_bytes(png())
    assert "no files" in refusal(tmp_path / "empty")
    (tmp_path / "empty/readme.txt").write_text("x")
    assert ".txt (1)" in refusal(tmp_path / "empty")
    message = refusal(flat := make_images({"": 3}, name="flat"))
    assert "images without class folders" in message
    assert f"vitral label {flat}" in message
    assert "folder above" not in message
    classes = make_images({"cat": 2, "dog": 2}, name="classes")
    assert f"if cat is a class, type the folder above, {classes}; otherwise" in refusal(classes / "cat")
    assert "images without class folders" in refusal(make_images({"train": 2, "test": 2}, name="flat splits"))
    assert "two folders for one split" in refusal(make_images({"train/a": 2, "val/a": 1, "valid/a": 1}, name="two"))
    message = refusal(make_images({"train/cat": 1, "train/dog": 1, "val/owl": 1, "val/cat": 1}, name="extra"))
    assert "the val split has classes that train lacks: owl" in message
    assert "unknown kind of data" in refusal(make_images({"cat": 1}, name="file") / "cat/0.png")


def test_a_missing_split_lists_the_splits(make_images: MakeImages) -> None:
    dataset = load(make_images({"a": 1, "b": 1}))
    with pytest.raises(DataError, match="found: train"):
        dataset["test"]


# ---------------------------------------------------------------- tables


def write_table(path: Path, rows: list[list[str]], delimiter: str = ",", encoding: str = "utf-8") -> Path:
    with open(path, "w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter).writerows(rows)
    return path


@pytest.mark.parametrize("header", [["file", "label"], ["Filename", " Class "], ["path", "category"]])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_a_table_by_any_column_names(make_images: MakeImages, header: list[str], delimiter: str) -> None:
    folder = make_images({"images": 3})
    rows = [header, ["images/0.png", "dog"], ["images/1.png", "cat"], [], [str(folder / "images/2.png"), " dog "]]
    dataset = load(write_table(folder / "labels.csv", rows, delimiter, "utf-8-sig"))
    assert (dataset.name, dataset.classes) == ("labels", ("cat", "dog"))
    assert dataset["train"].labels.tolist() == [1, 0, 1]
    assert dataset["train"].names[1] == f"{folder}/images/1.png"
    assert dataset["train"].names[2] == f"{folder}/images/2.png"
    assert np.array_equal(dataset["train"].image(2), noise(2))


def test_a_table_with_splits_and_foreign_columns(make_images: MakeImages) -> None:
    folder = make_images({"images": 4})
    rows = [["id", "split", "label", "file"]]
    rows += [[str(i), s, "ab"[i % 2], f"images\\{i}.png"] for i, s in enumerate(("train", "Train", "valid", "test"))]
    dataset = load(write_table(folder / "labels.csv", rows))
    assert {name: split.labels.tolist() for name, split in dataset.splits.items()} == {
        "train": [0, 1],
        "val": [0],
        "test": [1],
    }


def test_a_table_in_the_working_folder(make_images: MakeImages, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_images({"images": 2})
    write_table(folder / "labels.csv", [["file", "label"], ["images/0.png", "a"], ["images/1.png", "b"]])
    monkeypatch.chdir(folder)
    dataset = load("labels.csv")
    assert dataset["train"].names[0] == "images/0.png"
    monkeypatch.chdir("/")
    assert np.array_equal(dataset["train"].image(0), noise(0))


def test_repeated_and_contradicting_rows_are_reported(make_images: MakeImages) -> None:
    folder = make_images({"images": 2})
    rows = [["file", "label"], ["images/0.png", "a"], ["images/1.png", "b"], ["images/0.png", "b"]]
    dataset = load(write_table(folder / "labels.csv", rows))
    assert len(dataset["train"]) == 3
    assert any("more than one label: images/0.png" in note for note in dataset.notes)


def test_refusals_of_tables(make_images: MakeImages) -> None:
    folder = make_images({"images": 3})
    table = folder / "labels.csv"

    def refused(*rows: list[str]) -> str:
        return refusal(write_table(table, list(rows)))

    assert "columns found: img_name, kind" in refused(["img_name", "kind"], ["images/0.png", "a"])
    assert "columns found: none" in refused()
    assert "without rows" in refused(["file", "label"])
    bad = [[f"images/{i}.png", ""] for i in (0, 1)]
    assert "2 rows without a label" in refused(["file", "label"], *bad)
    assert "line 2, 3" in refused(["file", "label"], *bad)
    assert "1 row without a file" in refused(["file", "label"], ["", "a"])
    message = refused(["file", "label"], ["images/0.png", "a"], *([f"{i}.jpg", "b"] for i in range(9)))
    assert "9 files of the table do not exist" in message
    assert "0.jpg, 1.jpg, 2.jpg and 6 more" in message
    assert "'holdout' in line 2" in refused(["file", "label", "split"], ["images/0.png", "a", "holdout"])
    rows = [["images/0.png", "a", ""], ["images/1.png", "b", "train"]]
    assert "'' in line 2" in refused(["file", "label", "split"], *rows)
    table.write_bytes(b"file,label\n\xff\xfe,a\n")
    assert "not UTF-8" in refusal(table)
    table.write_bytes(b'file,label\n"' + b"x" * 200_000)
    assert "cannot read table" in refusal(table)
    table.write_bytes(b"file,label\nimages/0.png\0,a\n")
    refusal(table)


def test_a_folder_with_a_table_and_no_class_folders(make_images: MakeImages) -> None:
    for where, name in (("", "flat"), ("images", "one")):
        folder = make_images({where: 2}, name=name)
        rows = [["file", "label"], *([os.path.join(where, f"{i}.png"), "ab"[i]] for i in (0, 1))]
        write_table(folder / "labels.csv", rows)
        assert load(folder).classes == ("a", "b")
    (folder / "more.csv").write_text("file,label\n")
    assert "2 tables" in refusal(folder)


def test_class_folders_come_before_a_table(make_images: MakeImages) -> None:
    folder = make_images({"cat": 1, "dog": 1})
    write_table(folder / "labels.csv", [["file", "label"], ["cat/0.png", "x"], ["dog/0.png", "y"]])
    assert load(folder).classes == ("cat", "dog")
    assert load(folder / "labels.csv").classes == ("x", "y")


# ---------------------------------------------------------------- archives


@pytest.fixture(params=["tar", "zip", "stored zip", "tar.gz", "tgz", "gnu tar", "ustar"])
def pack(request: pytest.FixtureRequest) -> object:
    def pax(folder: Path, format: int) -> Path:
        archive = folder.parent / "photos.tar"
        with tarfile.open(archive, "w", format=format) as tar:
            tar.add(folder, arcname=".")
        return archive

    return {
        "tar": lambda folder: pack_tar(folder, "photos.tar"),
        "gnu tar": lambda folder: pax(folder, tarfile.GNU_FORMAT),
        "ustar": lambda folder: pax(folder, tarfile.USTAR_FORMAT),
        "zip": pack_zip,
        "stored zip": lambda folder: pack_zip(folder, compression=zipfile.ZIP_STORED),
        "tar.gz": lambda folder: pack_tar(folder, "photos.tar.gz", "w:gz"),
        "tgz": lambda folder: pack_tar(folder, "photos.tgz", "w:gz"),
    }[request.param]


def test_an_archive_is_the_same_as_the_folder(make_images: MakeImages, pack: object) -> None:
    folder = make_images({**SPLIT_FOLDERS, "train/" + "long name " * 9: 1})
    before = sorted(folder.parent.rglob("*"))
    archive = pack(folder)  # type: ignore[operator]
    dataset = load(archive)
    assert same(dataset, load(folder))
    assert dataset["val"].names[0].startswith(f"{archive}:")
    assert dataset["val"].names[0].endswith("val/cat/0.png")
    assert sorted(folder.parent.rglob("*")) == sorted([*before, archive])  # nothing was unpacked


def test_an_archive_with_a_table(make_images: MakeImages, pack: object) -> None:
    folder = make_images({"images": 2})
    write_table(folder / "labels.csv", [["file", "label"], ["images/0.png", "a"], ["./images/1.png", "b"]])
    assert same(load(pack(folder)), load(folder))  # type: ignore[operator]


@pytest.mark.real
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # Python 3.12: torch has threads when we fork
def test_archives_survive_pickling_threads_and_forks(make_images: MakeImages, pack: object) -> None:
    split = load(pack(make_images({"a": 20, "b": 20})))["train"]  # type: ignore[operator]
    wanted = [split.image(i) for i in range(len(split))]
    again = pickle.loads(pickle.dumps(split))  # noqa: S301
    with ThreadPoolExecutor(4) as pool:
        for got in (pool.map(again.image, list(range(40)) * 5), pool.map(split.image, list(range(40)) * 5)):
            assert all(np.array_equal(a, b) for a, b in zip(got, wanted * 5, strict=True))
    child = os.fork()
    if not child:
        os._exit(0 if all(np.array_equal(split.image(i), wanted[i]) for i in range(40)) else 1)
    assert np.array_equal(split.image(7), wanted[7])
    assert os.waitpid(child, 0)[1] == 0


def test_hostile_names_and_links_in_a_tar_are_left_out(tmp_path: Path) -> None:
    link = tarfile.TarInfo("a/link.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    hard = tarfile.TarInfo("a/hard.png")
    hard.type, hard.linkname = tarfile.LNKTYPE, "a/0.png"
    device = tarfile.TarInfo("a/null.png")
    device.type = tarfile.CHRTYPE
    names = ("/etc/a/0.png", "../../b/0.png", "a/../../c.png", "a/0.png", "b/0.png", "./b/x/../1.png")
    members = [(tarfile.TarInfo(name), png(i)) for i, name in enumerate(names)]
    dataset = load(tar_of(tmp_path / "evil.tar", *members, (link, b""), (hard, b""), (device, b"")))
    assert [name.split(":")[1] for name in dataset["train"].names] == ["a/0.png", "b/0.png", "b/1.png"]
    notes = "\n".join(dataset.notes)
    assert "3 files with a path outside the archive are not used: " in notes
    assert "3 files as link, device or sparse file are not used" in notes


def test_hostile_names_in_a_zip_are_left_out(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "evil.zip", "w") as archive:
        for i, name in enumerate(("/a/0.png", "../b/0.png", "a/0.png", "b\\0.png")):
            archive.writestr(zipfile.ZipInfo(name), png(i))
        link = zipfile.ZipInfo("a/link.png")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
    dataset = load(tmp_path / "evil.zip")
    assert [name.split(":")[1] for name in dataset["train"].names] == ["a/0.png", "b/0.png"]


def test_absurd_member_sizes_are_refused(tmp_path: Path) -> None:
    good = [(tarfile.TarInfo(name), png()) for name in ("a/0.png", "b/0.png")]
    for size in (10**15, -512):
        path = tar_of(tmp_path / "huge.tar", *good)
        absurd = tarfile.TarInfo("a/1.png")
        absurd.size = size
        data = bytearray(path.read_bytes())
        end = data.rindex(b"b/0.png") + 512 + 512  # over the padding: the end of the last member
        header = absurd.tobuf(tarfile.GNU_FORMAT)
        path.write_bytes(bytes(data[:end]) + header + bytes(1024))
        assert "cannot read archive" in refusal(path)


def test_a_zip_bomb_makes_no_more_bytes_than_it_states(tmp_path: Path, make_images: MakeImages) -> None:
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/0.png", bytes(10_000_000))
        archive.writestr("b/0.png", png())
    data = bytearray(path.read_bytes())
    entry = data.index(b"PK\x01\x02")
    data[entry + 24 : entry + 28] = (100).to_bytes(4, "little")  # it claims 100 bytes
    path.write_bytes(data)
    with pytest.raises(ImageError, match="size or checksum differs"):
        load(path)["train"].image(0)
    data[entry + 24 : entry + 28] = (2**32 - 2).to_bytes(4, "little")  # it claims 4 GB
    path.write_bytes(data)
    with pytest.raises(ImageError, match="the limit is"):
        load(path)["train"].image(0)


def test_a_compressed_tar_has_a_limit(make_images: MakeImages, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitral.data import archives as files

    archive = pack_tar(make_images({"a": 2, "b": 2}), "photos.tgz", "w:gz")
    monkeypatch.setattr(files.InMemoryTar.__init__, "__defaults__", (1000,))
    assert "too large to hold in memory" in refusal(archive)


@pytest.mark.parametrize("name", ["photos.tar", "photos.zip", "photos.tar.gz"])
def test_corrupt_archives_are_refused(make_images: MakeImages, name: str, tmp_path: Path) -> None:
    folder = make_images({"a": 5, "b": 5})
    path = pack_zip(folder) if name.endswith("zip") else pack_tar(folder, name, "w:gz" if name.endswith("gz") else "w")
    data = path.read_bytes()
    for broken in (b"", b"rubbish" * 500, data[: len(data) // 2 + 100]):
        path.write_bytes(broken)
        message = refusal(path)
        assert "cannot read archive" in message or "no files" in message
        assert str(path) in message


def test_a_changed_zip_is_detected(make_images: MakeImages) -> None:
    path = pack_zip(make_images({"a": 2, "b": 2}), compression=zipfile.ZIP_STORED)
    split = load(path)["train"]
    data = bytearray(path.read_bytes())
    data[data.index(b"IDAT") + 6] ^= 255
    path.write_bytes(data)
    with pytest.raises(ImageError, match=r"photos.zip:photos/a/0.png"):
        split.image(0)


def test_encrypted_files_are_left_out(make_images: MakeImages) -> None:
    path = pack_zip(make_images({"a": 2, "b": 2}))
    data = bytearray(path.read_bytes())
    data[data.rindex(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(data)
    dataset = load(path)
    assert len(dataset["train"]) == 3
    assert any("1 file with encryption is not used: photos/b/1.png" in note for note in dataset.notes)


def test_a_tar_with_a_damaged_header_is_an_error(make_images: MakeImages) -> None:
    folder = make_images({"a": 3, "b": 3})
    path = folder.parent / "photos.tar"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(folder, arcname=folder.name)
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[whole.rindex(b"photos/b/") + 110] ^= 1  # inside the header: its checksum fails
    path.write_bytes(damaged)
    assert "no file header at byte" in refusal(path)
    path.write_bytes(whole.rstrip(b"\0") + bytes(-len(whole.rstrip(b"\0")) % 512))
    assert any("cut off" in note for note in load(path).notes)


def test_a_folder_that_may_not_be_read_is_named(make_images: MakeImages, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_images({"a": 1, "b": 1})

    def forbidden(path: str) -> object:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", forbidden)
    assert "Permission denied" in refusal(folder)


# ---------------------------------------------------------------- splits as views


def test_select_is_a_view_in_any_order(make_images: MakeImages) -> None:
    split = load(make_images({"a": 3, "b": 3}))["train"]
    picked = split.select([5, 0, 4]).select(np.array([2, 0]))
    assert picked.labels.tolist() == [1, 1]
    assert list(picked.names) == [split.names[4], split.names[5]]
    assert picked.names[-1:][0] == split.names[5]
    assert np.array_equal(picked.image(0), split.image(4))
    assert np.array_equal(pickle.loads(pickle.dumps(picked)).image(1), split.image(5))  # noqa: S301


# ---------------------------------------------------------------- names


def test_digits_are_embedded_with_a_fair_test_split() -> None:
    dataset = load("digits")
    train, test = dataset["train"], dataset["test"]
    assert (dataset.classes, len(train), len(test)) == (tuple("0123456789"), 1437, 360)
    for i in range(10):
        assert abs((test.labels == i).mean() - (train.labels == i).mean()) < 0.005
    assert train.image(0).shape == (8, 8, 1)
    assert max(train.image(i).max() for i in range(20)) == 255
    assert test.names[17] == "digits/test[17]"
    again = load("digits")["test"]
    assert all(np.array_equal(again.image(i), test.image(i)) for i in range(0, 360, 50))


def test_unknown_names() -> None:
    assert "nearest: cifar10, cifar100" in refusal("cifar11")
    with pytest.raises(UsageError, match="data sets with a name are digits, planted, mnist"):
        load("qqq")


def test_a_name_without_a_slash_may_be_a_local_folder(make_images: MakeImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_images({"x": 1, "y": 1}, name="photos").parent)
    message = refusal("photoss")
    assert "nearest: photos\n" in message
    assert "cifar10" not in message  # names that are not similar are left out


def test_a_path_that_exists_wins_over_a_name(make_images: MakeImages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_images({"x": 1, "y": 1}, name="digits").parent)
    assert load("digits").classes == ("x", "y")


def test_a_named_set_is_found_as_folder_or_archive(make_images: MakeImages, tmp_path: Path) -> None:
    folder = make_images(SPLIT_FOLDERS, name="cifar10")
    dataset = load("CIFAR-10", root=tmp_path, download=False)
    assert (dataset.name, dataset.source, dataset.classes) == ("cifar10", "CIFAR-10", ("cat", "dog"))
    pack_tar(folder, "cifar100.tar")
    assert len(load("cifar100", root=tmp_path, download=False)["test"]) == 2


def test_a_set_that_is_not_available_has_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    for name in ("mnist", "fashion-mnist", "cifar10", "cifar100", "places365", "imagenet"):
        message = refusal(name, root=tmp_path)
        assert f"cannot get the data set '{name}'" in message
        assert "downloading is off" in message
        assert str(tmp_path) in message

    class Unreachable:
        def __init__(self, root: str, train: bool, download: bool):
            print("chatter that must not reach standard output")
            raise OSError("network is unreachable") if download else RuntimeError("Dataset not found")

    monkeypatch.setattr(datasets, "CIFAR10", Unreachable)
    assert "network is unreachable" in refusal("cifar10", root=tmp_path, download=True)


@pytest.mark.parametrize("left", [False, True])
def test_a_download_that_fails_leaves_no_empty_folder(
    left: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision import datasets

    class Stopped:
        def __init__(self, root: str, train: bool, download: bool):
            if not download:
                raise RuntimeError("Dataset not found")
            (Path(root) / "cifar/raw").mkdir(parents=True)
            if left:
                (Path(root) / "cifar/raw/half.tar").write_bytes(b"half")
            raise OSError("network is unreachable")

    monkeypatch.setattr(datasets, "CIFAR10", Stopped)
    refusal("cifar10", root=tmp_path / "data", download=True)
    assert (tmp_path / "data").exists() == left
    (tmp_path / "mine").mkdir()
    refusal("cifar10", root=tmp_path / "mine", download=True)
    assert (tmp_path / "mine").exists(), "it was there before"


def test_a_download_prints_nothing_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torchvision import datasets

    class Talkative:
        data = np.zeros((2, 32, 32, 3), np.uint8)
        targets = (1, 0)
        classes = ("cat", "dog")

        def __init__(self, root: str, train: bool, download: bool):
            print("Downloading")
            if not download:
                raise RuntimeError("Dataset not found")

    monkeypatch.setattr(datasets, "CIFAR10", Talkative)
    dataset = load("cifar10", root=tmp_path)
    assert dataset["train"].labels.tolist() == [1, 0]
    assert dataset["train"].names[1] == "cifar10/train[1]"
    assert capsys.readouterr().out == ""


def test_places365_is_its_validation_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    path = tmp_path / "val.png"
    path.write_bytes(png())

    class Places:
        classes = ("/a/barn", "/a/attic")
        imgs = ((str(path), 0), (str(path), 1))

        def __init__(self, root: str, **options: object):
            assert options["split"] == "val"
            assert options["small"] is True

    monkeypatch.setattr(datasets, "Places365", Places)
    dataset = load("places365", root=tmp_path)
    assert dataset.classes == ("attic", "barn")
    assert dataset["train"].labels.tolist() == [1, 0]
    assert dataset["train"].image(0).shape == (8, 10, 3)
    path.unlink()  # an interrupted download: the lists without the images
    assert "but not its images" in refusal("places365", root=tmp_path, download=True)


def test_every_source_and_layout_is_complete() -> None:
    assert all(callable(source.accepts) and callable(source.load) for source in SOURCES.values())
    assert all(callable(read) for read in LAYOUTS.values())


# ---------------------------------------------------------------- real data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wanted"),
    [("mnist", {"train": 60000, "test": 10000}), ("cifar10", {"train": 50000, "test": 10000})],
)
def test_named_sets_in_the_shared_folder(shared_data: Path, name: str, wanted: dict[str, int]) -> None:
    dataset = load(name, root=shared_data, download=False)
    assert {split: len(images) for split, images in dataset.splits.items()} == wanted
    assert len(dataset.classes) == 10
    assert np.bincount(dataset["test"].labels).sum() == 10000
    assert dataset["test"].image(123).shape == ((28, 28, 1) if name == "mnist" else (32, 32, 3))


def test_the_first_images_of_mnist(shared_data: Path) -> None:
    dataset = load(shared_data / "mnist")
    assert dataset["train"].labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert dataset["test"].labels[:5].tolist() == [7, 2, 1, 0, 4]


def test_photographs_in_the_shared_folder(shared_data: Path) -> None:
    dataset = load(shared_data / "hymenoptera.tar")
    # 244 photographs and a GIF that says "image not found"
    assert {split: len(images) for split, images in dataset.splits.items()} == {"train": 245, "val": 153}
    assert dataset.classes == ("ants", "bees")
