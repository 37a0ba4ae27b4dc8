"""Folders without training data are refused; folders and files that cannot be opened are counted by every command."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vitral
from running import as_words, in_child, train
from vitral.cli.main import main
from vitral.data.files import UNOPENED
from vitral.data.sources import load
from vitral.errors import DataError

NOBODY = 65534


@pytest.fixture
def photos(make_images) -> Path:
    return make_images({"cat": 4, "dog": 4})


@pytest.mark.parametrize("command", ["train", "data check"])
def test_a_run_is_refused_as_data(command, trained, tmp_path, capsys):
    run = shutil.copytree(trained.folder, tmp_path / "a run")
    (run / "explained" / "maps").mkdir(parents=True)
    assert main([*command.split(), str(run)]) == 2
    output = capsys.readouterr().err
    assert "a run folder is not a data set" in output
    assert "--resume" in output
    assert "--init" in output
    assert f"'{run}'" in output  # quoted, ready to paste


def test_weights_programs_and_repositories_are_refused_as_data(photos, tmp_path):
    subprocess.run(["git", "init", "-q", str(tmp_path / "code")], check=True)
    with pytest.raises(DataError, match="a git repository is not a data set"):
        load(tmp_path / "code" / ".git")
    for name, what in (("model.safetensors", "weights"), ("pyproject.toml", "program"), ("__init__.py", "program")):
        (photos / name).touch()
        with pytest.raises(DataError, match=what) as caught:
            load(photos)
        assert name in caught.value.why
        (photos / name).unlink()
    (photos / "features.npz").touch()
    shutil.copytree(tmp_path / "code" / ".git", photos / ".git")  # images may be versioned
    assert len(load(photos)["train"]) == 8


def test_runs_among_the_images_are_left_out(photos, trained):
    shutil.copytree(trained.folder, photos / "runs" / "sky")
    dataset = load(photos)
    assert dataset.classes == ("cat", "dog")
    assert any("runs/sky" in note for note in dataset.notes)


def test_a_link_to_itself_counts_as_one_unreadable_image(photos, tmp_path):
    (photos / "cat" / "loop.png").symlink_to("loop.png")
    with pytest.raises(DataError, match=r"cannot read|unreadable") as caught:
        train(photos, tmp_path / "stopped")
    assert "loop.png" in str(caught.value)
    train(photos, tmp_path / "skipped", bad_images="skip")
    assert "loop.png" in (tmp_path / "skipped" / "config.json").read_text()
    (photos / "cat" / "ring").symlink_to("ring")
    assert f"cat/ring/{UNOPENED}" in [str(name).removeprefix(f"{photos}/") for name in load(photos)["train"].names]


def test_a_class_folder_that_is_a_link_to_itself_can_be_left_out(photos, tmp_path, capsys):
    (photos / "sub").symlink_to("sub")
    run, words = tmp_path / "run", as_words({"epochs": 1, "model": "mu/4", "image_size": 8, "device": "cpu"})
    assert main(["train", str(photos), *words, "--out", str(run)]) == 2
    assert f"{photos}/sub/{UNOPENED}" in capsys.readouterr().err
    assert main(["train", str(photos), *words, "--out", str(run), "--bad-images", "skip"]) == 0
    named = f"left out 1 unreadable image: {photos}/sub/{UNOPENED}"
    output = capsys.readouterr().err
    assert output.index(named) < output.index("Plan")
    assert output.count(named) == 1
    assert vitral.load(run).classes == ("cat", "dog")
    assert named in (run / "config.json").read_text()
    assert main(["train", str(photos), "--out", str(run), "--resume"]) == 0
    for words in ([], [str(photos), "--bad-images", "skip"]):
        assert main(["evaluate", str(run), *words]) == 0
        assert named in capsys.readouterr().err
    assert main(["evaluate", str(run), str(photos)]) == 2
    assert main(["evaluate", str(run), str(photos), "--bad-images", "skip", "--knn", "1"]) == 0
    assert named in capsys.readouterr().err


def test_a_class_of_damaged_images_is_not_left_out(photos, tmp_path):
    (photos / "sub").symlink_to("sub")
    for image in (photos / "dog").iterdir():
        image.write_bytes(b"no image")
    with pytest.raises(DataError, match="no readable training image of 'dog'"):
        train(photos, tmp_path / "run", bad_images="skip")


@pytest.mark.real
def test_class_folders_of_another_split_that_cannot_be_opened_are_named(photos, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "parts" / split).mkdir(parents=True)
    shutil.copytree(photos, tmp_path / "parts" / "train", dirs_exist_ok=True)
    (tmp_path / "parts" / "val" / "sub").symlink_to("sub")
    with pytest.raises(DataError, match="no readable image in the val split") as caught:
        train(tmp_path / "parts", tmp_path / "run", bad_images="skip")
    assert "val/sub" in caught.value.why
    shutil.copytree(photos, tmp_path / "parts" / "val", dirs_exist_ok=True)
    with pytest.raises(DataError, match="1 unreadable image") as caught:
        train(tmp_path / "parts", tmp_path / "run")
    assert "val/sub" in caught.value.why
    train(tmp_path / "parts", tmp_path / "run", bad_images="skip")
    assert vitral.load(tmp_path / "run").classes == ("cat", "dog")


def bound_by_permissions(work) -> int:
    """Run `work` in a child without root's right to open what is not its own.

    Trap: as another user it could not read a checkout in a private folder, such as one of `mktemp -d`.
    """

    def run() -> int:
        header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # capset(2), version 3
        libc = ctypes.CDLL(None, use_errno=True)
        assert libc.capget(header, sets) == 0
        sets[0] &= ~(1 << 1 | 1 << 2)  # effective, without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
        assert libc.capset(header, sets) == 0
        return work()

    return in_child(run)


@pytest.fixture
def locked(photos) -> Path:
    """A folder that only its owner may open, who is another user."""
    if os.getuid() != 0 or sys.platform != "linux":
        pytest.skip("needs root on Linux, to make a folder of another user")
    return of_another_user(photos / "cat" / "locked")


def of_another_user(folder: Path) -> Path:
    folder.mkdir(mode=0o700)
    os.chown(folder, NOBODY, NOBODY)
    return folder


@pytest.mark.real
def test_a_folder_without_permission_is_named_and_can_be_skipped(locked, photos, tmp_path, capfd):
    words = ["train", str(photos), *as_words({"epochs": 1, "model": "mu/4", "image_size": 8, "device": "cpu"})]
    assert bound_by_permissions(lambda: main([*words, "--out", str(tmp_path / "stopped")])) == 2
    output = capfd.readouterr().err
    assert "locked" in output
    assert "Permission denied" in output
    assert bound_by_permissions(lambda: main([*words, "--out", str(tmp_path / "run"), "--bad-images", "skip"])) == 0
    assert "locked" in capfd.readouterr().err


@pytest.mark.real
def test_a_class_folder_without_permission_can_be_left_out(locked, photos, tmp_path, capfd):
    of_another_user(photos / "sub")
    words = ["train", str(photos), *as_words({"epochs": 1, "model": "mu/4", "image_size": 8, "device": "cpu"})]
    assert bound_by_permissions(lambda: main([*words, "--out", str(tmp_path / "run"), "--bad-images", "skip"])) == 0
    assert f"{photos}/sub/{UNOPENED}" in capfd.readouterr().err
    assert vitral.load(tmp_path / "run").classes == ("cat", "dog")


@pytest.mark.real
def test_predict_names_a_folder_that_it_cannot_open(locked, photos, trained, tmp_path, capfd):
    run = shutil.copytree(trained.folder, tmp_path / "run")
    assert bound_by_permissions(lambda: main(["predict", str(run), str(photos)])) == 1
    output = capfd.readouterr()
    assert str(locked) in output.err
    assert "Permission denied" in output.err
    assert "1 of 9 could not be read" in output.err


def test_predict_names_a_link_to_itself(photos, trained, capsys):
    (photos / "cat" / "loop.png").symlink_to("loop.png")
    assert main(["predict", str(trained.folder), str(photos)]) == 1
    assert "loop.png" in capsys.readouterr().err
    assert main(["predict", str(trained.folder), str(photos / "cat" / "loop.png")]) == 1


def test_predict_names_links_to_themselves_without_the_name_of_an_image(photos, trained, capsys):
    (photos / "sub").symlink_to("sub")
    (photos / "cat" / "loop").symlink_to("loop")
    (photos / "cat" / "gone").symlink_to("nowhere")  # a link to nowhere without the name of an image is no image
    (photos / "cat" / "notes").symlink_to(photos / "cat" / "notes.txt")
    (photos / "cat" / "notes.txt").write_text("no image")
    assert main(["predict", str(trained.folder), str(photos)]) == 1
    output = capsys.readouterr().err
    assert str(photos / "sub") in output
    assert str(photos / "cat" / "loop") in output
    assert "2 of 10 could not be read" in output
    assert "note: 1 link to nothing is not used: cat/gone" in output


def test_prediction_reads_the_images_that_training_reads(photos, trained, tmp_path, capsys):
    """Through linked class folders, too; links to images that were never fetched are unreadable images."""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "cat").symlink_to(photos / "cat")
    for number in range(3):
        (photos / "cat" / f"annex{number}.png").symlink_to(f"../.git/annex/objects/{number}")
    shutil.copytree(trained.folder, tmp_path / "linked" / "run")
    assert main(["predict", str(trained.folder), str(tmp_path / "linked"), "--out", str(tmp_path / "t.csv")]) == 1
    rows = (tmp_path / "t.csv").read_text().splitlines()[1:]
    assert len(rows) == 4 + 3
    assert sum("a broken link to ../.git/annex/objects/" in row for row in rows) == 3
    assert "note: 1 folder of a run is not used: run" in capsys.readouterr().err
    assert main(["data", "check", str(photos), "--format", "json"]) == 1
    named = [Path(one["name"]).name for one in json.loads(capsys.readouterr().out)["unreadable"]]
    assert named == ["annex0.png", "annex1.png", "annex2.png"]


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "{run}", "{long}"],
        ["train", "{long}"],
        ["evaluate", "{long}"],
        ["summary", "{long}"],
        ["train", "{photos}", "--out", "{long}"],
        ["predict", "{long}", "{photos}"],
        ["data", "check", "{long}"],
    ],
)
def test_a_path_too_long_is_refused_as_such(words, photos, trained, capsys):
    filled = [word.format(run=trained.folder, long="x" * 300 + "/y", photos=photos) for word in words]
    assert main(filled) == 2
    output = capsys.readouterr().err
    assert "bug in vitral" not in output
    assert "too long" in output or "no such" in output or "unknown" in output


def test_a_python_user_gets_an_error_of_vitral(trained):
    with pytest.raises(vitral.VitralError):
        vitral.train(str(trained.folder))
