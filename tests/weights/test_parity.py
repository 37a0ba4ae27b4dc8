"""Same weights in, same logits out, for every registered format and variant."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

import pytest
from parity import Case

from vitral.testing import check_parity
from vitral.weights.formats import FORMATS

CASES: dict[str, Callable[[], Case]] = {
    name: make
    for module in sorted(Path(__file__).parent.glob("cases_*.py"))
    for name, make in importlib.import_module(module.stem).CASES.items()
}
FIRST = {name.partition("/")[0]: name for name in reversed(CASES)}
"""Format → its first case; `make test` leaves the others to `make test-all`."""
LARGE = ("deit3", "mae")
"""Formats of releases, whose networks have a published size."""

SAMPLED = [
    pytest.param(name, marks=[pytest.mark.slow] * (FIRST.get(format) != name or format in LARGE))
    for name in CASES
    for format in [name.partition("/")[0]]
]


def test_every_format_has_a_case():
    assert {name.partition("/")[0] for name in CASES} == set(FORMATS)


@pytest.mark.parametrize("name", SAMPLED)
def test_logits_are_those_of_the_source(name: str, tmp_path: Path, record_property: Callable[[str, object], None]):
    worst, tensors = check_parity(CASES[name](), name.partition("/")[0], tmp_path)
    record_property("worst", worst)
    print(f"{name}: {tensors} tensors, max difference {worst:.1e} of max |logit|")
