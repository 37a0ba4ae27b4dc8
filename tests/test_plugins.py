"""Entries of other packages: the template is built, installed and used; a broken package is named."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import numpy as np
import pytest

from vitral import plugins
from vitral.data import DataSet, Split, load, sources
from vitral.data.checks.validate import check
from vitral.errors import DataError, UsageError
from vitral.plugins import Extensible

TEMPLATE = Path(__file__).resolve().parents[1] / "examples" / "plugin"


def test_built_in_entries_come_first_and_cannot_be_replaced(monkeypatch):
    entries = [EntryPoint(name, "os:sep", "vitral.test") for name in ("other", "own")]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
    table: Extensible[str] = Extensible("vitral.test", {"own": "built in"})
    assert dict(table) == {"own": "built in", "other": os.sep}
    assert len(table) == 2
    assert "absent" not in table


def test_metadata_is_read_only_for_names_that_are_not_built_in(monkeypatch):
    def refuse(group: str) -> None:
        raise AssertionError(group)

    monkeypatch.setattr(plugins, "entry_points", refuse)
    assert Extensible("vitral.test", {"own": 1})["own"] == 1


def test_a_broken_package_is_named(monkeypatch):
    entry = EntryPoint("other", "vitral_no_such_module:x", "vitral.test")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    with pytest.raises(UsageError, match="is broken") as caught:
        Extensible("vitral.test", {})["other"]
    assert "vitral_no_such_module" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def installed(folder: Path, package: str) -> None:
    """A package that adds `zz` to vitral.test, as it lies in a folder of the path."""
    about = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[vitral.test]\nzz = os:sep\n")


def test_a_name_that_two_packages_add_is_refused(tmp_path, monkeypatch):
    for folder, package in (("one", "vitral-one"), ("two", "vitral-two"), ("copy", "vitral-one")):
        installed(tmp_path / folder, package)
        monkeypatch.syspath_prepend(tmp_path / folder)
    table: Extensible[str] = Extensible("vitral.test", {})
    assert list(table) == ["zz"]
    with pytest.raises(UsageError, match=r"2 packages add zz(?s:.*)vitral-one or vitral-two|vitral-two or vitral-one"):
        table["zz"]


def test_a_package_found_twice_is_one(tmp_path, monkeypatch):
    for folder in ("one", "copy"):
        installed(tmp_path / folder, "vitral-one")
        monkeypatch.syspath_prepend(tmp_path / folder)
    assert dict(Extensible("vitral.test", {})) == {"zz": os.sep}


class Letters:
    """A source of a package: twelve images, the labels and the reader of a test."""

    def __init__(self, labels, read):
        self.labels, self.read = labels, read

    def accepts(self, data):
        return data == "letters:x"

    def load(self, data, *, root, download):
        names = [f"{number}.png" for number in range(12)]
        return DataSet("letters", ("a", "b"), {"train": Split(names, np.asarray(self.labels), self.read)}, data)


def plain(number):
    return np.full((8, 8, 3), number, np.uint8)


@pytest.mark.parametrize(
    ("labels", "why"),
    [
        ([0, 2] * 6, "not numbers from 0 to 1"),
        ([0, -1] * 6, "not numbers from 0 to 1"),
        ([0.5, 1.0] * 6, "not numbers from 0 to 1"),
        ([0, 1], "12 names but 2 labels"),
    ],
)
def test_a_source_with_wrong_labels_is_named(labels, why, monkeypatch):
    table = Extensible("vitral.sources", {})
    monkeypatch.setattr(sources, "SOURCES", table)
    monkeypatch.setattr(table, "_added", {"letters": {"vitral-letters": None}})
    monkeypatch.setattr(table, "_load", lambda entry: Letters(labels, plain))
    with pytest.raises(DataError, match="the source letters is broken") as caught:
        load("letters:x")
    assert why in caught.value.why


def test_a_reader_that_fails_makes_unreadable_images(monkeypatch):
    def read(number):
        return {}[number] if number == 3 else plain(number)

    table = Extensible("vitral.sources", {})
    monkeypatch.setattr(sources, "SOURCES", table)
    monkeypatch.setattr(table, "_added", {"letters": {"vitral-letters": None}})
    monkeypatch.setattr(table, "_load", lambda entry: Letters([0, 1] * 6, read))
    found = check(load("letters:x"))
    assert [(one.index, one.reason) for one in found.unreadable] == [(3, "its reader failed: KeyError: 3")]


@pytest.mark.slow
def test_the_template_is_built_installed_and_used(tmp_path):
    target = tmp_path / "site"
    pip = ["pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    subprocess.run([sys.executable, "-m", *pip, str(TEMPLATE)], check=True, timeout=120)
    code = (
        "import sys, vitral; from pathlib import Path\n"
        "options = dict(model='mu/4', image_size=16, dim=8, depth=1, heads=2, mlp_dim=8, optimizer='adamw', epochs=1)\n"
        "run = vitral.train('letters:abc', out=sys.argv[1], quiet=True, log=('lines',), device='cpu', **options)\n"
        "assert run.result['classes'] == 3\n"
        "assert (Path(sys.argv[1]) / 'lines.txt').read_text().startswith('epoch 1: loss ')\n"
        "import numpy as np\n"
        "[found] = vitral.explain(run.predictor, np.zeros((16, 16, 1), np.uint8), method='center')\n"
        "assert found.method == 'center'\n"
        "options = dict(model='letters:mlp', image_size=16, optimizer='adamw', epochs=1, device='cpu')\n"
        "run = vitral.train('letters:ab', out=sys.argv[1] + '-mlp', quiet=True, **options)\n"
        "assert run.predictor(np.zeros((16, 16, 1), np.uint8)).label in 'ab'\n"
    )
    contracts = [str(TEMPLATE / "tests"), "-c", os.devnull, "--rootdir", str(TEMPLATE), "-p", "no:cacheprovider", "-q"]
    paths = os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True, timeout=180, env=environment)
    subprocess.run([sys.executable, "-B", "-m", "pytest", *contracts], check=True, timeout=180, env=environment)
