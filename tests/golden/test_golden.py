"""Everything that a user sees stays as the golden copies hold it; `changes.md` lists changes and their reasons."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from tests.golden.compare import differences
from tests.golden.copies import COPIES, FOLDER, HASHES, make
from tests.golden.normal import normal
from tests.golden.place import inside, prepare
from tests.golden.weights import machine


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the runs, made once for all processes of a test run: the first one makes it, others wait."""
    parent = tmp_path_factory.getbasetemp()
    shared = parent.parent if "PYTEST_XDIST_WORKER" in os.environ else parent
    folder = shared / "golden-place"
    with (shared / "golden-place.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            with inside(folder):
                prepare()
            (folder / "made").touch()
    return folder


def _recorded() -> dict[str, dict[str, str]]:
    return json.loads((FOLDER / HASHES).read_text("utf-8"))


SECONDS = ("explain-compare.json", "inspect.json")
"""Copies that take over a second to make."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SECONDS)) for name in COPIES])
def test_copy_is_current(name, place):
    file, known = FOLDER / name, machine() in _recorded()
    assert file.is_file(), f"{name} is in the table and has no file: python -m tests.golden {name}"
    if name == HASHES and not known:
        pytest.skip(f"no weights were recorded on {machine()}; their results are compared nearly")
    golden, made = file.read_text("utf-8"), make(name, place)
    if name == HASHES:
        golden = json.dumps({machine(): _recorded()[machine()]})
    found = differences(name, golden, made, known=known)
    hint = f"If that is meant: python -m tests.golden {name}, and a line in tests/golden/changes.md"
    if found:
        pytest.fail("\n".join([f"{name} has changed:", *found, hint]), pytrace=False)


def test_every_file_is_in_the_table():
    files = {file.relative_to(FOLDER).as_posix() for file in FOLDER.rglob("*") if file.is_file()}
    assert files == COPIES.keys()


@pytest.mark.parametrize(
    ("made", "on_known", "elsewhere"),
    [
        ({"loss": 2.0, "epochs": 2, "path": "a"}, 0, 0),
        ({"loss": 2.000001, "epochs": 2, "path": "a"}, 0, 0),
        ({"loss": 2.001, "epochs": 2, "path": "a"}, 1, 0),
        ({"loss": 2.01, "epochs": 2, "path": "a"}, 1, 1),
        ({"loss": 2.0, "epochs": 3, "path": "a"}, 1, 1),
        ({"loss": 2.0, "epochs": 2.0, "path": "b"}, 2, 2),
        ({"loss": 2.0, "path": "a"}, 1, 1),
        ({"loss": 2.0, "path": "a", "epochs": 2}, 1, 1),
        ({"loss": [2.0], "epochs": 2, "path": "a"}, 1, 1),
    ],
)
def test_results_agree_nearly_and_all_else_exactly(made, on_known, elsewhere):
    golden = json.dumps({"loss": 2.0, "epochs": 2, "path": "a"})
    for known, expected in ((True, on_known), (False, elsewhere)):
        assert len(differences("x.json", golden, json.dumps(made), known=known)) == expected


@pytest.mark.parametrize(
    ("made", "same"),
    [
        ("divided by 0.6367, so that 3 probabilities stay", True),
        ("divided by 0.6366, so that 3 probabilities stay", True),
        ("divided by 0.7, so that 3 probabilities stay", False),
        ("divided by 0.6367, so that 4 probabilities stay", False),
        ("multiplied by 0.6367, so that 3 probabilities stay", False),
        ("divided by 0.6367", False),
    ],
)
def test_numbers_in_notes_agree_nearly_and_words_exactly(made, same):
    golden = json.dumps({"notes": ["divided by 0.6367, so that 3 probabilities stay"]})
    assert (differences("x.json", golden, json.dumps({"notes": [made]}), known=False) == []) == same


@pytest.mark.parametrize("cpu", ["AMD EPYC", "Intel(R) Xeon(R) Platinum 8259CL CPU @ 2.50GHz", "arm"])
def test_names_of_cpus_are_replaced(cpu):
    assert normal({"value": f"fp32 on {cpu}"}) == {"value": "fp32 on <machine>"}
    assert normal({"device": f"{cpu}, 2 threads"}) == {"device": "<machine>"}
    assert normal("bold on white") == "bold on white"


def test_text_differs_line_by_line():
    assert differences("x.txt", "a\nb\n", "a\nb\n", known=True) == []
    assert differences("x.txt", "a\nb\n", "a\nc\n", known=True)[-2:] == ["-b", "+c"]
