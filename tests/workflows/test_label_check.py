"""Wrong labels are found in a folder, written as a table that can be trained on, and judged without themselves."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vitral
from images import MakeImages, noise
from running import as_json, printed, train
from vitral.cli.main import main
from vitral.data import load
from vitral.data.checks.groups import folds_of
from vitral.errors import UsageError
from vitral.evaluation.label_errors import estimate
from vitral.training.run_folder import RunFolder
from vitral.workflows.checks import labels as labels_of_checks
from vitral.workflows.checks.labels import MOST_FITTED, _predicted, check_labels, out_of_fold

WRONG = {"0", "1", "2", "3"}
"""Images of `colors` in the wrong class."""


@pytest.fixture
def colors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Reddish and bluish images in two classes; four are in the wrong one."""
    monkeypatch.chdir(tmp_path)
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
    assert len(found["doubtful"]) == 24
    assert {Path(one["place"]["name"]).stem for one in found["doubtful"][:4]} == WRONG
    suspects = {Path(one["place"]["name"]).stem for one in found["doubtful"] if one["likely_wrong"]}
    assert len(suspects) == found["likely_wrong"] >= 3
    assert suspects <= WRONG
    assert found["weights"] == "backbone"
    assert all(one["suggested"] != one["place"]["label"] for one in found["doubtful"])
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
    assert again["likely_wrong"] <= len(WRONG - suspects)
    out, err = printed(capsys, *words)
    assert f"{len(suspects)} of 120 labels are likely wrong" in " ".join(out.split())
    assert "photos-labels.png: 36 images" in err
    with Image.open("photos-labels.png") as drawn:
        assert drawn.height > 600, "a sheet without being asked for"


def test_features_that_tell_nothing_apart_support_no_claim_but_a_ranking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(60):
        folder = tmp_path / "noise" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise(number, (12, 12))).save(folder / f"{number}.png")
    words = ["data", "check", str(tmp_path / "noise"), "--labels"]
    found = as_json(capsys, *words)
    assert (found["weak"], found["likely_wrong"], found["expected_precision"]) == (True, 0, None)
    assert len(found["doubtful"]) == 24
    out, err = printed(capsys, *words, "--write", str(tmp_path / "ranked.csv"))
    assert "the 24 most doubtful of 60 labels" in " ".join(out.split())
    assert "None can be called wrong" in " ".join(out.split())
    assert "noise-labels.png: 36 images" in err
    with open(tmp_path / "ranked.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 60
    assert all(row["label"] == row["given"] for row in rows)


def test_no_claim_is_made_about_labels_that_are_right(colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in [one for one in colors.rglob("*.png") if one.stem in WRONG]:
        other = {"blue": "red", "red": "blue"}[path.parent.name]
        path.rename(colors / other / path.name)
    out, _ = printed(capsys, "data", "check", str(colors), "--labels")
    assert "None is certain" in out
    assert "24 most doubtful" in " ".join(out.split())


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


def test_wrong_labels_of_thousands_of_classes_are_ranked_in_closed_form() -> None:
    """A logistic regression of 2,500 classes took over 580 s; the ranking needs none."""
    rng = np.random.default_rng(0)
    true = np.repeat(np.arange(2500), 5)
    features = rng.standard_normal((2500, 32))[true] + 0.3 * rng.standard_normal((len(true), 32))
    labels, planted = true.copy(), rng.choice(len(true), 20, replace=False)
    labels[planted] = (true[planted] + 1) % 2500
    assert len(labels) * 2500 > MOST_FITTED
    probabilities, strength = _predicted(features, labels, 2500, folds_of(labels, None, 5))
    found = estimate(labels, probabilities)
    assert strength is None
    assert len(set(found.order[:24].tolist()) & set(planted.tolist())) >= 18
    right = found.suggested[planted] == true[planted]
    assert right.mean() >= 0.9


def test_a_ranking_without_a_logistic_regression_says_so(
    colors: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels_of_checks, "MOST_FITTED", 0)
    out, err = printed(capsys, "data", "check", str(colors), "--labels", "--format", "json")
    found = json.loads(out)
    assert found["C"] is None
    assert "a discriminant analysis ranks the labels of 120 images in 2 classes" in " ".join(err.split())
    assert {Path(one["place"]["name"]).stem for one in found["doubtful"][:4]} == WRONG


def test_labels_that_the_network_has_seen_are_noted(trained: vitral.TrainedRun, tmp_path: Path) -> None:
    data = load(RunFolder(trained.folder).read_plan().run.data)
    assert "trained on all of these labels" in check_labels(data, str(trained.folder), folds=3).notes[0]
    assert not any("memorized" in note for note in check_labels(load("digits"), str(trained.folder), folds=2).notes)


def test_a_run_says_that_it_was_trained_on_labels_of_a_folder_that_has_changed(
    colors: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(colors, tmp_path / "run", epochs=1)
    (colors / "blue/2.png").rename(colors / "red/2.png")
    _, err = printed(capsys, "data", "check", str(colors), "--labels", "--init", str(tmp_path / "run"), "--folds", "2")
    assert "trained on some of these labels: errors that it has memorized are not found" in err


def test_unreadable_images_are_left_out_by_name(colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (colors / "blue/0.png").write_bytes(b"")
    words = ["data", "check", str(colors), "--labels"]
    out, err = printed(capsys, *words)
    assert "of 119 labels" in out
    assert re.search(r"left out 1 unreadable image: \S*blue/0.png", err)
    assert main([*words, "--bad-images", "error"]) == 2
    assert "--bad-images skip" in capsys.readouterr().err


def test_refusals(colors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(colors), "--labels", "--write", "fixed.txt"]) == 2
    assert ".csv" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--folds"):
        check_labels(load(colors), folds=1)
    shutil.rmtree(colors / "red")
    assert main(["data", "check", str(colors), "--labels"]) == 2
    assert "one class" in capsys.readouterr().err
