"""`docs/weights.md` covers every format, target and scheme, and claims parity only where it is tested."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from test_parity import CASES

from vitral.weights.convert import TARGETS
from vitral.weights.formats import FORMATS
from vitral.weights.read.source import SUFFIXES
from vitral.weights.transform.resize import SCHEMES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "weights.md").read_text("utf-8")


def table(title: str) -> dict[str, list[str]]:
    """The rows of the first table below a title, by their first cell."""
    section = re.split(r"^#+ ", PAGE.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert len({row[0] for row in cells}) == len(cells) > 0
    return {row[0].strip("`"): row[1:] for row in cells}


def test_every_format_has_its_row():
    rows = table("Formats")
    assert list(rows) == [*FORMATS, "native"]
    assert {len(row) for row in rows.values()} == {6}


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_says_what_the_format_is(name: str):
    format = FORMATS[name]
    _, told_by, positions, _, left_out, written = table("Formats")[name]
    wanted = format.required or (f"--from {name}",)
    assert re.findall(r"`([^`]+)`", told_by) == [*wanted]
    assert positions == format.scheme in SCHEMES
    assert (left_out != "–") == bool(format.ignored)
    target = (re.findall(r"`--to (\w+)`", written) or [""])[0]
    if format.write is not None:
        assert target == name.removesuffix("-bit")
    assert target in ("", *TARGETS)


def test_every_target_has_an_example():
    assert set(re.findall(r"^\$ vitral convert \S+ \S+ --to (\w+)$", PAGE, re.MULTILINE)) == set(TARGETS)


def test_every_kind_of_pickle_is_named():
    pickles = {ending for ending in SUFFIXES if ending not in (".safetensors", ".npz", ".pth.tar")}
    assert all(f"`{ending}`" in PAGE for ending in pickles)


def test_parity_is_claimed_for_what_is_tested():
    """Figures are of one run; what holds always is that every format has one, within what the test demands."""
    rows, cases = table("Parity"), Counter(name.partition("/")[0] for name in CASES)
    assert list(rows) == [*FORMATS, "all"]
    for name, (_, count, difference) in rows.items():
        assert 0 < int(count) <= (cases.total() if name == "all" else cases[name]), name
        worst = 0.0 if difference == "0, to the bit" else float(difference)
        assert worst <= 1e-5, name
    assert int(rows["all"][1]) == sum(int(row[1]) for name, row in rows.items() if name != "all")
