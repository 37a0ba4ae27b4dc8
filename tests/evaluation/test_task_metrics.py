"""Metrics of labels and numbers against scikit-learn."""

from __future__ import annotations

import json

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics as sk

from vitral.errors import DataError, UsageError
from vitral.evaluation.labels import LabelsEvaluation, average_precision, best_thresholds, measure_labels
from vitral.evaluation.numbers import NumbersEvaluation, measure_numbers
from vitral.workflows.tasks import evaluation_of

NAMES = ("a", "b", "c", "d")


def drawn(seed: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    labels = rng.random((50, 4)) < (0.6, 0.3, 0.1, 0.0)
    scores = np.clip(rng.random((50, 4)) * 0.7 + labels * 0.3, 0, 1)
    return (scores.round(1) if ties else scores), labels


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_label_metrics_are_those_of_scikit_learn(seed, ties):
    scores, labels = drawn(seed, ties)
    thresholds = (0.3, 0.5, 0.7, 0.5)
    found, present = scores >= thresholds, labels.any(0)
    measured = measure_labels(scores, labels, NAMES, thresholds)
    average = [sk.average_precision_score(labels[:, k], scores[:, k]) for k in np.flatnonzero(present)]
    assert average_precision(scores, labels)[present] == pytest.approx(average, abs=1e-12)
    assert measured.mean_average_precision == pytest.approx(np.mean(average))
    of_each = sk.precision_recall_fscore_support(labels, found, zero_division=0)
    for one, precision, recall, f1, images in zip(measured.per_label, *of_each, strict=True):
        assert (one.precision, one.recall, one.f1, one.images) == pytest.approx((precision, recall, f1, images))
    assert measured.macro_f1 == pytest.approx(of_each[2][present].mean())
    assert measured.micro_f1 == pytest.approx(sk.f1_score(labels, found, average="micro"))
    assert measured.exact_match == pytest.approx(sk.accuracy_score(labels, found))
    assert measured.jaccard == pytest.approx(sk.jaccard_score(labels, found, average="samples", zero_division=1))
    assert measured.loss == pytest.approx(
        np.mean([sk.log_loss(labels[:, k], scores[:, k], labels=[0, 1]) for k in range(4)]), abs=1e-3
    )
    assert measured.per_label[3].average_precision is None
    assert measured.together[0, 1] == (labels[:, 0] & labels[:, 1]).sum()


@pytest.mark.parametrize("seed", range(5))
def test_no_other_threshold_has_a_better_f1(seed):
    scores, labels = drawn(seed, ties=seed % 2 == 0)
    chosen = best_thresholds(scores, labels, 0.5)
    for k in range(3):
        best = max(sk.f1_score(labels[:, k], scores[:, k] >= cut, zero_division=0) for cut in np.unique(scores[:, k]))
        assert sk.f1_score(labels[:, k], scores[:, k] >= chosen[k]) == pytest.approx(best)
    assert chosen[3] == 0.5  # no image has it


@pytest.mark.parametrize("seed", range(3))
def test_number_metrics_are_those_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    true = rng.normal(size=(30, 2)) * (1, 1000) + (0, 1e6)
    predicted = true + rng.normal(size=(30, 2)) * (0.3, 500)
    measured = measure_numbers(predicted, true, ("a", "b"))
    assert measured.r2 == pytest.approx(sk.r2_score(true, predicted))
    for k, one in enumerate(measured.per_number):
        errors = np.abs(predicted - true)[:, k]
        assert one.mae == pytest.approx(sk.mean_absolute_error(true[:, k], predicted[:, k]))
        assert one.rmse == pytest.approx(sk.root_mean_squared_error(true[:, k], predicted[:, k]))
        assert one.mae_interval == pytest.approx(stats.t.interval(0.95, 29, errors.mean(), stats.sem(errors)))


def test_metrics_survive_json():
    labels = measure_labels(*drawn(0), NAMES, (0.5,) * 4)
    numbers = measure_numbers(np.ones((3, 1)), np.arange(3.0)[:, None], ("a",))
    for one, kind in ((labels, LabelsEvaluation), (numbers, NumbersEvaluation)):
        again = evaluation_of(json.loads(json.dumps(one.to_json(), allow_nan=False)))
        assert isinstance(again, kind)
        assert again.to_json() == one.to_json()
    with pytest.raises(DataError, match="not an evaluation"):
        evaluation_of({"task": "labels", "images": 3})


def test_a_number_that_never_varies_has_no_r2():
    measured = measure_numbers(np.array([[1.0], [2.0]]), np.array([[3.0], [3.0]]), ("a",))
    assert (measured.r2, measured.per_number[0].r2, measured.per_number[0].mae) == (None, None, 1.5)
    assert measure_numbers(np.array([[1.0]]), np.array([[3.0]]), ("a",)).per_number[0].mae_interval == (2.0, 2.0)


def test_what_is_no_prediction_is_refused():
    scores, labels = drawn(0)
    with pytest.raises(UsageError, match="not probabilities"):
        measure_labels(scores + 1, labels, NAMES, (0.5,) * 4)
    with pytest.raises(UsageError, match="do not match"):
        measure_labels(scores[:, :2], labels, NAMES, (0.5,) * 4)
    with pytest.raises(UsageError, match="not finite"):
        measure_numbers(np.full((2, 1), np.nan), np.ones((2, 1)), ("a",))
    with pytest.raises(DataError, match="no images"):
        measure_numbers(np.ones((0, 1)), np.ones((0, 1)), ("a",))
