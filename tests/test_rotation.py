"""A commit runs a third of the variants of a test that has many, and all of them run within some commits."""

from __future__ import annotations

from types import SimpleNamespace

from running import MANY, rotated


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def test_a_third_of_many_runs_and_all_of_few():
    many = [Item(nodeid=f"t.py::many[{number}]") for number in range(10)]
    few = [Item(nodeid=f"t.py::few[{number}]") for number in range(MANY - 1)]
    alone = [Item(nodeid="t.py::alone")]
    left_out = rotated([*many, *few, *alone], "a1b2")
    assert len(left_out) == 6
    assert left_out < {*many}
    assert rotated([*many, *few, *alone], "a1b2") == left_out, "as in every process"


def test_other_commits_run_others():
    many = [Item(nodeid=f"t.py::many[{number}]") for number in range(30)]
    ran = [{*many} - rotated(many, f"commit {number}") for number in range(40)]
    assert {len(one) for one in ran} == {10}
    assert set().union(*ran) == {*many}
