"""Wrong labels are found in a folder, written as a table that can be trained on, and judged without themselves."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from images import MakeImages, noise
from running import as_json, printed
from vitral.cli.main import main
from vitral.data import load
from vitral.data.checks.groups import folds_of
from vitral.errors import UsageError
from vitral.training.run_folder import RunFolder
from vitral.workflows.checks.labels import check_labels, out_of_fold

WRONG = {"0", "1", "2", "3"}
"""Images of `colors` in the wrong class."""


@pytest.fixture
def colors(tmp_path: Path) -> Path:
    """Reddish and bluish images in two classes; four are in the wrong one."""
    root = tmp_path / "photos"
    for number in range(120):
        blue = number % 2
        pixels = noise(number, (12, 12)) // 3
        pixels[:, :, 2 if blue else 0] += 150
        wrong = number < 4
        folder = root / ("blue" if blue != wrong else "red")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return root


def test_wrong_labels_are_listed_drawn_and_corrected(
    colors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, sheet = tmp_path / "tables" / "fixed.csv", tmp_path / "labels.png"
    table.parent.mkdir()
    words = ["data", "check", str(colors), "--labels"]
    found = as_json(capsys, *words, "--write", str(table), "--sheet", str(sheet))
    suspects = {Path(one["place"]["name"]).stem for one in found["suspects"]}
    assert len(suspects) >= 3
    assert suspects <= WRONG
    assert found["weights"] == "backbone"
    assert all(one["suggested"] != one["place"]["label"] for one in found["suspects"])
    with Image.open(sheet) as drawn:
        assert drawn.width > 600
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 120
    assert {Path(row["file"]).stem for row in rows[:4]} == WRONG
    assert {Path(row["file"]).stem for row in rows if row["label"] != row["given"]} == suspects
    corrected = load(table)
    assert {Path(name).stem for name in corrected["train"].names} == set(map(str, range(120)))
    again = as_json(capsys, "data", "check", str(table), "--labels", "--folds", "4")
    assert len(again["suspects"]) <= len(WRONG - suspects)
    out, _ = printed(capsys, *words)
    assert f"{len(suspects)} of 120 labels are likely wrong" in " ".join(out.split())


def test_features_that_tell_nothing_apart_are_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(60):
        folder = tmp_path / "noise" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(number, (12, 12))).save(folder / f"{number}.png")
    words = ["data", "check", str(tmp_path / "noise"), "--labels"]
    found = as_json(capsys, *words)
    assert (found["weak"], found["suspects"], found["expected_precision"]) == (True, [], None)
    assert main([*words, "--write", str(tmp_path / "fixed.csv")]) == 2
    out, err = capsys.readouterr()
    assert "no evidence on 60 labels" in " ".join(out.split())
    assert "no labels are suggested" in err
    assert not (tmp_path / "fixed.csv").exists()


def test_groups_and_copies_are_in_one_fold(make_images: MakeImages) -> None:
    labels = np.repeat([0, 1, 2], 30)
    alone = folds_of(labels, None, 5)
    assert all(np.bincount(labels[alone == fold]).tolist() == [6, 6, 6] for fold in range(5))
    groups = np.arange(90) // 3
    together = folds_of(labels, groups, 5)
    assert all(len(set(together[groups == group])) == 1 for group in range(30))
    assert all(np.bincount(labels[together == fold]).tolist() == [6, 6, 6] for fold in range(5))
    assert (folds_of(labels, None, 5, seed=1) != alone).any()


def test_an_image_is_predicted_without_itself() -> None:
    """Random labels on features that identify the image: fitted ones would agree, those out of fold do not."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 60)
    probabilities, _ = out_of_fold(np.eye(60), labels, 2, np.arange(60) % 5, (100.0,))
    assert (probabilities.argmax(1) == labels).mean() < 0.65
    assert probabilities.sum(1) == pytest.approx(1)


def test_the_only_image_of_a_class_is_not_judged() -> None:
    features, labels = np.array([[0.0], [0.1], [1.0], [1.1], [5.0]]), np.array([0, 0, 1, 1, 2])
    probabilities, _ = out_of_fold(features, labels, 3, np.array([0, 1, 0, 1, 0]))
    assert probabilities[4].tolist() == [0, 0, 1]


def test_labels_that_the_network_has_seen_are_noted(trained: vitral.TrainedRun, tmp_path: Path) -> None:
    data = load(RunFolder(trained.folder).read_plan().run.data)
    assert "memorized" in check_labels(data, str(trained.folder), folds=3).notes[0]
    assert not any("memorized" in note for note in check_labels(load("digits"), str(trained.folder), folds=2).notes)


def test_refusals(colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(colors), "--write", "fixed.csv"]) == 2
    assert "--labels --write fixed.csv" in capsys.readouterr().err
    assert main(["data", "check", str(colors), "--labels", "--write", "fixed.txt"]) == 2
    assert ".csv" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--folds"):
        check_labels(load(colors), folds=1)
    (colors / "blue/broken.png").write_bytes(b"no image")
    assert main(["data", "check", str(colors), "--labels"]) == 2
    assert "vitral data check" in capsys.readouterr().err
    shutil.rmtree(colors / "red")
    (colors / "blue/broken.png").unlink()
    assert main(["data", "check", str(colors), "--labels"]) == 2
    assert "one class" in capsys.readouterr().err
