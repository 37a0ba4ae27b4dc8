"""Tables of predictions as other programs read them: pandas, pyarrow, sqlite3, and the rules of R, BigQuery and Excel.

A table is right if each class comes back as its exact name: `NA` is a class and not a missing value, `007` is not 7.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import noise
from running import printed
from vitral.data.images.preprocessing import Preprocessing
from vitral.model import ViT, ViTConfig
from vitral.testing.formats import randomized
from vitral.weights import native

CLASSES = ("007", "1e5", "2024-01-02", "NA", "TRUE", "a, b", 'say "x"', "nan", "null", "قطة", "猫")
TEXTS = ("path", "class", "label_1", "label_2", "label_3", "error")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[vitral.Prediction]]:
    """`t.csv`, `t.jsonl` and `t.parquet` of one model, whose class names other programs may misread."""
    place = tmp_path_factory.mktemp("elsewhere")
    (place / "photos").mkdir()
    for number in range(80):
        level = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8) if number % 2 else number * 3
        pixels = level if number % 2 else np.clip(noise(number, (8, 8)) // 4 + level, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(place / "photos" / f"{number:02}, é.png")
    (place / "photos" / "broken.png").write_bytes(b"no image")
    predictor = _of_many_classes(place / "w.safetensors", place / "photos")
    found = [one for one in predictor.stream([str(place / "photos")]) if isinstance(one, vitral.Prediction)]
    assert len({one.label for one in found}) >= 3
    return place, found


def _of_many_classes(file: Path, photos: Path) -> vitral.Predictor:
    """A random network whose mean logits over `photos` are 0: else one class has all of them."""
    config = ViTConfig(image_size=8, patch_size=4, channels=3, classes=len(CLASSES), dim=16, depth=2, heads=2)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        state = randomized(ViT(config)).state_dict()

    def loaded() -> vitral.Predictor:
        native.save(file, native.Weights(config, state, Preprocessing((8, 8), 3), CLASSES, {}))
        return vitral.load(file, precision="fp32", device="cpu")

    first = loaded()
    shown = torch.stack([first.prepare(image) for image in sorted(photos.glob("[0-9]*.png"))])
    state["head.bias"] = state["head.bias"] - first.logits(shown).mean(0)
    return loaded()


@pytest.fixture(scope="module")
def tables(written: tuple[Path, list[vitral.Prediction]]) -> tuple[Path, list[str]]:
    from vitral.cli.main import main

    place, found = written
    for suffix in ("csv", "jsonl", "parquet"):
        if suffix == "parquet":
            pytest.importorskip("pyarrow")
        words = ["predict", str(place / "w.safetensors"), str(place / "photos"), "--precision", "fp32", "--all"]
        assert main([*words, "--device", "cpu", "--out", str(place / f"t.{suffix}")]) == 1
    return place, [one.label for one in found]


def test_pandas_reads_the_classes_as_docs_say(tables: tuple[Path, list[str]]) -> None:
    pandas = pytest.importorskip("pandas")
    place, labels = tables
    kinds = dict.fromkeys(("class", "label_1", "label_2", "label_3"), "str")
    frame = pandas.read_csv(place / "t.csv", dtype=kinds, keep_default_na=False, na_values={"probability": [""]})
    good = frame[frame["error"] == ""]
    assert good["class"].tolist() == labels
    assert [name.removeprefix("p_") for name in frame.columns if name.startswith("p_")] == list(CLASSES)
    assert frame[frame["error"] != ""]["path"].str.endswith("broken.png").tolist() == [True]
    lines = pandas.read_json(place / "t.jsonl", lines=True, dtype=False)
    assert lines[lines["error"].isna()]["class"].tolist() == labels
    parquet = pandas.read_parquet(place / "t.parquet")
    assert parquet[parquet["error"].isna()]["class"].tolist() == labels
    assert parquet["probability"].dtype == np.float32


def test_a_spreadsheet_takes_every_cell(tables: tuple[Path, list[str]], tmp_path: Path) -> None:
    pandas, openpyxl = pytest.importorskip("pandas"), pytest.importorskip("openpyxl")
    place, labels = tables
    frame = pandas.read_csv(place / "t.csv", dtype=str, keep_default_na=False)
    frame.to_excel(tmp_path / "t.xlsx", index=False)
    rows = list(openpyxl.load_workbook(tmp_path / "t.xlsx").active.values)
    assert [row[1] for row in rows[1:] if row[1]] == labels


def test_a_loader_of_a_warehouse_reads_the_classes(tables: tuple[Path, list[str]]) -> None:
    """RFC 4180 with types that are stated, as BigQuery's and Snowflake's loaders read."""
    arrow = pytest.importorskip("pyarrow.csv")
    pyarrow = pytest.importorskip("pyarrow")
    place, labels = tables
    with open(place / "t.csv", newline="", encoding="utf-8") as file:
        columns = next(csv.reader(file, strict=True))
    types = {name: pyarrow.string() if name in TEXTS else pyarrow.float32() for name in columns}
    convert = arrow.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=False)
    table = arrow.read_csv(place / "t.csv", convert_options=convert).to_pydict()
    assert [name for name, why in zip(table["class"], table["error"], strict=True) if not why] == labels
    assert [one for one, why in zip(table["probability"], table["error"], strict=True) if why] == [None]


def test_sqlite_imports_the_classes(tables: tuple[Path, list[str]]) -> None:
    if shutil.which("sqlite3") is None:
        pytest.skip("needs sqlite3")
    place, labels = tables
    script = f'.import --csv "{place / "t.csv"}" t\n.mode list\nselect "class" from t where error = \'\';\n'
    found = subprocess.run(["sqlite3", ":memory:"], input=script, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == labels


def test_lines_quotes_and_digits_are_what_strict_loaders_take(tables: tuple[Path, list[str]]) -> None:
    """R's `read.csv`, and BigQuery without `--allow_quoted_newlines`: a row per line, a point in numbers."""
    place, _ = tables
    text = (place / "t.csv").read_bytes().decode("utf-8")
    assert not text.startswith("\ufeff"), "R's and Python's readers would take the mark for part of the first name"
    rows = list(csv.reader(text.splitlines(), strict=True))
    assert len(rows) == text.count("\n") == 82
    assert {len(row) for row in rows} == {len(rows[0])}
    assert len(set(rows[0])) == len(rows[0]), "columns of one name"
    for row in rows[1:]:
        for name, cell in zip(rows[0], row, strict=True):
            assert name in TEXTS or re.fullmatch(r"(\d(\.\d+)?(e-\d+)?)?", cell), (name, cell)


def test_classes_that_differ_only_in_case_have_columns_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ViTConfig(image_size=8, patch_size=4, channels=3, classes=2, dim=8, depth=1, heads=2, mlp_dim=8)
    state = randomized(ViT(config)).state_dict()
    native.save(tmp_path / "w.safetensors", native.Weights(config, state, Preprocessing((8, 8), 3), ("Cat", "cat"), {}))
    Image.fromarray(noise(0, (8, 8))).save(tmp_path / "a.png")
    words = ["predict", str(tmp_path / "w.safetensors"), str(tmp_path / "a.png"), "--all"]
    printed(capsys, *words, "--out", str(tmp_path / "t.csv"))
    head = (tmp_path / "t.csv").read_text().splitlines()[0].split(",")
    assert {"p_Cat", "p_cat"} <= set(head)
