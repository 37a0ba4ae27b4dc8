"""Paired statistics against scipy, a simulation, and cases that can be done by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy.stats import binomtest

from vitral.studies.paired import holm, mcnemar, paired_interval, sums_of


def differences(b: int, c: int, n: int) -> np.ndarray:
    """On b of n images only the first is right, on c only the second."""
    return np.repeat([1, -1, 0], [b, c, n - b - c])


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (3, 9), (9, 3), (5, 5), (0, 12), (152, 4), (1000, 1100)])
def test_mcnemar_is_the_exact_binomial_test(b, c):
    wanted = binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar(differences(b, c, b + c)) == pytest.approx(wanted, rel=1e-9)


def test_a_group_counts_once_in_mcnemars_test():
    copies = np.repeat([1] * 9 + [-1] * 3, 5)
    groups = np.repeat(np.arange(12), 5)
    assert mcnemar(sums_of(copies, groups)) == pytest.approx(mcnemar(differences(9, 3, 12)), rel=1e-12)
    assert mcnemar(copies) < 0.001 < mcnemar(sums_of(copies, groups))
    sums = np.array([3, -1, 2, 1, -2, 4])
    signs = np.array(list(itertools.product([1, -1], repeat=len(sums))))
    wanted = np.mean(np.abs(signs @ np.abs(sums)) >= abs(sums.sum()))
    assert mcnemar(sums) == pytest.approx(wanted, rel=1e-12), "all choices of the signs"
    assert mcnemar(sums_of(np.array([1, -1, 1, -1]), np.array([7, 7, 2, 2]))) == 1.0


def test_copies_widen_the_interval_of_a_difference_as_much_as_their_number():
    alone, groups = differences(20, 8, 80), np.repeat(np.arange(80), 5)
    assert paired_interval(np.repeat(alone, 5), groups) == pytest.approx(paired_interval(alone), abs=1e-9)
    assert paired_interval(alone, np.arange(80)) == paired_interval(alone)


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.02]) == [0.02]


def test_holm_never_reorders_and_never_lowers():
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.random(6)
        adjusted = holm(list(p))
        assert all(a >= q for a, q in zip(adjusted, p, strict=True))
        assert all(adjusted[i] <= adjusted[j] for i, j in itertools.permutations(range(6), 2) if p[i] < p[j])


@pytest.mark.parametrize(("only_first", "only_second"), [(0.1, 0.1), (0.2, 0.05), (0.02, 0.01)])
def test_the_interval_covers_the_truth_19_times_in_20(only_first, only_second):
    rng = np.random.default_rng(1)
    n, covered = 300, 0
    draws = rng.multinomial(n, [only_first, only_second, 1 - only_first - only_second], size=4000)
    for b, c, _ in draws:
        low, high = paired_interval(differences(int(b), int(c), n))
        covered += low <= only_first - only_second <= high
    assert 0.94 <= covered / 4000 <= 0.985


def test_the_interval_is_opposite_for_the_other_order_and_stays_within_bounds():
    opposite = tuple(-x for x in reversed(paired_interval(differences(9, 3, 50))))
    assert paired_interval(differences(3, 9, 50)) == pytest.approx(opposite)
    assert paired_interval(differences(5, 0, 5))[1] == 1.0
