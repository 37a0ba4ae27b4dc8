"""Intervals of images in groups hold the truth as often as they state; those of independent images are as ever."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vitral.evaluation.calibration import fit_temperature
from vitral.evaluation.intervals import (
    design_effect,
    expected_right,
    mean_interval,
    proportion_interval,
    wilson_interval,
)
from vitral.evaluation.metrics import GROUPED, Evaluation, measure
from vitral.evaluation.numbers import measure_numbers
from vitral.evaluation.text import measure_texts
from vitral.evaluation.unknown import separate

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks.intervals import SIZES, compared, coverage

from vitral.studies.paired import mcnemar, paired_interval, sums_of


@pytest.mark.parametrize(
    ("sizes", "within", "likeness"),
    [
        ("80 of 5", (0.4, 0.6), 0.0),
        ("80 of 5", (0.85, 0.95), 0.3),
        ("80 of 5", (0.85, 0.95), 1.0),
        ("20 of 5", (0.4, 0.6), 0.7),
        ("10 of 5", (0.4, 0.6), 0.3),
        ("80 of 1 to 16", (0.85, 0.95), 0.7),
        ("40 of 1 to 32", (0.93, 0.99), 1.0),
        ("100 of 1", (0.4, 0.6), 0.0),
    ],
)
def test_of_95_percent_intervals_95_percent_hold_the_truth(sizes, within, likeness):
    assert 0.93 <= coverage(SIZES[sizes], within, likeness, draws=1500) <= 0.97


def test_without_groups_they_would_not():
    assert coverage(SIZES["80 of 5"], (0.85, 0.95), 1.0, draws=500, grouped=False) < 0.7


@pytest.mark.parametrize("likeness", [0.0, 0.7])
def test_equally_good_networks_are_rarely_told_apart(likeness):
    rng, held, claimed = np.random.default_rng(0), 0, 0
    for _ in range(600):
        each, groups = compared(rng, SIZES["80 of 5"], 0.85, likeness)
        low, high = paired_interval(each, groups)
        held, claimed = held + (low <= 0 <= high), claimed + (mcnemar(sums_of(each, groups)) < 0.05)
    assert 0.93 <= held / 600 <= 0.98
    assert claimed / 600 <= 0.07


@pytest.mark.parametrize("trials", [10, 30, 80])
def test_new_images_are_right_as_often_as_expected(trials):
    """At least as often as stated, on the average over networks of any accuracy; and the range is no wider than so."""
    rng, inside, wide = np.random.default_rng(0), 0, 0
    for _ in range(4000):
        truth = rng.beta(0.5, 0.5)
        low, high = expected_right(rng.binomial(trials, truth) / trials, trials)
        inside += low <= rng.binomial(10, truth) <= high
        wide += high - low
    assert inside / 4000 >= 0.8
    assert wide / 4000 < 4
    assert expected_right(23 / 30, 30) == (6, 9)
    assert expected_right(1.0, 99)[1] == 10


def test_images_on_their_own_have_wilsons_interval_to_the_last_digit():
    right = np.random.default_rng(0).random(263) < 0.3
    own = np.random.default_rng(1).permutation(263)
    assert proportion_interval(right) == proportion_interval(right, own) == wilson_interval(int(right.sum()), 263)
    assert design_effect(right, None) == design_effect(right, own) == 1.0


@pytest.mark.parametrize("right", [0, 1, 60, 79, 80])
def test_copies_have_the_interval_of_their_sources(right):
    sources = np.arange(80) < right
    five, groups = np.repeat(sources, 5), np.repeat(np.arange(80), 5)
    assert proportion_interval(five, groups) == pytest.approx(wilson_interval(right, 80), abs=1e-3)
    assert proportion_interval(five, groups)[0] <= right / 80 <= proportion_interval(five, groups)[1]


def test_one_group_says_nothing_about_others():
    assert proportion_interval(np.array([True, True, False]), np.zeros(3, int)) == (0.0, 1.0)
    assert mean_interval(np.array([1.0, 3.0]), np.zeros(2, int)) == (2.0, 2.0)


def test_the_interval_of_a_mean_is_students_of_the_groups():
    values = np.random.default_rng(0).normal(5, 2, 40)
    half = stats.t.ppf(0.975, 39) * values.std(ddof=1) / np.sqrt(40)
    assert mean_interval(values) == pytest.approx((values.mean() - half, values.mean() + half))
    assert mean_interval(np.repeat(values, 6), np.repeat(np.arange(40), 6)) == pytest.approx(mean_interval(values))


def grouped(groups: np.ndarray | None) -> Evaluation:
    labels = np.repeat(np.arange(80) % 4, 5)
    answers = np.where(np.repeat(np.arange(80) % 5 == 0, 5), (labels + 1) % 4, labels)
    return measure(np.eye(4)[answers], labels, ("a", "b", "c", "d"), groups)


def test_metrics_count_groups_and_say_so(capsys):
    from rich.console import Console

    alone, five = grouped(None), grouped(np.repeat(np.arange(80), 5))
    assert (alone.groups, five.groups, alone.widened, five.widened) == (400, 80, False, True)
    assert five.counted("test image") == "400 test images in 80 groups"
    assert alone.counted() == "400 images"
    assert five.to_json()["groups"] == 80
    assert Evaluation.from_json(five.to_json()).to_json() == five.to_json()
    plain = alone.to_json()
    del plain["groups"]  # of an earlier version
    assert Evaluation.from_json(plain).groups == 400
    for one in (alone, five):
        one.print_table(Console(width=200))
        printed = capsys.readouterr().out
        assert (GROUPED in printed) == (one is five)
        assert ("unreliable with only 400 images in 80 groups" in printed) == (one is five)


def test_a_report_counts_groups():
    from vitral.evaluation.report import ReportContent, render

    five = np.repeat(np.arange(80), 5)
    pages = [render(ReportContent("x", evaluation=grouped(one)), run="r") for one in (None, five)]
    assert [f"320 of 400 validation images in 80 groups correct; {GROUPED}." in page for page in pages] == [False, True]
    assert ["Too few groups of images to judge calibration" in page for page in pages] == [False, True]


def test_errors_of_texts_and_numbers_count_groups():
    read, right = ["ab", "ax", "abc", "b"] * 10, ["ab", "ab", "abc", "a"] * 10
    groups = np.tile(np.arange(4), 10)
    alone, ten = (measure_texts(read, right, [1.0] * 40, one) for one in (None, groups))
    assert ten.groups == 4
    for name in ("accuracy_interval", "cer_interval", "wer_interval"):
        (low, high), (least, most) = getattr(alone, name), getattr(ten, name)
        assert most - least > 1.5 * (high - low)
    same = measure_texts(read, right, [1.0] * 40, np.arange(40))
    assert same == alone
    true = np.random.default_rng(0).normal(size=(40, 1))
    errors = np.repeat(np.random.default_rng(1).normal(size=(8, 1)), 5, axis=0)
    alone, five = (measure_numbers(true + errors, true, ["age"], one) for one in (None, np.repeat(np.arange(8), 5)))
    widths = [one.per_number[0].mae_interval[1] - one.per_number[0].mae_interval[0] for one in (alone, five)]
    assert widths[1] > 2 * widths[0]
    assert five.to_json()["groups"] == 8


def test_an_auroc_counts_groups_of_known_and_of_unknown_images():
    rng = np.random.default_rng(0)
    known, unknown = rng.normal(size=60), rng.normal(1, 1, 40)
    alone = separate(known, unknown).auroc_interval
    five = separate(
        np.repeat(known, 5), np.repeat(unknown, 5), None, (np.repeat(np.arange(60), 5), np.repeat(np.arange(40), 5))
    )
    assert five.auroc_interval == pytest.approx(alone, abs=1e-6)
    assert separate(np.repeat(known, 5), np.repeat(unknown, 5)).auroc_interval[0] > alone[0] + 0.02


def test_a_temperature_takes_enough_groups():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 200)
    logits = 4 * np.eye(3)[labels] + 3 * rng.normal(size=(200, 3))
    assert fit_temperature(logits, labels) != 1
    assert fit_temperature(logits, labels, groups=40) == 1
