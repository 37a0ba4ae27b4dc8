"""A temperature minimizes the loss on validation images, and conformal sets cover as many images as asked."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import MakeImages
from running import as_json, printed, train
from vitral.cli.main import main
from vitral.errors import UsageError, WeightsError
from vitral.evaluation.calibration import conformal_scores, cuts_of, fit_temperature
from vitral.evaluation.enough import FOR_A_FIT
from vitral.evaluation.metrics import Evaluation
from vitral.inference.outputs import output_of
from vitral.inference.outputs.classes import Classes
from vitral.workflows.tasks import task_of

NAMES = tuple("abcde")


def drawn(images: int, temperature: float, seed: int = 0, spread: float = 2) -> tuple[torch.Tensor, np.ndarray]:
    """Draw logits and labels for which softmax(logits / temperature) is calibrated."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, (images, len(NAMES)))
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    labels = (rng.random((images, 1)) > probabilities.cumsum(1)).sum(1)
    return torch.from_numpy(logits * temperature).float(), labels


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_the_temperature_that_was_drawn_is_found(temperature: float) -> None:
    logits, labels = drawn(20_000, temperature)
    found = fit_temperature(logits.numpy(), labels)
    assert found == pytest.approx(temperature, rel=0.03)
    truth = torch.from_numpy(labels)

    def loss(divisor: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits.double() / divisor, truth))

    assert loss(found) <= min(loss(found * factor) for factor in (0.98, 0.999, 1.001, 1.02))


def test_no_temperature_of_few_or_perfect_predictions() -> None:
    logits, labels = drawn(FOR_A_FIT - 1, 3.0)
    assert fit_temperature(logits.numpy(), labels) == 1
    assert fit_temperature(10 * np.eye(5)[np.arange(100) % 5], np.arange(100) % 5) == 1


def test_calibration_is_reported_before_and_after() -> None:
    logits, labels = drawn(3000, 2.5)
    task = task_of("class")
    output = task.fitted(Classes(NAMES), logits, labels)
    measured = task.measure(output.values(logits).numpy(), labels, output)
    plain = task.measure(logits.softmax(1).numpy(), labels, Classes(NAMES))
    assert isinstance(measured, Evaluation)
    assert isinstance(plain, Evaluation)
    assert measured.raw_ece == pytest.approx(plain.ece, abs=1e-3)
    assert measured.ece < plain.ece / 3
    assert measured.accuracy == plain.accuracy
    assert plain.raw_ece is None
    assert "raw_ece" not in plain.to_json()
    again = Evaluation.from_json(json.loads(json.dumps(measured.to_json())))
    assert (again.raw_ece, again.temperature) == (measured.raw_ece, measured.temperature)


@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_sets_cover_the_labels_of_other_images(coverage: float) -> None:
    """Over many validation sets the mean coverage is at least the wanted one, and at most 1 / (n + 1) more."""
    shares, sizes = [], []
    for seed in range(40):
        logits, labels = drawn(1200, 1.0, seed)
        probabilities = logits.softmax(1).numpy()
        output = Classes(NAMES, scores=conformal_scores(probabilities[:200], labels[:200])).covering(coverage)
        sets = [output.prediction("", row).labels for row in probabilities[200:]]
        shares.append(np.mean([NAMES[label] in one for label, one in zip(labels[200:], sets, strict=True)]))
        sizes.append(np.mean([len(one) for one in sets]))
    assert coverage - 0.008 <= np.mean(shares) <= coverage + 1 / 201 + 0.03
    assert 1 <= np.mean(sizes) < 4


def test_too_few_images_for_a_coverage_are_refused() -> None:
    output = Classes(NAMES, scores=(0.1,) * 18)
    with pytest.raises(UsageError, match="19 validation images"):
        output.covering(0.95)
    assert dataclasses.replace(output, scores=(0.1,) * 19).covering(0.95).threshold == 0.1
    for count in (1, 2, 6, 18, 50):
        few = dataclasses.replace(output, scores=(0.1,) * count)
        with pytest.raises(UsageError) as caught:
            few.covering(0.999)
        assert few.covering(float(str(caught.value.hint).split()[1])).threshold == 0.1, "the hint works"
    with pytest.raises(UsageError, match="they have none"):
        Classes(NAMES).covering(0.9)
    for wrong in (0.0, 1.0, 1.5):
        with pytest.raises(UsageError, match="between 0 and 1"):
            output.covering(wrong)


@pytest.mark.parametrize("groups", [None, 45])
def test_sets_from_few_images_come_with_their_range(groups: int | None) -> None:
    """The stated range has the coverage of other images for about 95 % of validation sets."""
    held = 0
    for seed in range(60):
        logits, labels = drawn(1990, 1.0, seed)
        probabilities = logits.softmax(1).numpy()
        known = slice(90) if groups is None else np.repeat(np.arange(groups), 2)
        scores = conformal_scores(probabilities[known], labels[known])
        output = Classes(NAMES, scores=scores, groups=groups).covering(0.8)
        low, high = (float(share) / 100 for share in re.findall(r"(\d+)%", output.few()))
        assert output.threshold is not None
        own = 1 - probabilities[90:][np.arange(1900), labels[90:]]
        held += low - 0.005 <= np.mean(own <= output.threshold) <= high + 0.005
    assert held >= 54
    assert Classes(NAMES, scores=(0.1,) * 100).covering(0.9).few() == ""
    assert Classes(NAMES, scores=(0.1,) * 9).few() == "", "without sets"


@pytest.mark.parametrize(("validation", "right"), [(100, 0.9), (400, 0.95)])
def test_sure_answers_are_correct_as_often_as_asked(validation: int, right: float) -> None:
    """Over many validation sets the mean share of correct answers is the wanted one, and not much more."""
    shares, held = [], 0
    for seed in range(60):
        logits, labels = drawn(4000, 1.0, seed, spread=4)
        probabilities = (1.5 * logits).softmax(1).numpy()  # of a network that is too sure of itself
        known, others = slice(validation), slice(validation, None)
        output = Classes(NAMES, cuts=cuts_of(probabilities[known], labels[known])).sure(right)
        assert output.cut is not None
        found = [output.prediction("", row) for row in probabilities[others]]
        truth = [NAMES[label] for label in labels[others]]
        answers = [one.label == name for one, name in zip(found, truth, strict=True) if one.sure]
        assert {one.answer for one in found} <= {*NAMES, "not sure"}
        shares.append(np.mean(answers))
        held += output.cut.low <= shares[-1] <= output.cut.high
    assert right - 0.01 <= np.mean(shares) <= right + 0.02
    assert held >= 54


def test_a_cut_has_the_most_images_that_promise_enough() -> None:
    probabilities = np.stack([np.linspace(0.99, 0.51, 25), np.linspace(0.01, 0.49, 25)], 1)
    labels = np.zeros(25, int)
    labels[20:] = 1  # the least sure answers are wrong
    output = Classes(("a", "b"), scores=(0.5,) * 25, cuts=cuts_of(probabilities, labels))
    assert [(cut.images, cut.right) for cut in output.cuts] == [
        (25, 20),
        (24, 20),
        (23, 20),
        (22, 20),
        (21, 20),
        (20, 20),
    ]
    sure = output.sure(0.95).cut
    assert sure is not None
    assert sure.probability == pytest.approx((probabilities[19, 0] + probabilities[20, 0]) / 2)
    assert sure.promised == 20 / 21
    assert sure.describe(output.validation).startswith(
        "sure from a probability of 60.0%: 20 of 25 validation images, 100.0%"
    )
    with pytest.raises(UsageError, match="no answer is sure enough") as caught:
        output.sure(0.99)
    assert caught.value.hint.startswith("--right 0.95, or ")
    assert output.sure(0.95) == output.sure(0.8).sure(0.95)
    in_fives = cuts_of(probabilities, labels, np.arange(25) // 5)
    assert [cut.promised for cut in in_fives if cut.images == 20] == [20 / 25]
    assert cuts_of(np.full((30, 2), 0.5), np.zeros(30, int))[0].images == 30, "equal probabilities are not divided"


def test_a_share_that_cannot_be_promised_is_refused() -> None:
    with pytest.raises(UsageError, match="no thresholds for --right"):
        Classes(NAMES).sure(0.9)
    output = Classes(NAMES, scores=(0.1,) * 9, cuts=cuts_of(np.eye(5)[:1].repeat(9, 0), np.zeros(9, int)))
    with pytest.raises(UsageError) as caught:
        output.sure(0.95)
    assert caught.value.why == "the 9 surest of 9 validation images: 9 are correct, which promises 90.0% for new images"
    assert output.sure(0.9).cut == output.cuts[0]
    for wrong in (0.0, 1.0, 1.5):
        with pytest.raises(UsageError, match="between 0 and 1"):
            output.sure(wrong)
    never = Classes(NAMES, scores=(0.1,) * 9, cuts=cuts_of(np.eye(5)[:1].repeat(9, 0), np.ones(9, int)))
    with pytest.raises(UsageError) as caught:
        never.sure(0.5)
    assert caught.value.hint.startswith("train with more")


def test_an_output_survives_its_file_and_a_damaged_one_is_refused() -> None:
    output = Classes(NAMES, 1.5, (0.1, 0.2), cuts=cuts_of(np.eye(5)[:2], np.array([0, 2])))
    assert output_of(NAMES, json.loads(json.dumps(output.to_json()))) == output
    assert Classes(NAMES).to_json() == {}
    for wrong in (0, -1, "nan"):
        with pytest.raises(WeightsError, match="temperature"):
            output_of(NAMES, {"temperature": wrong})
    for row in ([0.5, 2, 3, 0.5, 0.1, 0.9], [0.5, 0, 0, 0.5, 0.1, 0.9], [0.5, 2], "row"):
        with pytest.raises(WeightsError, match="damaged header"):
            output_of(NAMES, {"cuts": [row]})


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on noise with enough validation images for a temperature."""
    root = tmp_path_factory.mktemp("calibrated")
    rng = np.random.default_rng(0)
    for number in range(240):
        folder = root / "photos" / ("dark" if number % 2 else "light")
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.normal(118 if number % 2 else 138, 40, (8, 8)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return train(root / "photos", root / "run", val_fraction=0.4).folder


def test_a_run_is_calibrated_and_predicts_sets(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predictor = vitral.load(str(calibrated))
    assert isinstance(predictor.output, Classes)
    assert predictor.output.temperature != 1
    assert len(predictor.output.scores) == 96
    photos = str(calibrated.parent / "photos")
    result = json.loads((calibrated / "result.json").read_text())
    assert result["val"]["raw_ece"] != result["val"]["ece"]
    evaluated = as_json(capsys, "evaluate", str(calibrated))
    assert evaluated["ece"] == pytest.approx(result["val"]["ece"], abs=1e-6)
    assert "without the temperature" in printed(capsys, "evaluate", str(calibrated))[0]
    found = as_json(capsys, "predict", str(calibrated), photos, "--coverage", "0.9")
    share = np.mean([Path(one["image"]).parent.name in one["labels"] for one in found["predictions"]])
    assert share > 0.85
    assert all(one["label"] == one["labels"][0] for one in found["predictions"])
    table = calibrated.parent / "sets.csv"
    printed(capsys, "predict", str(calibrated), photos, "--coverage", "0.9", "--out", str(table))
    rows = table.read_text().splitlines()
    assert "labels" in rows[0].split(",")
    assert any("dark|light" in row or "light|dark" in row for row in rows)
    out, said = printed(capsys, "predict", str(calibrated), photos, "--coverage", "0.9")
    assert "{" in out
    assert "note: only 96 validation images choose the sets: " in said


def test_a_run_answers_not_sure(calibrated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    photos, table = str(calibrated.parent / "photos"), str(calibrated.parent / "answers.csv")
    predictor = vitral.load(str(calibrated))
    assert isinstance(predictor.output, Classes)
    least, most = predictor.output.cuts[0], predictor.output.cuts[-1]
    assert least.images == 96
    words = ["predict", str(calibrated), photos, "--right", f"{most.promised - 1e-6}"]
    _, said = printed(capsys, *words, "--out", table)
    assert f"Answers  sure from a probability of {most.probability:.1%}: {most.images} of 96 validation images" in said
    with open(table, newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0])[:3] == ["path", "answer", "class"]
    for row in rows:
        sure = float(row["probability"]) >= most.probability
        assert row["answer"] == (row["class"] if sure else "not sure")
    assert {row["answer"] for row in rows} > {"not sure"}
    found = as_json(capsys, *words)["predictions"]
    assert [one["answer"] for one in found] == [row["answer"] for row in rows]
    assert "\tnot sure\t" in printed(capsys, *words)[0]
    assert printed(capsys, "predict", str(calibrated), photos, "--right", "0.99999", code=2)[1].count("\n") <= 5
    predictor.output = predictor.output.sure(most.promised)
    assert [one.answer for one in predictor(photos)] == [row["answer"] for row in rows]


def test_coverage_of_weights_without_validation_is_refused(
    make_images: MakeImages, capsys: pytest.CaptureFixture[str]
) -> None:
    photos = make_images({"a": 1})
    assert main(["predict", "demo", str(photos), "--coverage", "0.9"]) == 2
    assert "validation" in capsys.readouterr().err
