"""Test metrics against values computed by hand and against scikit-learn."""

import io
import json
from dataclasses import asdict

import numpy as np
import pytest
from rich.console import Console
from sklearn.metrics import accuracy_score, f1_score, log_loss, top_k_accuracy_score

from vitral.errors import DataError, UsageError
from vitral.evaluation import Evaluation, measure
from vitral.evaluation.metrics import DENSE_JSON_CLASSES, wilson_interval


def by_hand() -> Evaluation:
    """Six images: 3 cats (2 correct, 1 predicted dog), 2 dogs (1 correct, 1 predicted cat), 1 owl (predicted dog)."""
    probabilities = np.array(
        [
            [0.8, 0.1, 0.1],
            [0.6, 0.3, 0.1],
            [0.4, 0.5, 0.1],
            [0.1, 0.9, 0.0],
            [0.7, 0.2, 0.1],
            [0.0, 0.75, 0.25],
        ]
    )
    return measure(probabilities, np.array([0, 0, 0, 1, 1, 2]), ["cat", "dog", "owl"])


def random_case(images: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, list[str]]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, images)
    logits = generator.normal(size=(images, classes))
    logits[np.arange(images), labels] += 1.5
    probabilities = np.exp(logits)
    return probabilities / probabilities.sum(axis=1, keepdims=True), labels, [f"class {k}" for k in range(classes)]


def test_headline_by_hand():
    evaluation = by_hand()
    assert evaluation.images == 6
    assert evaluation.accuracy == pytest.approx(3 / 6)
    assert evaluation.top5 is None
    assert evaluation.loss == pytest.approx(-np.log([0.8, 0.6, 0.4, 0.9, 0.2, 0.25]).mean())
    assert evaluation.balanced_accuracy == pytest.approx((2 / 3 + 1 / 2 + 0) / 3)


def test_classes_by_hand():
    cat, dog, owl = by_hand().per_class
    assert (cat.precision, cat.recall, cat.f1) == pytest.approx((2 / 3, 2 / 3, 2 / 3))
    assert (dog.precision, dog.recall, dog.f1) == pytest.approx((1 / 3, 1 / 2, 2 / 5))
    assert (owl.precision, owl.recall, owl.f1) == (0, 0, 0)
    assert [(score.most_confused_with, score.times) for score in (cat, dog, owl)] == [
        ("dog", 1),
        ("cat", 1),
        ("dog", 1),
    ]
    assert by_hand().macro_f1 == pytest.approx((2 / 3 + 2 / 5 + 0) / 3)
    assert by_hand().confusion.tolist() == [[2, 1, 0], [1, 1, 0], [0, 1, 0]]


def test_calibration_by_hand():
    evaluation = by_hand()
    assert len(evaluation.calibration) == 15
    filled = {round(bin_.upper * 15): bin_ for bin_ in evaluation.calibration if bin_.images}
    # 0.8 and 0.75 share the bin (11/15, 12/15]; 0.6 = 9/15 closes the ninth.
    assert {upper: bin_.images for upper, bin_ in filled.items()} == {8: 1, 9: 1, 11: 1, 12: 2, 14: 1}
    assert filled[12].confidence == pytest.approx(0.775)
    assert filled[12].accuracy == pytest.approx(0.5)
    gaps = [0.5 - 0, 1 - 0.6, 0.7 - 0, 2 * (0.775 - 0.5), 1 - 0.9]
    assert evaluation.ece == pytest.approx(sum(gaps) / 6)


def test_wilson_interval_matches_published_values():
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson_interval(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert wilson_interval(1, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)
    assert wilson_interval(20, 20)[1] == 1.0


@pytest.mark.parametrize("classes", [2, 6, 50])
def test_agrees_with_scikit_learn(classes: int):
    probabilities, labels, names = random_case(700, classes)
    evaluation = measure(probabilities, labels, names)
    predicted = probabilities.argmax(1)
    assert evaluation.accuracy == accuracy_score(labels, predicted)
    assert evaluation.loss == pytest.approx(log_loss(labels, probabilities, labels=range(classes)))
    assert evaluation.macro_f1 == pytest.approx(f1_score(labels, predicted, average="macro"))
    if classes > 5:
        expected = top_k_accuracy_score(labels, probabilities, k=5, labels=range(classes))
        assert evaluation.top5 == pytest.approx(expected)
    assert evaluation.confusion.sum() == 700
    assert np.trace(evaluation.confusion) == (predicted == labels).sum()


def test_classes_without_images_are_in_no_mean():
    probabilities, labels, names = random_case(200, 4)
    alone = measure(probabilities, labels, names)
    padded = np.hstack([probabilities, np.zeros((200, 2))])
    evaluation = measure(padded, labels, [*names, "empty", "void"])
    assert [score.images for score in evaluation.per_class][-2:] == [0, 0]
    assert evaluation.macro_f1 == pytest.approx(alone.macro_f1)
    assert evaluation.balanced_accuracy == pytest.approx(alone.balanced_accuracy)


def test_equal_probabilities_fall_to_the_lower_index_in_top1_and_top5():
    evaluation = measure(np.full((10, 10), 0.1), np.arange(10), [str(k) for k in range(10)])
    assert evaluation.accuracy == 0.1
    assert evaluation.top5 == 0.5


def test_one_image():
    evaluation = measure(np.array([[0.3, 0.7]]), np.array([1]), ["a", "b"])
    assert evaluation.accuracy == 1
    assert evaluation.accuracy_interval == pytest.approx((0.2065, 1.0), abs=1e-4)
    assert evaluation.ece == pytest.approx(0.3)
    assert evaluation.per_class[1].most_confused_with is None
    assert evaluation.most_confused() == []


def test_certain_and_wrong_has_a_finite_loss():
    evaluation = measure(np.array([[1.0, 0.0]], dtype=np.float32), np.array([1]), ["a", "b"])
    assert evaluation.loss == pytest.approx(-np.log(1e-12))


def test_most_confused_is_sorted_by_frequency():
    probabilities = np.eye(3)[[1, 1, 2, 0, 0, 0, 2]]
    evaluation = measure(probabilities, np.array([0, 0, 0, 1, 1, 1, 2]), ["a", "b", "c"])
    assert evaluation.most_confused() == [("b", "a", 3), ("a", "b", 2), ("a", "c", 1)]
    assert evaluation.most_confused(1) == [("b", "a", 3)]


@pytest.mark.parametrize("classes", [2, 7, DENSE_JSON_CLASSES + 1])
def test_json_round_trip(classes: int):
    evaluation = measure(*random_case(60, classes))
    plain = json.loads(json.dumps(evaluation.to_json(), allow_nan=False))
    back = Evaluation.from_json(plain)
    assert back.to_json() == evaluation.to_json()
    assert back.confusion.dtype == np.int64
    assert np.array_equal(back.confusion, evaluation.confusion)
    assert [asdict(bin_) for bin_ in back.calibration] == plain["calibration"]
    assert ("confusion" in plain) == (classes <= DENSE_JSON_CLASSES)


@pytest.mark.parametrize("damage", [{"accuracy": "much"}, {"confusion": [[1]]}, {"per_class": [{}]}, {"top5": []}])
def test_damaged_json_is_refused(damage: dict[str, object]):
    with pytest.raises(DataError, match="not an evaluation"):
        Evaluation.from_json(by_hand().to_json() | damage)


@pytest.mark.parametrize(
    ("probabilities", "labels"),
    [
        (np.ones((2, 3)) / 3, np.array([0])),
        (np.ones((2, 2)) / 2, np.array([0, 1])),
        (np.ones((1, 3)) / 3, np.array([3])),
        (np.ones((1, 3)) / 3, np.array([-1])),
        (np.ones((1, 3)) / 3, np.array([0.0])),
        (np.array([[2.0, -1.0, 0.0]]), np.array([0])),
        (np.array([[9.0, 1.0, 0.0]]), np.array([0])),
        (np.array([[np.nan, 0.5, 0.5]]), np.array([0])),
    ],
)
def test_invalid_input_is_refused(probabilities: np.ndarray, labels: np.ndarray):
    with pytest.raises(UsageError):
        measure(probabilities, labels, ["a", "b", "c"])


def test_no_images_is_refused():
    with pytest.raises(DataError, match="no images"):
        measure(np.zeros((0, 2)), np.zeros(0, dtype=int), ["a", "b"])


def printed(evaluation: Evaluation, **options: int) -> str:
    console = Console(file=io.StringIO(), width=100)
    evaluation.print_table(console, **options)
    return console.file.getvalue()


def test_table_for_the_terminal():
    text = printed(by_hand())
    assert "50.00%" in text
    assert "18.76% to 81.24%" in text
    assert text.index("owl") < text.rindex("cat  ")
    assert "top-5" not in text


@pytest.mark.parametrize(
    ("answers", "labels", "one"), [([1, 1, 1], [0, 1, 1], "owl"), ([1, 0, 1], [0, 1, 1], None), ([1, 1], [1, 1], None)]
)
def test_a_single_predicted_class_is_reported(answers, labels, one):
    found = measure(np.eye(3)[answers], np.array(labels), ["cat", "owl", "fox"])
    assert found.one_answer == one
    assert ("the same class for every image: owl" in printed(found)) == (one is not None)


def test_predictions_for_images_of_one_class():
    found = measure(np.eye(2)[[0, 1, 1]], np.zeros(3, dtype=int), ["cat", "owl"])
    assert "owl (2×)" in printed(found)
    assert "owl (" not in printed(measure(np.eye(2)[[0, 0]], np.zeros(2, dtype=int), ["cat", "owl"]))


def test_images_of_one_class_have_neither_precision_nor_f1():
    classes = ["cat", "owl"]
    one, several = (measure(np.eye(2)[[0, 1, 1]], np.array(labels), classes) for labels in ([0, 0, 0], [0, 0, 1]))
    assert (one.one_class, several.one_class) == (True, False)
    for word in ("precision", "F1", "balanced"):
        assert word in printed(several)
        assert word not in printed(one)
    assert "recall" in printed(one)


def test_table_shows_the_worst_and_takes_no_markup_from_names():
    probabilities, labels, names = random_case(300, 8)
    probabilities = np.hstack([probabilities, np.zeros((300, 1))])
    names = ["[red]x[/red]" if k == 3 else name for k, name in enumerate(names)] + ["[/nothing]\x1b[2J"]
    text = printed(measure(probabilities, labels, names), worst=8)
    assert "[red]x[/red]" in text
    assert "Not measured: 1 class without images ([/nothing]�[2J)" in text
    assert "\x1b" not in text
    assert "The 2 worst of 8 classes" in printed(measure(probabilities, labels, names), worst=2)
