"""`vitral compare`: the same images for all, the differences that are there, and no others."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from images import noise
from running import TINY, as_json, printed
from vitral.data import Split
from vitral.errors import UsageError
from vitral.studies.comparison import Comparison, Contender, compare, differences
from vitral.studies.page import write_comparison
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning.run_data import load_run_data


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A run that learns day and night, one that hardly trains, and one of other held-out images."""
    root = tmp_path_factory.mktemp("compared")
    for label, level in (("day", 200), ("night", 20)):
        for split, count in (("train", 16), ("test", 20)):
            folder = root / "sky" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                Image.fromarray(level + noise(number + 100 * count, (8, 8), 1) // 8).save(folder / f"{number}.png")
    options = {**TINY, "quiet": True, "val_fraction": 0.25}
    good = vitral.train(str(root / "sky"), out=str(root / "good"), **{**options, "epochs": 8, "lr": 1e-2})
    poor = vitral.train(str(root / "sky"), out=str(root / "poor"), **{**options, "epochs": 1, "lr": 0.0})
    other = vitral.train(str(root / "sky/train"), out=str(root / "other"), **{**options, "epochs": 1})
    return good.folder, poor.folder, other.folder


def test_figures_are_those_of_evaluate(runs):
    good, poor, _ = runs
    found = compare([poor, good], device="cpu", precision="fp32")
    assert [one.name for one in found.contenders] == ["good", "poor"], "best first"
    assert found.split == "test"
    assert len(found.images) == 40
    for one, folder in zip(found.contenders, (good, poor), strict=True):
        alone = vitral.evaluate(folder, device="cpu", precision="fp32")
        assert one.evaluation.accuracy == alone.accuracy == one.correct.mean()
        assert one.evaluation.loss == pytest.approx(alone.loss)
        assert one.images_per_second > 0
        assert one.seconds_per_image > 0
    assert "good is more accurate than poor on 40 images." in found.conclusion()
    (pair,) = found.differences
    assert pair.difference == pytest.approx(found.contenders[0].correct.mean() - found.contenders[1].correct.mean())
    assert pair.interval[0] < pair.difference < pair.interval[1]


def test_starts_and_lengths_of_training_that_differ_are_named(runs):
    good, poor, _ = runs
    found = dataclasses.replace(compare([poor, good], device="cpu"), noise=0.0)
    assert {one.start for one in found.contenders} == {"random weights"}
    same = "which may explain differences of accuracy"
    assert found.notes()[-2] == f"the lengths of training differ, {same}: good 8 epochs, poor 1 epoch"
    assert not any("starts" in note for note in found.notes())
    assert "times of one network varied by 40% from round to round" in dataclasses.replace(found, noise=0.4).notes()[-1]
    warm = dataclasses.replace(found.contenders[0], start="backbone", length="1 epoch")
    notes = dataclasses.replace(found, contenders=(warm, found.contenders[1])).notes()
    assert notes[-2] == f"the starts differ, {same}: good backbone, poor random weights"
    assert not any("lengths" in note for note in notes)


def test_every_option_that_differs_is_a_note_the_augmentation_first(runs):
    good, poor, _ = runs
    found = dataclasses.replace(compare([poor, good], device="cpu"), noise=0.0)
    assert found.notes()[-1] == "options of the runs that differ: lr: good 0.01, poor 0.0"
    first, second = (
        dataclasses.replace(one, options={**one.options, "augment": augment})
        for one, augment in zip(found.contenders, ("affine", "none"), strict=True)
    )
    note = dataclasses.replace(found, contenders=(first, second)).notes()[-1]
    assert note == "options of the runs that differ: augment: good affine, poor none; lr: good 0.01, poor 0.0"


def test_images_that_only_one_names_right_are_just_these(runs):
    good, poor, _ = runs
    found = compare([good, poor], device="cpu")
    for place, one in enumerate(found.contenders):
        other = found.contenders[1 - place]
        assert set(found.only_right(place)) == set(np.flatnonzero(one.correct & ~other.correct))


def contender(name: str, correct: list[bool]) -> Contender:
    answers = tuple("right" if one else "wrong" for one in correct)
    return Contender(name, None, np.array(correct), answers, 1, 1, (8, 8), 1.0, 1.0, "")  # type: ignore[arg-type]


def comparison(*contenders: Contender) -> Comparison:
    images = [""] * len(contenders[0].correct)
    return Comparison("data", "test", "cpu", images, contenders, differences(contenders))  # type: ignore[arg-type]


def test_equal_networks_have_no_difference_to_claim():
    same = comparison(contender("a", [True] * 50 + [False] * 50), contender("b", [True] * 49 + [False] * 51))
    assert same.conclusion() == "No difference can be claimed between a and b on 100 images."


def test_of_three_the_conclusion_names_those_that_are_beaten():
    a, b, c = [True] * 90 + [False] * 10, [True] * 88 + [False] * 12, [True] * 40 + [False] * 60
    found = comparison(contender("a", a), contender("b", b), contender("c", c))
    assert found.conclusion() == (
        "a is more accurate than c on 100 images. Between it and b no difference can be claimed."
    )
    assert [(one.first, one.second, one.claimed) for one in found.differences] == [
        ("a", "b", False),
        ("a", "c", True),
        ("b", "c", True),
    ]


def test_only_images_held_out_of_all_are_compared(runs):
    good, _, other = runs
    with pytest.raises(UsageError, match="no image is held out of all these runs") as caught:
        compare([good, other], device="cpu")
    assert str(caught.value.hint).startswith(f"vitral compare {good} {other} --data FOLDER")


def test_a_folder_may_be_mended_between_two_runs(tmp_path, make_images):
    """Held-out images are the same under other names, and those that are gone or new are left out."""
    photos = make_images({"a": 16, "b": 16})
    options = {**TINY, "quiet": True, "epochs": 1}
    first = vitral.train(photos, out=tmp_path / "first", val_fraction=0.5, **options).folder
    before = {bytes(held.raw(i)) for held in [_held_out(first)] for i in range(16)}
    (photos / "a/0.png").rename(photos / "a/renamed.png")
    (photos / "a/1.png").rename(photos / "b/moved.png")
    (photos / "a/2.png").unlink()
    second = vitral.train(photos, out=tmp_path / "second", val_fraction=0.4, split_seed=3, **options).folder
    after = {bytes(held.raw(i)) for held in [_held_out(second)] for i in range(len(held))}
    found = compare([first, second], device="cpu")
    assert {bytes(found.images.raw(i)) for i in range(len(found.images))} == before & after
    assert 0 < len(found.images) < len(after)
    assert any(note.startswith(f"only the {len(found.images)} images held out of all are") for note in found.notes())


def _held_out(run: Path) -> Split:
    return load_run_data(RunFolder(run).read_plan()).dataset["val"]


def test_a_path_may_be_typed_in_any_way(tmp_path, monkeypatch, make_images):
    """The same images by a relative and an absolute path, a link, a detour, and after data and runs have moved."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    photos = make_images({"a": 10, "b": 10}, name="work/photos")
    (tmp_path / "link").symlink_to(photos)
    typed = ("photos", "./photos/", str(photos), "../link", f"{photos}/../photos")
    options = {**TINY, "quiet": True, "val_fraction": 0.3, "split_seed": 0, "epochs": 1}
    runs = [vitral.train(one, out=f"run{number}", **options).folder for number, one in enumerate(typed)]
    found = compare(runs, device="cpu")
    assert len(found.images) == 6
    assert len({one.evaluation.accuracy for one in found.contenders}) == 1
    (tmp_path / "link").unlink()
    (tmp_path / "work").rename(tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    moved = [tmp_path / "elsewhere" / one for one in runs[:3]]
    assert len(compare(moved, device="cpu").images) == 6


def test_a_copy_has_the_same_images_and_other_data_of_the_same_names_have_not(tmp_path, make_images):
    options = {**TINY, "quiet": True, "val_fraction": 0.3, "split_seed": 0, "epochs": 1}
    photos = make_images({"a": 10, "b": 10})
    copy = shutil.copytree(photos, tmp_path / "copy")
    other = make_images({"a": 10, "b": 10}, name="other", size=(8, 11))
    runs = [
        vitral.train(one, out=tmp_path / f"run-{Path(one).name}", **options).folder for one in (photos, copy, other)
    ]
    assert len(compare(runs[:2], device="cpu").images) == 6
    with pytest.raises(UsageError, match="no image is held out of all these runs"):
        compare([runs[0], runs[2]], device="cpu")


def test_with_data_all_read_the_same(runs):
    good, _, other = runs
    found = compare([good, other], good.parent / "sky", split="test", device="cpu")
    assert len(found.images) == 40
    cautions = [one.caution for one in found.contenders]
    assert cautions == ["", ""]


def test_what_cannot_be_compared(runs):
    good, _, _ = runs
    with pytest.raises(UsageError, match="two networks or more"):
        compare([good])
    with pytest.raises(UsageError, match="not compared with itself"):
        compare([good, good])


def test_the_command_prints_and_writes(runs, capsys, tmp_path):
    good, poor, _ = runs
    page = tmp_path / "page.html"
    out, err = printed(capsys, "compare", str(good), str(poor), "--device", "cpu", "--out", str(page))
    assert "40 test images" in out
    assert "good is more accurate than poor on 40 images." in out
    assert all(len(line) <= 80 for line in out.splitlines() if "sky" not in line)
    assert str(page) in err
    html = page.read_text("utf-8")
    assert html.startswith("<!doctype html>")
    assert html.count("data:image/") >= 1
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S+", "", html)
    headings = re.findall(r'<th scope="col"[^>]*>(.*?)</th>', html)
    assert headings[:2] == ["network", "accuracy"]
    assert headings[9:12] == ["first − second", "points", "claim"]
    found = as_json(capsys, "compare", str(good), str(poor), "--device", "cpu")
    assert found["images"] == 40
    assert found["differences"][0]["claimed"] is True
    assert len(found["only_right"]["good"]) == found["differences"][0]["only_first"]


def test_the_page_spreads_its_images_over_the_classes(runs, tmp_path, monkeypatch):
    """The first ones of a set in folders would all be of its first class."""
    monkeypatch.setattr("vitral.studies.page._SHOWN", 2)
    good, poor, _ = runs
    found = compare([good, poor], device="cpu")
    place = next(k for k, one in enumerate(found.contenders) if one.name == "good")
    numbers = found.only_right(place)
    assert len(numbers) > 2
    write_comparison(tmp_path / "page.html", found, "vitral compare good poor")
    html = (tmp_path / "page.html").read_text("utf-8")
    shown = [i for i in numbers if f'title="{found.images.names[i]}"' in html]
    assert shown == [numbers[0], numbers[-1]]


def test_hostile_names_are_text_on_the_page(runs, tmp_path):
    good, poor, _ = runs
    found = compare([good, poor], device="cpu")
    first, second = found.contenders
    hostile = dataclasses.replace(first, name="<script>alert(1)</script>")
    renamed = dataclasses.replace(
        found, contenders=(hostile, second), differences=differences((hostile, second)), source="<script>"
    )
    write_comparison(tmp_path / "page.html", renamed, "vitral <script>")
    assert "<script>" not in (tmp_path / "page.html").read_text("utf-8")
