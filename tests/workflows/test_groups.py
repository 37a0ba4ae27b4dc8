"""The groups of held-out images are counted by a run, kept with it, and found again or anew by every command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from images import noise, scene
from running import as_json, printed, train
from vitral.data import Split, load
from vitral.data.checks.groups import common_groups, near_sets, with_copies
from vitral.errors import UsageError
from vitral.inference.outputs.classes import Classes
from vitral.studies.comparison import compare
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning.plan import plan_run

COPIES = 5


def table(folder: Path, sources: int, *, column: bool) -> Path:
    """A table of two classes with five rows of each file, or five files of each value of a column `group`."""
    folder.mkdir()
    rows = ["file,label,group" if column else "file,label"]
    for number in range(sources):
        label = "night" if number % 2 else "day"
        for copy in range(COPIES):
            name = f"{number}-{copy if column else 0}.png"
            Image.fromarray(noise(10 * number + (copy if column else 0))).save(folder / name)
            rows.append(f"{name},{label},source {number}" if column else f"{name},{label}")
    (folder / "images.csv").write_text("\n".join(rows) + "\n")
    return folder / "images.csv"


@pytest.mark.parametrize("column", [True, False])
def test_a_run_counts_groups_of_a_table_and_so_do_all_commands(column, tmp_path, capsys):
    data, run = table(tmp_path / "images", 40, column=column), tmp_path / "run"
    words = ["--model", "mu/4", "--image-size", "8", "--epochs", "1", "--val-fraction", "0.5", "--device", "cpu"]
    out, message = printed(capsys, "train", str(data), "--init", "none", *words, "--out", str(run))
    text = out + message
    assert "on 100 validation images in 20 groups, not used in training" in text
    plan = plan_run({"data": str(data), "val_fraction": 0.2, "init": "none", "out": str(tmp_path / "other")})
    reason = next(choice for choice in plan.plan.choices if choice.name == "validation")
    assert reason.value == "40 images in 8 groups"
    assert "too few for a reliable accuracy" in reason.reason
    result = json.loads((run / "result.json").read_text())["val"]
    assert (result["images"], result["groups"]) == (100, 20)
    again = as_json(capsys, "evaluate", str(run), "--device", "cpu")
    assert {name: again[name] for name in ("groups", "accuracy_interval")} == {
        name: result[name] for name in ("groups", "accuracy_interval")
    }
    assert "100 images in 20 groups" in printed(capsys, "evaluate", str(run), "--device", "cpu")[0]
    assert as_json(capsys, "evaluate", str(run), str(data), "--device", "cpu")["groups"] == 40
    output = vitral.load(run).output
    assert isinstance(output, Classes)
    assert (len(output.scores), output.groups, output.temperature) == (100, 20, 1.0)
    with pytest.raises(UsageError, match="100 images in 20 groups"):
        output.covering(0.96)
    assert output.covering(0.9).threshold == output.scores[94], "19 of 20 groups"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photographs with a test folder, in which each of 12 scenes is there thrice: saved anew, smaller, and mirrored."""
    for split, count, first in (("train", 20, 0), ("test", 12, 100)):
        for number in range(count):
            folder = tmp_path / "photos" / split / ("night" if number % 2 else "day")
            folder.mkdir(parents=True, exist_ok=True)
            image = scene(first + number)
            image.save(folder / f"{number}.png")
            if split == "test":
                image.resize((84, 63)).save(folder / f"{number}-small.png")
                image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(folder / f"{number}-mirrored.png")
    return tmp_path / "photos"


def test_near_duplicates_of_a_test_folder_are_kept_with_the_run(photos, tmp_path, capsys, monkeypatch):
    run = train(photos, tmp_path / "run", epochs=1)
    groups = run.result["test"]["groups"]
    assert 12 <= groups <= 14, "two in a hundred are not found"
    sets = RunFolder(run.folder).read_plan().near_held_out["test"]
    assert sum(len(one) - 1 for one in sets) == 36 - groups
    monkeypatch.setattr("vitral.data.checks.groups.near_pairs", lambda *given: pytest.fail("searched again"))
    assert as_json(capsys, "evaluate", str(run.folder))["groups"] == groups
    assert vitral.evaluate(run.folder, photos, device="cpu").groups == groups, "the same data, named"
    shutil.copytree(photos / "test", tmp_path / "elsewhere")
    assert vitral.evaluate(run.folder, tmp_path / "elsewhere", device="cpu").groups == 36, "no search in other data"
    again = train(photos, tmp_path / "again", epochs=1, seed=1)
    found = compare([run.folder, again.folder], device="cpu")
    assert found.to_json()["groups"] == groups
    assert f"36 images in {groups} groups" in found.conclusion()
    assert any("count groups" in note for note in found.notes())
    (photos / "test/day/0-small.png").unlink()
    assert vitral.evaluate(run.folder, device="cpu").groups == 35, "the recorded numbers are of other images"


def test_equal_files_of_other_data_are_counted_once(trained, tmp_path, capsys):
    folder = tmp_path / "copies"
    for label in ("day", "night"):
        (folder / label).mkdir(parents=True)
        for number in range(6):
            image = Image.fromarray(noise(number + 50 * (label == "day"), (8, 10), 1))
            for copy in range(COPIES):
                image.save(folder / label / f"{number}-{copy}.png")
    found = as_json(capsys, "evaluate", str(trained.folder), str(folder), "--device", "cpu")
    assert (found["images"], found["groups"]) == (60, 12)
    cut = as_json(capsys, "evaluate", str(trained.folder), str(folder), "--device", "cpu", "--knn", "3")
    assert cut["groups"] == cut["knn"]["groups"] == cut["images"] / COPIES, "copies stay on one side of its cut"
    run = shutil.copytree(trained.folder, tmp_path / "run")  # the threshold is saved in it
    unknown = as_json(capsys, "evaluate", str(run), "--unknown", str(folder), "--device", "cpu")["unknown"]
    assert (unknown["images"], unknown["groups"]) == (60, 12)


def test_equal_pixels_are_one_group_and_groups_of_several_sources_are_joined():
    pixels = np.repeat(np.stack([noise(number) for number in range(4)]), 2, axis=0)
    split = Split([f"{number}" for number in range(8)], np.arange(8) % 2, lambda index: pixels[index])
    assert near_sets(split) == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert len(np.unique(with_copies(split).groups)) == 4
    joined = common_groups([np.array([0, 0, 1, 2]), None, np.array([5, 6, 6, 7])])
    assert len(set(joined[:3])) == 1
    assert joined[3] != joined[0]
    assert common_groups([None, None]) is None
    assert load("digits")["test"].groups is None
