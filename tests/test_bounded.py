"""JSON within bounds: refused by a scan, before the parser meets it."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import pytest

from vitral import bounded


@pytest.mark.parametrize(
    "text",
    ["{}", "[1, 2.5, null, true]", '{"a": {"b": ["]", "[[[", "\\"{", "ü"]}}', '"\\ud83d\\ude00"', " 1e10 ", '"\\\\"'],
)
def test_json_within_the_bounds_is_read_as_ever(text: str) -> None:
    assert bounded.parse(text) == bounded.parse(text.encode()) == json.loads(text)


def test_records_may_hold_names_of_files_that_are_not_utf8() -> None:
    name = os.fsdecode(b"Universit\xe9")
    assert bounded.parse(json.dumps({"out": name}), file_names=True) == {"out": name}
    with pytest.raises(ValueError, match="surrogates not allowed"):
        bounded.parse('"\\ud800"', file_names=True)
    with pytest.raises(ValueError, match="surrogates not allowed"):
        bounded.parse(json.dumps(name))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 65 + "]" * 65, "nested more than 64 deep"),
        ("[" * 10_000_000, "values in JSON"),
        ('{"a":' * 100_000, "nested more than 64 deep"),
        ("[" + "1," * 500_001 + "1]", "500,002 values in JSON; at most 500,000"),
        (" " * (bounded.MOST_BYTES + 1), "bytes of JSON"),
        ("NaN", "NaN"),
        ('{"a": -Infinity}', "-Infinity"),
        ('{"a": 1e999}', "1e999"),
        ('"\\ud800"', "surrogates not allowed"),
        (b'"\xff"', "utf-8"),
        ("9" * 5000, "digits"),
        ("]" * 8_000_000, "Expecting value"),
        ('"' * 8_000_000, "Extra data"),
        ('"' + '\\"' * 4_000_000, "Unterminated string"),
        ("\\", "Expecting value"),
    ],
)
def test_what_is_over_a_bound_is_refused_at_once(text: str | bytes, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=said):
        bounded.parse(text)
    assert time.monotonic() - began < 5


def test_depth_and_number_are_those_outside_of_strings() -> None:
    text = json.dumps(["[" * 1000, "," * 600_000, '"' * 1000, "\\" * 999])
    assert bounded.parse(text) == json.loads(text)
    deepest = "[" * 64 + "]" * 64
    assert bounded.parse(deepest) == json.loads(deepest)


def test_a_file_over_the_bound_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with open(path, "wb") as file:
        file.truncate(1 << 33)
    tracemalloc.start()
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        bounded.read(path, most_bytes=1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_the_parser_is_used_nowhere_else() -> None:
    """No module parses JSON without the bounds."""
    source = Path(bounded.__file__).parent
    own = {
        "bounded.py",
        "weights/read/sandbox.py",
        "weights/architectures/__init__.py",
        "workflows/tables/formats.py",
    }  # own arguments, own package's files, rows of which names may hold surrogates
    users = {p.relative_to(source).as_posix() for p in source.rglob("*.py") if "json.load" in p.read_text("utf-8")}
    assert users <= own
