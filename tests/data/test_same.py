"""Images that two data sets share: by file or bytes, never by a path as it was typed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from images import MakeImages
from vitral.data import load
from vitral.data.dataset import relative_names
from vitral.data.same import find, identities, same_images
from vitral.data.shards.writing import write_shards
from vitral.folders import can_write, same_path


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    return make_images({"train/a": 4, "train/b": 3, "val/a": 2, "val/b": 2})


def matched(one: object, other: object, split: str = "train") -> list[tuple[int, int]]:
    return list(same_images(load(str(one))[split], load(str(other))[split]))


def test_a_path_typed_in_another_way_has_the_same_images(photos, tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(photos)
    monkeypatch.chdir(tmp_path)
    for typed in ("photos", "./photos", "photos/", "link", "link/../photos", tmp_path / "photos"):
        assert matched(photos, typed) == [(n, n) for n in range(7)]
        assert same_path(photos, typed)
        assert relative_names(load(str(typed))["train"].names) == relative_names(load(str(photos))["train"].names)


def test_copies_and_archives_have_the_same_images(photos, tmp_path):
    copy = shutil.copytree(photos, tmp_path / "copy")
    archive = shutil.make_archive(str(tmp_path / "photos"), "zip", photos)
    assert matched(photos, copy) == matched(photos, archive) == [(n, n) for n in range(7)]
    assert not same_path(photos, copy)


def test_equal_names_alone_are_not_the_same_images(photos, make_images, tmp_path):
    other = make_images({"train/a": 4, "train/b": 4, "val/a": 2, "val/b": 2}, name="other", size=(8, 11))
    assert matched(photos, other) == []
    assert list(same_images(load(str(photos))["train"], load(str(photos))["val"])) == []
    changed = shutil.copytree(photos, tmp_path / "changed")
    shutil.copy(photos / "train/b/0.png", changed / "train/a/1.png")
    assert [one for one, _ in matched(photos, changed)] == [0, 2, 3, 4, 5, 6]


def test_an_image_that_cannot_be_read_is_no_other(photos, tmp_path):
    copies = [shutil.copytree(photos, tmp_path / name) for name in ("one", "two")]
    for copy in copies:
        (copy / "train/a/1.png").unlink()
        (copy / "train/a/1.png").symlink_to(tmp_path / "nowhere.png")
    assert [one for one, _ in matched(*copies)] == [0, 2, 3, 4, 5, 6]


def test_images_are_the_same_under_other_names(photos, tmp_path):
    changed = shutil.copytree(photos, tmp_path / "changed")
    (changed / "train/a/1.png").rename(changed / "train/b/moved.png")
    (changed / "train/a/2.png").rename(changed / "train/a/renamed.png")
    (changed / "train/b/0.png").unlink()
    one, other = (load(str(where))["train"] for where in (photos, changed))
    found = list(same_images(one, other))
    assert [number for number, _ in found] == [0, 1, 2, 3, 5, 6]
    assert all(one.raw(number) == other.raw(place) for number, place in found)
    again = find(identities(one), other)
    assert sorted(again.items()) == found


def test_of_equal_images_each_is_found_once(photos, tmp_path):
    shutil.copy(photos / "train/a/0.png", photos / "train/b/copy.png")
    split = load(str(photos))["train"]
    assert find(identities(split), split) == {number: number for number in range(8)}
    one = identities(split, [0])
    (photos / "train/a/0.png").unlink()
    rest = load(str(photos))["train"]
    assert find([*one, *one], rest) == {0: list(rest.names).index(str(photos / "train/b/copy.png"))}


@pytest.mark.parametrize("container", ["folder", "zip", "tar", "shards"])
def test_sizes_are_those_of_the_files(photos, tmp_path, container):
    data = photos
    if container == "shards":
        write_shards(load(photos), data := tmp_path / "shards")
    elif container != "folder":
        data = Path(shutil.make_archive(str(tmp_path / "photos"), container, photos))
    split = load(str(data))["train"]
    assert [split.size(i) for i in range(7)] == [len(split.raw(i)) for i in range(7)]


def test_only_some_are_compared_if_there_are_many(photos):
    split = load(str(photos))["train"]
    assert len(list(same_images(split, split, most=2))) == 2


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    assert can_write(tmp_path / "new" / "folder")
    monkeypatch.setattr("vitral.folders.os.access", lambda path, mode: Path(path) != tmp_path)
    assert not can_write(tmp_path / "new" / "folder")
