"""Habits of other libraries work as written, or with one word changed (`tests/habits.py`)."""

from __future__ import annotations

import pytest

from habits import HABITS, ONE_WORD, WORKS, place, tried

MISSING = ("an export",)
"""Habits that are commands of the shell, and not functions."""

pytestmark = [pytest.mark.python, pytest.mark.slow]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory):
    with place(tmp_path_factory.mktemp("habits")) as found:
        yield found


@pytest.mark.parametrize(("number", "habit"), list(enumerate(HABITS)), ids=[habit.title for habit in HABITS])
def test_a_habit_works(number, habit, names):
    pytest.importorskip("pandas")
    how = tried(habit, number, names)
    if habit.title in MISSING:
        assert how.startswith("no: ")
    else:
        assert how == (ONE_WORD if habit.changed else WORKS), how


def test_there_are_forty():
    assert len(HABITS) == 40
