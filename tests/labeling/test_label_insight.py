"""Answers of the features about the labels: suggestions, doubts, held-out images, and accuracy."""

from __future__ import annotations

import numpy as np
import pytest

from vitral.labeling.insight import (
    Insight,
    Labels,
    by_similarity,
    forecast,
    hold_out,
    insight,
    likely_wrong,
    neighbors,
    tempered,
)

CLASSES = 3


def features(count: int, apart: float = 2.5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features (n, 16) around the centers of three classes, and the classes."""
    rng = np.random.default_rng(seed)
    truth = np.arange(count) % CLASSES
    return rng.normal(size=(count, 16)) + apart * np.eye(CLASSES, 16)[truth], truth


def labeled(truth: np.ndarray, numbers: np.ndarray, held: np.ndarray | None = None) -> Labels:
    labels = np.full(len(truth), -1)
    labels[numbers] = truth[numbers]
    mask = np.zeros(len(truth), bool)
    if held is not None:
        mask[held] = True
    return Labels(labels, labels >= 0, labels < 0, mask, CLASSES)


def found(count: int, numbers: np.ndarray, **options: np.ndarray) -> tuple[Insight, np.ndarray]:
    values, truth = features(count)
    return insight(values, np.arange(count), labeled(truth, numbers, **options)), truth


def test_nothing_is_suggested_before_two_classes_have_three_images():
    before, _ = found(60, np.array([0, 3, 6, 1, 4]))
    assert (before.suggested == -1).all()
    after, truth = found(60, np.array([0, 3, 6, 1, 4, 7]))
    waiting = np.arange(60) > 7
    assert set(after.suggested[waiting].tolist()) == {0, 1}, "nobody has named the third class yet"
    two = waiting & (truth < 2)
    assert (after.suggested == truth)[two].mean() > 0.8


def test_probabilities_are_calibrated():
    """Of suggestions with a probability of about p, about p are right."""
    values, truth = features(3000, apart=1.6)
    labels = labeled(truth, np.arange(300))
    given = insight(values, np.arange(3000), labels)
    new = np.arange(3000) >= 300
    right = given.suggested == truth
    assert abs(given.probability[new].mean() - right[new].mean()) < 0.04
    sure = new & (given.probability > 0.95)
    assert sure.sum() > 300
    assert right[sure].mean() > 0.93


def test_few_labels_make_no_sure_suggestions():
    """Six right predictions of six do not show that the seventh is right."""
    six, _ = found(60, np.array([0, 3, 6, 1, 4, 7]))
    waiting = np.arange(60) > 7
    many, _ = found(600, np.arange(300))
    assert six.probability[waiting].mean() < 0.9
    assert many.probability[300:].mean() > 0.9


def test_held_out_images_get_no_suggestion_and_measure():
    held = np.arange(0, 200, 4)
    given, _ = found(200, np.arange(120), held=held)
    assert (given.suggested[held] == -1).all()
    assert given.held is not None
    assert len(given.held.labels) == 30, "those with a label"
    plain = given.to_json(CLASSES)
    assert plain["held_out"]["images"] == 30
    low, high = plain["held_out"]["interval"]
    assert low < plain["held_out"]["accuracy"] < high
    assert plain["crossed"]["images"] == 90
    assert sum(map(sum, plain["confusion"])) == 90


def test_copies_count_once_and_stay_on_one_side():
    """Ten copies of each of 12 images: too few groups to say how accurate it is."""
    values, truth = features(12)
    copies = np.repeat(np.arange(12), 10)
    given = insight(values[copies], copies, labeled(truth[copies], np.arange(120)))
    assert given.crossed is not None
    assert given.crossed.to_json()["groups"] == 12
    assert "accuracy" not in given.crossed.to_json()


def test_labels_that_are_likely_wrong_come_first():
    values, truth = features(300, apart=4)
    labels = labeled(truth, np.arange(300))
    flipped = np.random.default_rng(1).choice(300, 20, replace=False)
    labels.labels[flipped] = (truth[flipped] + 1) % CLASSES
    given = insight(values, np.arange(300), labels)
    wrong = likely_wrong(given)
    assert len(set(wrong[:20]) & set(flipped)) >= 18
    assert (given.suggested[flipped] == truth[flipped]).mean() > 0.9
    assert (np.diff(given.doubt[wrong]) <= 0).all()


def test_an_image_of_no_class_is_unlike_all():
    values, truth = features(200)
    values[-1] = -8.0
    given = insight(values, np.arange(200), labeled(truth, np.arange(90)))
    assert given.unlike[-1]
    assert given.unlike[90:-1].mean() < 0.1
    assert not given.unlike[:90].any(), "a person has named these"


def test_images_without_features_say_nothing():
    values, truth = features(60)
    values[[0, 50]] = np.nan
    given = insight(values, np.arange(60), labeled(truth, np.arange(30)))
    assert given.suggested[0] == given.suggested[50] == -1
    assert (given.suggested[30:50] >= 0).all()
    assert by_similarity(values, 5)[-2:].tolist() == [0, 50]


def test_similar_images_and_neighbors_of_a_class():
    values, truth = features(90, apart=8)
    order = by_similarity(values, 4)
    assert order[0] == 4
    assert (truth[order[:30]] == 1).all()
    assert (truth[neighbors(values, 4, truth == 2)] == 2).all()
    assert 4 not in neighbors(values, 4, truth == 1)


def test_whole_groups_are_held_out():
    groups = np.repeat(np.arange(50), 2)
    drawn = hold_out(groups, np.ones(100, bool))
    assert len(drawn) == 20
    assert len(np.unique(groups[drawn])) == 10
    assert drawn.tolist() == hold_out(groups, np.ones(100, bool)).tolist()
    assert len(hold_out(np.arange(30), np.ones(30, bool))) == 0, "too few images"


def test_the_curve_rises_and_its_forecast_is_between_now_and_all():
    values, truth = features(2000, apart=1.6)
    given = insight(values, np.arange(2000), labeled(truth, np.arange(120)))
    assert [labels for labels, _ in given.curve] == sorted(labels for labels, _ in given.curve)
    assert forecast(((30, 0.6), (60, 0.7), (120, 0.775))) == pytest.approx(0.812, abs=0.02)
    assert forecast(((30, 0.8), (60, 0.8))) is None
    assert forecast(()) is None


def test_a_temperature_flattens():
    one = np.array([[0.9, 0.1]])
    assert tempered(one, 1.0) == pytest.approx(one)
    assert 0.5 < tempered(one, 3.0)[0, 0] < 0.9
