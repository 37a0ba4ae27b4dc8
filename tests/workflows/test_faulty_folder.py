"""A folder with planted faults, checked as a person does who follows what the commands print."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from faults import Faults, write_faulty
from running import TINY, as_json, as_words, printed
from vitral.data.checks import validate
from vitral.data.images import decode


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Faults]:
    folder = tmp_path_factory.mktemp("faulty") / "photos"
    return folder, write_faulty(folder, heic=True)


def names(findings: list[dict[str, dict[str, str]]]) -> list[str]:
    return [Path(one["place"]["name"]).name for one in findings]


def proposed(err: str) -> list[list[str]]:
    """Return the words of the commands below "Next:", without the name of the program."""
    return [shlex.split(line)[1:] for line in err.partition("Next:")[2].splitlines() if line.startswith("  ")]


@pytest.mark.slow
def test_planted_faults_are_found_by_the_check_and_the_command_that_it_proposes(
    faulty: tuple[Path, Faults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    folder, faults = faulty
    out, err = printed(capsys, "data", "check", str(folder), code=1)
    text = " ".join(out.split())
    for name in (*faults.copies, *faults.blurred, *faults.strangers, *faults.unreadable, *faults.other):
        assert name in text
    assert "sound" not in text
    found = as_json(capsys, "data", "check", str(folder), code=1)
    listed = {kind: set(names([one for one in found["unusual"] if one["kind"] == kind])) for kind in found["found"]}
    assert listed["blurred"] == faults.blurred
    assert not any("IMG_0002.HEIC" in names for names in listed.values()), "a good image"
    unlike = listed.get("stranger", set()) | listed.get("graphic", set())
    assert unlike >= faults.strangers
    assert len(unlike - faults.strangers) <= 1
    assert {name for group in found["duplicates"] for name in names([{"place": one} for one in group])} == faults.copies
    commands = proposed(err)
    labels = next(words for words in commands if "--labels" in words)
    out, err = printed(capsys, *labels)
    assert re.search(r"left out 1 unreadable image: .*empty.jpg", err)
    ranked = as_json(capsys, *labels)
    assert len(faults.wrong & set(names(ranked["doubtful"])[:24])) >= 7
    assert faults.strangers <= set(names(ranked["least_alike"]))
    assert Path("photos-labels.png").is_file()


@pytest.mark.slow
def test_findings_taken_away_are_gone(
    faulty: tuple[Path, Faults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    folder = shutil.copytree(faulty[0], tmp_path / "photos")
    _, err = printed(capsys, "data", "check", str(folder), code=1)
    moving = next(words for words in proposed(err) if "--move-to" in words)
    printed(capsys, *moving, code=1)
    found = as_json(capsys, "data", "check", str(folder))["found"]
    assert not {"unreadable", "copy", "one-color", "blurred"} & set(found)


@pytest.mark.report
def test_training_says_what_is_worth_a_look(
    faulty: tuple[Path, Faults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(validate, "GLANCE", 60.0)  # on a busy machine, too
    words = as_words({**TINY, "epochs": 1, "bad_images": "skip", "out": "run"})
    _, err = printed(capsys, "train", str(faulty[0]), *words)
    text = " ".join(err.split())
    for name in (*faulty[1].other, *faulty[1].unreadable):
        assert name in text
    assert "worth a look: copies (5), blurred (3)" in text
    check, labels = f"data check {faulty[0]}", ["data", "check", str(faulty[0]), "--labels"]
    assert check in text.partition("worth a look")[2]
    assert labels in proposed(err)
    assert " ".join(labels) in Path("run/report.html").read_text("utf-8")


@pytest.mark.slow
def test_a_heic_is_an_image_like_the_others(faulty: tuple[Path, Faults], capsys: pytest.CaptureFixture[str]) -> None:
    folder, faults = faulty
    found = as_json(capsys, "data", "check", str(folder), code=1)
    assert {Path(one["name"]).name for one in found["unreadable"]} == faults.unreadable
    assert found["formats"] == {"JPEG": 300 + 5 + 2, "HEIF": 1}


@pytest.mark.slow
def test_a_heic_without_its_reader_is_named_with_what_to_install(
    faulty: tuple[Path, Faults], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setitem(decode._MEDIA, "HEIC", lambda: None)
    named = r"IMG_0002\.HEIC.*a HEIC image, which needs pip install 'vitral\[heic\]'"
    out, _ = printed(capsys, "data", "check", str(faulty[0]), code=1)
    assert re.search(named, out)
    words = as_words({**TINY, "epochs": 1, "out": "run"})
    _, err = printed(capsys, "train", str(faulty[0]), *words, code=2)
    assert re.search(named, err)
    _, err = printed(capsys, "train", str(faulty[0]), *words, "--bad-images", "skip")
    assert re.search(r"left out 2 unreadable images: .*IMG_0002\.HEIC; HEIC needs pip install 'vitral\[heic\]'", err)
