"""Reports of a measurement follow from its rows, and survive a file."""

from __future__ import annotations

import dataclasses
import io
import json
import re

import pytest
from rich.console import Console

from vitral.bench.report import COLUMNS, Report, Row

ROW = Row(
    model="S/16",
    image_size=(224, 224),
    what="training",
    who="timm",
    compiled=False,
    precision="bf16",
    via="",
    batch=32,
    images=32,
    seconds=(0.5, 0.4, 0.9),
    reference=0.25,
    flops=10**9,
    matrix_rate=8e9,
    memory=3_000_000,
    first=None,
)
OURS = dataclasses.replace(ROW, who="vitral", seconds=(0.25, 0.2, 0.3))
MACHINE = {"cpu": "a CPU", "cores": 2, "instructions": ["avx2"], "system": "Linux", "memory_gib": 4}


def report(*rows: Row) -> Report:
    return Report(
        rows,
        MACHINE,
        threads=1,
        load_average=(0.5, None),
        date="2026-01-02",
        versions={"torch": "2"},
        settings={"timm": "as [it] is"},
        notes=("left out: all",),
    )


def printed(found: Report, width: int = 200) -> str:
    file = io.StringIO()
    found.print_table(Console(file=file, width=width))
    return file.getvalue()


def test_what_follows_from_a_row() -> None:
    assert (ROW.rate, ROW.times, ROW.share) == (64.0, 2.0, 0.25)
    assert ROW.to_json()["median"] == 0.5
    assert ROW.to_json()["greatest"] == 0.9


def test_a_report_survives_json() -> None:
    found = report(OURS, ROW)
    read = Report.from_json(json.loads(json.dumps(found.to_json())))
    assert list(read.rows) == [OURS, ROW]
    assert read.to_json() == found.to_json()
    assert printed(read) == printed(found)


def test_every_column_is_in_the_table() -> None:
    text = printed(report(OURS, dataclasses.replace(ROW, compiled=True, first=12.34)))
    header, ours, theirs = text.splitlines()[1:4]
    assert text.startswith("S/16 at 224×224")
    assert re.split(" {2,}", header.strip()) == list(COLUMNS)
    cells = [
        "training",
        "timm,",
        "compiled",
        "bf16",
        "32",
        "3",
        "500",
        "400",
        "900",
        "64.0",
        "2.00",
        "25%",
        "3.0",
        "12.3",
    ]
    assert theirs.split() == cells
    assert "1.00" in ours.split()


def test_seconds_of_the_first_call_are_shown_where_there_are_some() -> None:
    assert "first s" not in printed(report(OURS, ROW))
    text = printed(report(OURS, dataclasses.replace(ROW, first=2.0)))
    assert "first s" in text.splitlines()[1]
    assert "first s: the first call" in text


def test_few_rounds_are_reported() -> None:
    assert "--rounds 7" not in printed(report(OURS, ROW))
    assert "n is 1: such medians" in printed(report(OURS, dataclasses.replace(ROW, seconds=(0.5,))))


def test_unknown_values_are_a_dash() -> None:
    assert printed(report(dataclasses.replace(OURS, memory=None))).splitlines()[2].split()[-1] == "–"
    found = report(OURS, dataclasses.replace(OURS, who="vitral (int8)", precision="int8", matrix_rate=None))
    assert printed(found).splitlines()[3].split()[-2:] == ["–", "3.0"]
    assert "matrix products: bf16 8 GFLOP/s\n" in printed(found), "no rate in integers"
    assert Report.from_json(json.loads(json.dumps(found.to_json()))).rows[1].share is None


def test_nothing_is_cut_off_in_a_narrow_terminal() -> None:
    wide, narrow = (printed(report(OURS, ROW), width).splitlines() for width in (200, 40))
    assert [line.rstrip() for line in narrow] == [line.rstrip() for line in wide]
    assert "…" not in "".join(narrow)


def test_each_network_has_its_table_and_each_batch_its_paragraph() -> None:
    single = dataclasses.replace(OURS, batch=1)
    text = printed(report(OURS, ROW, single, dataclasses.replace(OURS, image_size=(384, 384))))
    titles = [line.rstrip() for line in text.splitlines() if line.startswith("S/16 at")]
    assert titles == ["S/16 at 224×224", "S/16 at 384×384"]
    assert text.count("median ms") == 2
    assert text.splitlines()[4].strip() == "", "between the batches"


def test_the_origin_of_the_figures_is_printed() -> None:
    text = printed(report(OURS, dataclasses.replace(ROW, matrix_rate=9e9)))
    for part in (
        "a CPU, 2 cores, 1 torch thread;",
        "bf16 8 to 9 GFLOP/s",
        "load average 0.5 → ?",
        "torch 2",
        "as [it] is",
    ):
        assert part in text


@pytest.mark.parametrize(("seconds", "shown"), [(0.00123456, "1.23"), (0.0123456, "12.3"), (1.23456, "1,235")])
def test_milliseconds(seconds: float, shown: str) -> None:
    row = dataclasses.replace(OURS, seconds=(seconds,))
    assert COLUMNS["median ms"](row) == shown
