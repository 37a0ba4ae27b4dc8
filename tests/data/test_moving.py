"""Findings are written as a table; their files move out of the data and back, and none is lost or replaced."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest

from images import MakeImages
from running import as_json, printed
from vitral.cli.main import main


@pytest.fixture
def copied(make_images: MakeImages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies in one class and in two splits, one with another label, and an empty file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    folder = make_images({"train/a": 12, "train/b": 12, "val/a": 3, "val/b": 3})
    for number in range(4):
        shutil.copy(folder / "train/a/1.png", folder / f"train/a/copy {number}.png")
    shutil.copy(folder / "val/b/0.png", folder / "train/b/leak.png")
    shutil.copy(folder / "train/a/2.png", folder / "train/b/other.png")
    (folder / "train/b/empty.png").touch()
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_every_copy_is_listed_in_text_and_in_the_table(
    copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = printed(capsys, "data", "check", str(copied), "--write", "lists/findings.csv", code=1)
    for number in range(4):
        assert f"copy {number}.png" in " ".join(out.split())
    assert "findings.csv: 8 findings" in err
    with open("lists/findings.csv", newline="") as file:
        rows = {Path(row["file"]).name: row for row in csv.DictReader(file)}
    assert {name: row["finding"] for name, row in rows.items()} == {
        "empty.png": "unreadable",
        "leak.png": "leak",
        "2.png": "contradiction",
        "other.png": "contradiction",
        **{f"copy {number}.png": "copy" for number in range(4)},
    }
    assert rows["leak.png"]["like"].endswith("val/b/0.png"), "the held-out image stays"
    assert all((tmp_path / "lists" / row["file"]).is_file() for row in rows.values())


def test_files_move_out_and_back(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(copied)
    _, err = printed(capsys, "data", "check", str(copied), "--move-to", "aside", code=1)
    assert "8 files to aside" in err
    assert "data check aside --move-back" in err
    moved = tree(Path("aside"))
    assert {name.split("/")[0] for name in moved} == {"unreadable", "leak", "contradiction", "copy", "moved.csv"}
    assert moved["copy/train/a/copy 0.png"] == before["train/a/1.png"]
    assert len(tree(copied)) == len(before) - 8
    assert as_json(capsys, "data", "check", str(copied))["found"] == {}
    _, err = printed(capsys, "data", "check", "aside", "--move-back")
    assert "moved 8 files back" in err
    assert tree(copied) == before


def test_only_some_kinds_move_and_a_second_move_replaces_nothing(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tree(copied)
    words = ["data", "check", str(copied), "--move-to", "aside", "--kinds"]
    printed(capsys, *words, "copy", code=1)
    assert sum(name.startswith("copy/") for name in tree(Path("aside"))) == 4
    shutil.copy(copied / "train/a/1.png", copied / "train/a/copy 0.png")
    printed(capsys, *words, "copy", "leak", code=1)
    assert sum(name.startswith("copy/") for name in tree(Path("aside"))) == 5
    assert "copy/train/a/copy 0 (2).png" in tree(Path("aside"))
    assert main(["data", "check", "aside", "--move-back"]) == 0
    assert tree(copied) == before | {"train/a/copy 0 (2).png": before["train/a/1.png"]}


def test_nothing_is_replaced_on_the_way_back(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(copied)
    printed(capsys, "data", "check", str(copied), "--move-to", "aside", "--kinds", "copy", code=1)
    (copied / "train/a/copy 3.png").write_bytes(b"new")
    printed(capsys, "data", "check", "aside", "--move-back")
    assert tree(copied) == before | {
        "train/a/copy 3.png": b"new",
        "train/a/copy 3 (2).png": before["train/a/copy 3.png"],
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--move-to", "photos/aside"], "inside the data"),
        (["--move-to", "full"], "other files"),
        (["--write", "findings.txt"], "--write findings.csv"),
        (["--kinds", "copies"], "unknown value of --kinds: 'copies'"),
        (["--move-back"], "there is no moved.csv"),
    ],
)
def test_refusals(copied: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("full").mkdir()
    Path("full/mine.txt").touch()
    before = tree(copied)
    assert main(["data", "check", str(copied), *words]) == 2
    assert said in capsys.readouterr().err
    assert tree(copied) == before


def test_files_of_an_archive_and_arrays_do_not_move(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    archive = shutil.make_archive("photos", "zip", copied)
    for data in (archive, "digits"):
        assert main(["data", "check", data, "--move-to", "aside"]) == 2
        assert "--write findings.csv" in capsys.readouterr().err
