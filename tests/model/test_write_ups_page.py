"""docs/write-ups.md is correct: its numbers, its code and the tests that it names."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from vitral.model import WRITE_UPS, summarize

TESTS = Path(__file__).parent
PAGE = (TESTS.parents[1] / "docs" / "write-ups.md").read_text("utf-8")


def test_numbers_of_the_table():
    rows = re.findall(r"^\| 00\d \| `(\S+)` \|.*\| ([\d,]+) \| ([\d,]+) \| ([\d.]+) (\w) \|$", PAGE, re.MULTILINE)
    assert [row[0] for row in rows] == list(WRITE_UPS)
    for name, parameters, counted, number, prefix in rows:
        summary = summarize(name)
        assert (f"{summary.parameters:,}", f"{summary.counted:,}") == (parameters, counted)
        scale = {"k": 1e3, "M": 1e6, "G": 1e9}[prefix]
        assert summary.flops / scale == pytest.approx(float(number), rel=0.005)


def test_every_test_that_it_names_exists_and_no_mistake_is_left_out():
    named = set(re.findall(r"`(test_\w+)`", PAGE))
    defined = set(
        re.findall(r"^def (test_\w+)", "".join(p.read_text("utf-8") for p in TESTS.glob("*.py")), re.MULTILINE)
    )
    assert named <= defined
    assert {name for name in defined if re.match(r"test_00\d_", name)} <= named


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
def test_its_code_runs(code, tmp_path):
    (tmp_path / "block.py").write_text(code, "utf-8")
    runpy.run_path(str(tmp_path / "block.py"))
