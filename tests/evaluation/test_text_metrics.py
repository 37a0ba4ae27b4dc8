"""Error rates of texts, compared with their definition."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from vitral.errors import DataError
from vitral.evaluation.text import TextEvaluation, edits, measure_texts


@cache
def distance(one: str, other: str) -> int:
    """Levenshtein's recursion."""
    if not one or not other:
        return len(one) + len(other)
    same = one[0] == other[0]
    return min(distance(one[1:], other) + 1, distance(one, other[1:]) + 1, distance(one[1:], other[1:]) + (not same))


def test_edits_are_the_least_number():
    texts = ["".join(letters) for n in range(4) for letters in itertools.product("ab", repeat=n)]
    assert all(edits(one, other) == distance(one, other) for one in texts for other in texts)
    assert edits(["the", "cat"], ["the", "black", "cat"]) == 1


def test_rates_are_errors_over_the_right_texts():
    measured = measure_texts(["ab", "b cd", "", "abc"], ["ab", "a cd", "x", "abcd"], [0.9, 0.5, 0.1, 0.5])
    assert (measured.images, measured.characters) == (4, 11)
    assert measured.accuracy == 0.25
    assert measured.cer == pytest.approx(3 / 11)
    assert measured.wer == pytest.approx(3 / 5)
    assert measured.confidence == pytest.approx(0.5)
    assert measured.cer_interval[0] <= measured.cer <= measured.cer_interval[1]
    assert measured.accuracy_interval[0] < 0.25 < measured.accuracy_interval[1]
    assert TextEvaluation.from_json(measured.to_json()) == measured
    perfect = measure_texts(["ab"], ["ab"], [1.0])
    assert (perfect.accuracy, perfect.cer, perfect.cer_interval) == (1.0, 0.0, (0.0, 0.0))


def test_an_empty_split_and_other_data_are_refused():
    with pytest.raises(DataError, match="no images"):
        measure_texts([], [], [])
    with pytest.raises(DataError, match="not an evaluation"):
        TextEvaluation.from_json({"images": 3})
