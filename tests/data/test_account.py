"""One account of every source: an image that is met is used, or a note names it with the reason."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from PIL import Image

import vitral
from images import noise
from vitral.data import load
from vitral.data.checks import groups
from vitral.data.checks.groups import near_sets, with_near
from vitral.data.sources.unlabeled import load_images
from vitral.data.splits import with_validation
from vitral.data.targets import Labeling
from vitral.errors import DataError

CLASSES = {f"{name}/{number}.png": name for name in ("cat", "dog") for number in range(4)}
LOOSE, LINKED, CUT = "loose.png", "cat/linked.png", "dog/cut.png"


def encoded(seed: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(noise(seed, (12, 12))).save(buffer, "PNG")
    return buffer.getvalue()


CONTENTS = {name: encoded(number) for number, name in enumerate([*CLASSES, LOOSE])} | {CUT: encoded(99)[:40]}


def folder(place: Path) -> Path:
    """Eight images in two classes, one cut off, one outside the classes, and a link to nothing."""
    for name, content in CONTENTS.items():
        (place / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (place / "set" / name).write_bytes(content)
    (place / "set" / LINKED).symlink_to("annexed")
    return place / "set"


def tar(place: Path) -> Path:
    with tarfile.open(place / "set.tar", "w") as archive:
        archive.add(folder(place), "set")
    return place / "set.tar"


def zipped(place: Path) -> Path:
    with zipfile.ZipFile(place / "set.zip", "w") as archive:
        for name, content in CONTENTS.items():
            archive.writestr(f"set/{name}", content)
    return place / "set.zip"


def shard(place: Path) -> Path:
    """Records with a key that comes again, an image without a class, and a class without an image."""
    with tarfile.open(place / "set-0.tar", "w") as archive:

        def add(name: str, content: bytes) -> None:
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))

        for key, (name, label) in enumerate(CLASSES.items()):
            add(f"{key}.0.png", CONTENTS[name])
            add(f"{key}.0.cls", label.encode())
        add("0.0.png", CONTENTS[LOOSE])
        add("90.png", CONTENTS[LOOSE])
        add("91.cls", b"cat")
        add("92.png", CONTENTS[CUT])
        add("92.cls", b"dog")
    return place / "set-0.tar"


def parquet(place: Path) -> Path:
    arrow, files = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    names = [*CLASSES, LOOSE, CUT]
    images = [{"bytes": CONTENTS[name], "path": name} for name in names] + [{"bytes": None, "path": None}]
    table = arrow.table({"image": images, "label": [CLASSES.get(name) for name in names[:-1]] + ["dog", "dog"]})
    files.write_table(table, place / "set.parquet")
    return place / "set.parquet"


def listed(place: Path) -> Path:
    rows = [f"{name},{label}" for name, label in CLASSES.items()]
    (folder(place) / "set.csv").write_text("\n".join(["file,label", *rows, f"{CUT},dog"]) + "\n")
    return place / "set/set.csv"


READERS: Mapping[Callable[[Path], Path], tuple[str, ...]] = {
    folder: (*CONTENTS, LINKED),
    tar: (*CONTENTS, LINKED),
    zipped: tuple(CONTENTS),
    shard: (*(f"{key}.0" for key in range(8)), "set-0.tar:0.0.png", "90.png", "set-0.tar:91", "92"),
    parquet: tuple(f"{row:06}" for row in range(11)),
    listed: (*CLASSES, CUT),
}
"""Reader → all that it meets."""


@pytest.mark.parametrize("reader", READERS, ids=lambda one: one.__name__)
def test_all_that_a_reader_meets_is_used_or_named(reader: Callable[[Path], Path], tmp_path: Path) -> None:
    found = load(reader(tmp_path))
    used, said = found["train"].names, " ".join(found.notes)
    assert found.classes == ("cat", "dog")
    assert len(used) >= len(CLASSES)
    lost = [one for one in READERS[reader] if not any(one in name for name in used) and one not in said]
    assert not lost, f"neither used nor named: {lost} of {used}; {said}"
    assert len(set(used)) == len(used)


@pytest.mark.parametrize("reader", READERS, ids=lambda one: one.__name__)
def test_what_cannot_be_read_is_an_error_or_counted(
    reader: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = vitral.cli.main.main(["data", "check", str(reader(tmp_path)), "--format", "json"])
    report = json.loads(capsys.readouterr().out)
    unreadable = {one["name"] for one in report["unreadable"]}
    cut = "92" if reader is shard else "000009" if reader is parquet else CUT
    assert any(cut in one for one in unreadable), report["unreadable"]
    assert found == 1


@pytest.mark.parametrize("split", ["seen", "none"])
def test_a_table_without_an_answer_is_refused_by_line(split: str, tmp_path: Path) -> None:
    table = listed(tmp_path)
    table.write_text(table.read_text() + f"{LOOSE},{'' if split == 'seen' else 'None'}\n")
    with pytest.raises(DataError, match="1 row without a label") as refused:
        load(table)
    assert "line 11" in str(refused.value)


@pytest.mark.parametrize(
    ("task", "cells", "other"),
    [("class", "ab", "b"), ("numbers", ("1.5", "9.25"), "30"), ("labels", ("x;y", "y"), "x")],
)
@pytest.mark.parametrize("most", [3000, 10])
def test_an_image_with_two_answers_is_noted_and_kept_on_one_side(
    most, task, cells, other, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "FEW", most)
    for number in range(40):
        Image.fromarray(noise(number, (24, 24))).save(tmp_path / f"{number}.png")
    (tmp_path / "copy.png").write_bytes((tmp_path / "2.png").read_bytes())
    rows = [f"{number}.png,{cells[number % 2]}" for number in range(40)] + [f"0.png,{other}", f"copy.png,{other}"]
    (tmp_path / "set.csv").write_text("\n".join(["file,label", *rows]) + "\n")
    whole = load(tmp_path / "set.csv", wanted=Labeling(task), tasks=("class", "numbers", "labels"))
    assert any("1 row with an image that came before: 0.png" in note for note in whole.notes)
    assert any("1 image with more than one label: 0.png" in note for note in whole.notes)
    joined = with_near(whole, {"train": near_sets(whole["train"])})
    for seed in range(8):
        split = with_validation(joined, 0.5, seed)
        sides = [{Path(name).name.split("#")[0] for name in split[one].names} for one in ("train", "val")]
        assert not sides[0] & sides[1], "the same file"
        assert most == 10 or ("2.png" in sides[0]) == ("copy.png" in sides[0]), "a copy"


def test_images_without_labels_are_all_met(tmp_path: Path) -> None:
    found = load_images(str(folder(tmp_path)))
    said = " ".join([*found["train"].names, *found.notes])
    assert not [name for name in (*CONTENTS, LINKED) if name not in said]
