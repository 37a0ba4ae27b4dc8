"""Every command on a run of labels and on one of numbers: it works, or says why it cannot and what to type."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from running import printed

DONE: dict[str, tuple[tuple[str, ...], str]] = {
    "evaluate": (("evaluate", "RUN"), ""),
    "evaluate a table": (("evaluate", "RUN", "TABLE", "--split", "test", "--report", "OUT.html"), ""),
    "predict": (("predict", "RUN", "IMAGE"), ""),
    "predict a table": (("predict", "RUN", "PHOTOS", "--out", "OUT.csv", "--all"), ""),
    "embed": (("embed", "RUN", "PHOTOS", "--out", "OUT.npz"), ""),
    "similar": (("similar", "RUN", "IMAGE", "PHOTOS", "--top", "3"), ""),
    "explain": (("explain", "RUN", "IMAGE", "--target", "NAME", "--out", "OUT"), ""),
    "inspect": (("inspect", "RUN", "--out", "OUT"), ""),
    "verify": (("verify", "RUN"), ""),
    "convert": (("convert", "RUN", "OUT.safetensors", "--to", "native"), ""),
    "export": (("export", "RUN", "--to", "torch", "--out", "OUT"), ""),
    "resume": (("train", "--out", "RUN", "--resume"), "nothing to do"),
    "summary": (("summary", "RUN"), ""),
}
REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "sets": (("predict", "RUN", "IMAGE", "--coverage", "0.9"), "one class an image"),
    "sure answers": (("predict", "RUN", "IMAGE", "--right", "0.9"), "one class an image"),
    "unknown images": (("evaluate", "RUN", "--unknown", "PHOTOS"), "class"),
    "views": (("evaluate", "RUN", "--tta", "mirror"), "--tta none"),
    "a network with itself": (("compare", "RUN", "RUN", "--out", "OUT.html"), "is not compared with itself"),
    "data check": (("data", "check", "TABLE"), "one class an image"),
    "replay": (("replay", "RUN", "--step", "1", "--out", "OUT.png"), "one class an image"),
    "labels in doubt": (("data", "check", "TABLE", "--labels"), "one class an image"),
    "neighbors": (("evaluate", "RUN", "--knn", "3"), ""),
    "to a library": (("convert", "RUN", "OUT", "--to", "hf"), ""),
    "mixing": (("train", "TABLE", "--out", "OUT", "--mixup", "2", "--recipe", "linear-probe"), ""),
}


@pytest.fixture(params=["labels", "numbers"])
def place(
    request: pytest.FixtureRequest, labels_run: Path, numbers_run: Path, tables: Path, tmp_path: Path
) -> dict[str, str]:
    run = labels_run if request.param == "labels" else numbers_run
    return {
        "RUN": str(run),
        "TABLE": str(tables / f"{request.param}.csv"),
        "PHOTOS": str(tables / "p"),
        "IMAGE": str(tables / "p/3.png"),
        "NAME": "red" if request.param == "labels" else "width",
        "OUT": str(tmp_path / "out"),
    }


def filled(words: tuple[str, ...], place: dict[str, str]) -> list[str]:
    out = place["OUT"]
    return [place.get(word) or word.replace("OUT.", f"{out}.") for word in words]


@pytest.mark.report
@pytest.mark.parametrize("name", DONE)
def test_it_works(name: str, place: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    words, said = DONE[name]
    out, err = printed(capsys, *filled(words, place))
    assert said in err
    assert "bug in vitral" not in err
    assert out + err


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_why_it_cannot(
    name: str, place: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch, tmp_path
) -> None:
    monkeypatch.chdir(tmp_path)
    words, why = REFUSED[name]
    out, err = printed(capsys, *filled(words, place), code=2)
    assert why in err
    assert "bug in vitral" not in err
    assert "  try: " in err
    assert not out


def test_answers_are_in_the_units_of_the_table(place: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = printed(capsys, "predict", place["RUN"], place["IMAGE"], "--format", "json")
    (found,) = json.loads(out)["predictions"]
    if place["NAME"] == "red":
        assert {one["label"] for one in found["labels"]} <= {"red", "green", "blue"}
        assert all(one["probability"] >= one["threshold"] for one in found["labels"])
    else:
        assert set(found["numbers"]) == {"width", "area"}
        assert 0 < found["numbers"]["width"] < 9
        assert 0 < found["numbers"]["area"] < 9000
