"""A session: the table and the journal on disk, restarts, locks, and data of every kind."""

from __future__ import annotations

import csv
import errno
import os
import random
import signal
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from images import MakeImages
from running import fork, printed
from vitral.data import load
from vitral.errors import DataError, UsageError, WriteError
from vitral.labeling import journal
from vitral.labeling.session import Session, default_table
from vitral.labeling.state import Action


def opened(folder: Path, *classes: str, data: Sequence[str] = (), labels: bool = True) -> Session:
    given = [str(folder), *data]
    return Session(given, default_table(given[:1]), classes, labels=labels)


def rows(table: Path) -> dict[str, dict[str, str]]:
    with open(table, newline="", encoding="utf-8") as file:
        return {row["file"]: row for row in csv.DictReader(file)}


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    """Six images that nobody has sorted."""
    return make_images({".": 6})


def test_the_table_has_every_image_and_trains(photos: Path):
    with opened(photos, "rose", "tulip") as session:
        session.act(Action("label", (0, 1), "rose"))
        session.act(Action("label", (2, 3), "tulip"))
        session.act(Action("unsure", (3,)))
        session.act(Action("exclude", (4,)))
    found = rows(photos / "labels.csv")
    assert list(found["0.png"]) == ["file", "label", "given", "checked"]
    assert [row["label"] for row in found.values()] == ["rose", "rose", "tulip", "tulip", "", ""]
    assert [row["checked"] for row in found.values()] == ["yes", "yes", "yes", "unsure", "excluded", "no"]
    for data in (photos / "labels.csv", photos):
        dataset = load(str(data))
        assert (dataset.classes, len(dataset["train"])) == (("rose", "tulip"), 3)
        assert "3 rows without a label, unsure or excluded are not used" in dataset.notes


def test_a_look_changes_no_file(photos: Path):
    before = sorted(os.listdir(photos))
    with opened(photos, "rose"):
        pass
    assert sorted(os.listdir(photos)) == before
    with opened(photos, "rose") as session:
        session.act(Action("undo"))
    assert sorted(os.listdir(photos)) == before, "nothing was there to undo"


def test_a_table_without_labels_says_what_to_do(photos: Path):
    with opened(photos, "rose") as session:
        session.act(Action("exclude", (0,)))
    with pytest.raises(DataError, match="no labels in the table") as caught:
        load(str(photos / "labels.csv"))
    assert "vitral label" in str(caught.value)


def test_class_folders_come_in_unchecked(make_images: MakeImages):
    photos = make_images({"rose": 2, "tulip": 2})
    with opened(photos) as session:
        assert session.state.classes == ("rose", "tulip")
        session.act(Action("label", (0,), "tulip"))
    found = rows(photos / "labels.csv")
    assert found["rose/0.png"] == {"file": "rose/0.png", "label": "tulip", "given": "rose", "checked": "yes"}
    assert found["tulip/0.png"] == {"file": "tulip/0.png", "label": "tulip", "given": "tulip", "checked": "no"}


def test_folders_of_splits_keep_their_split(make_images: MakeImages):
    photos = make_images({"train/rose": 2, "train/tulip": 2, "test/rose": 1, "test/tulip": 1})
    with opened(photos) as session:
        session.act(Action("confirm", (0,)))
    assert {len(split) for split in load(str(photos / "labels.csv")).splits.values()} == {4, 2}


def test_without_labels_folders_say_nothing(make_images: MakeImages):
    photos = make_images({"rose": 2, "tulip": 2})
    with opened(photos, labels=False) as session:
        assert (session.state.classes, session.labeled) == ((), 0)


def test_a_table_of_another_program_comes_in_and_stays(photos: Path):
    (photos / "mine.csv").write_text("image,class,group\n0.png,rose,a\n1.png,,b\n5.png,tulip,a\n")
    before = (photos / "mine.csv").read_bytes()
    table = default_table([str(photos / "mine.csv")])
    assert table.name == "mine-labels.csv"
    with Session([str(photos / "mine.csv")], table) as session:
        assert [mark.label for mark in session.state.marks] == ["rose", "", "tulip"]
        session.act(Action("label", (1,), "rose"))
    assert (photos / "mine.csv").read_bytes() == before
    assert [row["group"] for row in rows(table).values()] == ["a", "b", "a"]
    assert load(str(table))["train"].groups is not None


def test_the_table_of_data_check_is_the_same_format(
    make_images: MakeImages, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    photos = make_images({"rose": 8, "tulip": 8})
    monkeypatch.chdir(photos.parent)  # where the sheet of doubtful images goes
    fixed = photos / "fixed.csv"
    printed(capsys, "data", "check", str(photos), "--labels", "--folds", "2", "--write", str(fixed))
    assert default_table([str(fixed)]) == fixed
    before = rows(fixed)
    with Session([str(fixed)], fixed) as session:
        assert session.state.classes == ("rose", "tulip")
        session.act(Action("exclude", (0,)))
    after = rows(fixed)
    assert after.keys() == before.keys()
    assert [row["given"] for row in after.values()] == [row["given"] for row in before.values()]
    assert next(iter(after.values()))["checked"] == "excluded"


def test_a_table_that_vitral_did_not_write_is_never_replaced(photos: Path):
    (photos / "labels.csv").write_text("file,label\n0.png,rose\n")
    with pytest.raises(UsageError, match="this table exists already"):
        opened(photos)
    assert (photos / "labels.csv").read_text() == "file,label\n0.png,rose\n"


def test_work_goes_on_after_a_restart_also_undo(photos: Path):
    with opened(photos, "rose", "tulip") as session:
        session.act(Action("label", (0,), "rose"))
        session.act(Action("label", (0,), "tulip"))
    with opened(photos) as session:
        assert session.state.classes == ("rose", "tulip")
        session.act(Action("undo"))
        assert session.state.marks[0].label == "rose"
    with opened(photos) as session:
        assert session.act(Action("redo")).marks[0].label == "tulip"
    assert rows(photos / "labels.csv")["0.png"]["label"] == "tulip"


def test_without_its_journal_the_table_has_the_labels(photos: Path):
    with opened(photos, "rose") as session:
        session.act(Action("label", (0,), "rose"))
        session.act(Action("exclude", (1,)))
    (photos / ".labels.csv.journal").unlink()
    with opened(photos) as session:
        assert [(mark.label, mark.checked) for mark in session.state.marks[:2]] == [("rose", "yes"), ("", "excluded")]


def test_images_that_come_and_go(photos: Path, make_images: MakeImages):
    with opened(photos, "rose") as session:
        session.act(Action("label", (5,), "rose"))
    (photos / "0.png").unlink()
    (photos / "5.png").rename(photos / "9.png")
    with opened(photos) as session:
        assert "2 images of the journal cannot be found: 0.png, 5.png" in session.notes
        session.act(Action("label", (len(session.state.images) - 1,), "rose"))
    found = rows(photos / "labels.csv")
    assert "0.png" not in found
    assert found["9.png"]["label"] == "rose"
    assert len(load(str(photos / "labels.csv"))["train"]) == 1


def test_a_table_that_another_program_changed_is_kept(photos: Path):
    table = photos / "labels.csv"
    with opened(photos, "rose", "tulip") as session:
        session.act(Action("label", (0,), "rose"))
        session._write()
        table.write_text(table.read_text().replace("rose", "tulip"))
        session.act(Action("label", (1,), "rose"))
        session._write()
        assert session.notes == ["another program changed labels.csv: its version is now labels.changed-1.csv"]
    assert rows(table)["0.png"]["label"] == "rose"
    assert rows(photos / "labels.changed-1.csv")["0.png"]["label"] == "tulip"
    table.write_text("file,label\n0.png,oak\n")
    with opened(photos) as session:
        assert session.notes == ["another program changed labels.csv: its version is now labels.changed-2.csv"]
    assert (photos / "labels.changed-2.csv").read_text() == "file,label\n0.png,oak\n"
    assert rows(table)["1.png"]["label"] == "rose"


def test_a_table_is_open_once(photos: Path):
    page = photos / ".labels.csv.page"
    with opened(photos) as session:
        with pytest.raises(UsageError, match="this table is in use") as refused:
            opened(photos)
        assert "use its page, or end it" in str(refused.value)
        session.publish("http://127.0.0.1:8001/#a-Token_1")
        assert page.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UsageError, match=r"open its page, http://127\.0\.0\.1:8001/#a-Token_1, or end it"):
            opened(photos)
        page.write_text("http://127.0.0.1:8001/#a\x1b[31m")
        with pytest.raises(UsageError, match="use its page, or end it"):
            opened(photos)
    assert not page.exists()
    page.write_text("http://127.0.0.1:1/#left-by-a-killed-process")
    with opened(photos):
        assert not page.exists()


def test_a_line_that_was_cut_is_left_out(photos: Path):
    with opened(photos, "rose") as session:
        session.act(Action("label", (0,), "rose"))
        session.act(Action("label", (1,), "rose"))
    kept = photos / ".labels.csv.journal"
    lines = kept.read_bytes().splitlines(keepends=True)
    last = next(i for i, line in enumerate(lines) if b'"images": [1]' in line)
    kept.write_bytes(b"".join(lines[:last]) + lines[last][:-9])
    with opened(photos) as session:
        assert [mark.label for mark in session.state.marks[:2]] == ["rose", ""]
        session.act(Action("label", (2,), "rose"))
    with opened(photos) as session:
        assert [mark.label for mark in session.state.marks[:3]] == ["rose", "", "rose"]


@pytest.mark.parametrize("line", [b"{]\n", b"[1]\n", b'{"do": "paint"}\n', b'{"format": 2}\n', b'{"add": [[1]]}\n'])
def test_a_damaged_journal_is_named(photos: Path, line: bytes):
    with opened(photos, "rose") as session:
        session.act(Action("label", (0,), "rose"))
    with open(photos / ".labels.csv.journal", "ab") as file:
        file.write(line)
    with pytest.raises(DataError, match="the journal of this table cannot be read"):
        opened(photos)


def test_a_full_disk_changes_nothing(photos: Path, monkeypatch: pytest.MonkeyPatch):
    with opened(photos, "rose") as session:
        session.act(Action("label", (0,), "rose"))

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(journal, "flush_open", full)
            with pytest.raises(WriteError, match="cannot write"):
                session.act(Action("label", (1,), "rose"))
        assert session.state.marks[1].label == ""
        session.act(Action("label", (2,), "rose"))
    with opened(photos) as session:
        assert [mark.label for mark in session.state.marks[:3]] == ["rose", "", "rose"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
def test_odd_files(photos: Path):
    """Pipes are not listed, names with a line break fit no table, and a link leads where it leads."""
    (photos / "a\nb.png").write_bytes((photos / "0.png").read_bytes())
    (photos / " spaced.png").write_bytes((photos / "0.png").read_bytes())
    os.mkfifo(photos / "pipe.png")
    (photos / "etc").symlink_to("/etc")
    with opened(photos, "rose") as session:
        names = [image.file for image in session.state.images if not image.file.startswith("etc/")]
        assert len(names) == 7
        assert r"1 image is left out, because no table can hold the name: " in session.notes[-1]
        assert r"a\nb.png" in session.notes[-1]
        session.act(Action("label", tuple(range(7)), "rose"))
    assert "./ spaced.png" in names
    assert len(load(str(photos / "labels.csv"))["train"]) == 7


def test_refused_data(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty").mkdir()
    with zipfile.ZipFile(tmp_path / "photos.zip", "w") as archive:
        archive.write(photos / "0.png", "0.png")
    for words, said in {
        (): "no images to label",
        (str(tmp_path / "empty"),): "no images",
        (str(tmp_path / "absent"),): "no such image or folder",
        (str(tmp_path / "photos.zip"),): "images in an archive cannot be labeled",
        (str(photos), "--out", "labels.txt"): "--out must name a .csv",
        (str(photos), "--port", "70000"): "--port is from 0 to 65535, not 70000",
        (str(photos), "--classes", "NaN"): "cannot be the name of a class",
    }.items():
        assert said in printed(capsys, "label", *words, code=2)[1]


@pytest.mark.real
@pytest.mark.skipif(os.name == "nt", reason="SIGKILL")
def test_killed_at_any_moment_it_loses_at_most_the_action_under_way(photos: Path):
    """Each action is counted in a pipe once it is done; after SIGKILL the next session has at least as many."""
    with opened(photos, "even", "odd") as session:
        session.act(Action("label", (0,), "even"))
    chance, done = random.Random(0), 1
    for _ in range(12):
        reading, writing = os.pipe()

        def work(writing: int = writing, done: int = done) -> int:
            session = opened(photos)
            for number in range(done, 1_000_000):
                session.act(Action("label", (0,), ("even", "odd")[number % 2]))
                os.write(writing, b".")
            return 0

        child = fork(work)
        os.close(writing)
        os.read(reading, 1)  # it works
        time.sleep(chance.uniform(0, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        counted = done + 1
        while more := os.read(reading, 1 << 16):
            counted += len(more)
        os.close(reading)
        with opened(photos) as session:
            change, done = session.state.past, 0
            while change is not None:
                change, done = change.earlier, done + 1
            assert counted <= done <= counted + 1
            label = session.state.marks[0].label
            assert label == ("even", "odd")[(done - 1) % 2]
        assert rows(photos / "labels.csv")["0.png"]["label"] == label
        assert not list(photos.glob("labels.changed-*"))
