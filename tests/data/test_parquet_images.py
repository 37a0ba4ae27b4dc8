"""Parquet files of images, as Hugging Face's `datasets` writes them."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

import vitral
from images import MakeImages, noise
from running import TINY, as_json
from vitral.data import load
from vitral.data.checks.validate import check
from vitral.data.shards import remote
from vitral.data.shards.cache import ShardCache
from vitral.data.targets import Labeling
from vitral.errors import DataError, MissingExtraError


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def png(seed: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(noise(seed)).save(file, "PNG")
    return file.getvalue()


def write(
    path: Path, seeds: Sequence[int], labels: Sequence[Any], classes: Sequence[str] = (), label: str = "label"
) -> Path:
    """Write a file with the columns and the metadata of `datasets`, in groups of two rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(seed), "path": f"{seed}.png"} for seed in seeds]
    table = pyarrow.table({"image": images, label: list(labels), "other": list(seeds)})
    if classes:
        features = {"image": {"_type": "Image"}, label: {"names": list(classes), "_type": "ClassLabel"}}
        metadata = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, path, row_group_size=2)
    return path


def test_the_files_of_a_repository(tmp_path: Path) -> None:
    folder = tmp_path / "pets"
    write(folder / "data/train-00000-of-00002.parquet", range(5), [0, 1, 0, 1, 1], ["cat", "dog"])
    write(folder / "data/train-00001-of-00002.parquet", range(5, 8), [1, 0, 0], ["cat", "dog"])
    write(folder / "data/validation-00000-of-00001.parquet", [8, 9, 10], [1, -1, 0], ["cat", "dog"])
    dataset = load(folder)
    assert (dataset.name, dataset.classes, list(dataset.splits)) == ("pets", ("cat", "dog"), ["train", "val"])
    assert dataset["train"].labels.tolist() == [0, 1, 0, 1, 1, 1, 0, 0]
    assert dataset["val"].labels.tolist() == [1, 0], "a hidden label is left out"
    assert dataset.notes == ("1 image without a class is not used: validation-00000-of-00001.parquet:000000001.jpg",)
    for i in range(8):
        assert np.array_equal(dataset["train"].image(i), noise(i))
    assert np.array_equal(dataset["val"].image(1), noise(10))
    assert dataset["train"].names[6].endswith("train-00001-of-00002.parquet:train-00001-of-00002/000001 6.png")


def test_a_file_and_a_pattern_without_metadata(tmp_path: Path) -> None:
    write(tmp_path / "a/train-0.parquet", range(3), ["ant", "bee", "ant"])
    write(tmp_path / "a/train-1.parquet", range(3, 6), ["bee", "bee", "cow"])
    both = load(tmp_path / "a/train-{0..1}.parquet")
    assert (both.classes, both["train"].labels.tolist()) == (("ant", "bee", "cow"), [0, 1, 0, 1, 1, 2])
    one = load(tmp_path / "a/train-1.parquet")
    assert one.classes == ("bee", "cow")
    with pytest.raises(DataError, match="1 of 3 are missing"):
        load(tmp_path / "a/train-{0..2}.parquet")


def test_their_images_are_predicted(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", range(3), ["ant", "bee", "ant"])
    predicted = vitral.load("demo")(path)
    assert len(predicted) == 3
    wanted = vitral.load("demo").probabilities([noise(i) for i in range(3)])
    assert np.array_equal(np.stack([one.probabilities for one in predicted]), wanted)


def test_a_table_of_predictions_beside_images_is_not_the_data(make_images: MakeImages) -> None:
    photos = make_images({"cat": 3, "dog": 3})
    write(photos / "answers.parquet", range(3), ["ant", "bee", "ant"])
    assert load(photos).classes == ("cat", "dog")


def test_a_tar_that_left_the_cache_is_packed_again(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet", range(5), ["a", "b", "a", "b", "a"])
    load(path)
    files = sorted(ShardCache().folder.glob("*.tar"))
    before = [file.read_bytes() for file in files]
    ShardCache().clear()
    dataset = load(path)
    assert np.array_equal(dataset["train"].image(3), noise(3))
    assert [file.read_bytes() for file in files] == before


def test_bad_rows_and_files(tmp_path: Path) -> None:
    table = pyarrow.table({"image": [png(0), b"nothing", None], "label": ["a", "b", "b"]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    dataset = load(tmp_path / "train.parquet")
    assert [one.index for one in check(dataset).unreadable] == [1, 2]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "train.parquet").read_bytes()[:100])
    with pytest.raises(DataError, match="cannot read Parquet file"):
        load(tmp_path / "cut.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "text.parquet")
    with pytest.raises(DataError, match="no image column"):
        load(tmp_path / "text.parquet")
    write(tmp_path / "wrong.parquet", [0, 1], [0, 7], ["a", "b"])
    with pytest.raises(DataError, match="label 7 is none of 2 classes"):
        load(tmp_path / "wrong.parquet")


def several(path: Path, **columns: tuple[str, list[Any]]) -> str:
    """Write a file with columns of a kind: Image or ClassLabel of two names, "" for none."""
    names = {"Image": {"_type": "Image"}, "ClassLabel": {"_type": "ClassLabel", "names": ["a", "b"]}}
    table = pyarrow.table({name: values for name, (_, values) in columns.items()})
    features = {name: names[kind] for name, (kind, _) in columns.items() if kind}
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pyarrow.parquet.write_table(table, path)
    return str(path)


def images(*seeds: int) -> tuple[str, list[Any]]:
    return "Image", [{"bytes": png(seed), "path": None} for seed in seeds]


def test_of_several_columns_the_one_with_the_name_is_read(tmp_path: Path) -> None:
    labels, others = ("ClassLabel", [0, 1]), ("ClassLabel", [1, 1])
    data = load(several(tmp_path / "a.parquet", mask=images(8, 9), image=images(0, 1), domain=others, label=labels))
    assert data["train"].labels.tolist() == [0, 1]
    assert np.array_equal(data["train"].image(1), noise(1))
    two = several(tmp_path / "b.parquet", image=images(0, 1), coarse_label=others, fine_label=labels)
    with pytest.raises(DataError, match="several label columns") as caught:
        load(two)
    assert (caught.value.why, caught.value.hint) == (
        "coarse_label, fine_label may be it",
        "--targets coarse_label, or another of them",
    )
    for column, found in (("coarse_label", ["b", "b"]), ("fine_label", ["a", "b"])):
        dataset = load(two, wanted=Labeling(columns=(column,)))
        assert [dataset.classes[label] for label in dataset["train"].labels] == found
        assert column in dataset.reason
    with pytest.raises(DataError, match="several image columns"):
        load(several(tmp_path / "c.parquet", left=images(0, 1), right=images(2, 3), label=labels))
    with pytest.raises(DataError, match="several labels an image"):
        load(several(tmp_path / "d.parquet", image=images(0, 1), label=("", [["a", "b"], ["a"]])))


def test_labels_as_other_programs_write_them(tmp_path: Path) -> None:
    """A missing one is left out and counted; numbers that pandas made fractions are whole."""
    for name, cells, classes in (
        ("floats", [1.0, None, 2.0, float("nan")], ("1", "2")),
        ("texts", ["x", "nan", "y", None], ("x", "y")),
    ):
        dataset = load(several(tmp_path / f"{name}.parquet", image=images(0, 1, 2, 3), label=("", cells)))
        assert (dataset.classes, dataset["train"].labels.tolist()) == (classes, [0, 1])
        assert dataset.notes[0].startswith("2 images without a class are not used")


def test_training_on_an_address_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hub's file system is replaced by a folder: nothing is fetched from the network."""
    hub = tmp_path / "hub/datasets/ORG/NAME"
    write(hub / "data/train-0.parquet", range(12), [i % 2 for i in range(12)], ["cat", "dog"])
    write(hub / "data/test-0.parquet", range(12, 16), [0, 1, 0, 1], ["cat", "dog"])
    files = fsspec.filesystem("dir", path=str(tmp_path / "hub"), fs=fsspec.filesystem("file"))
    for name in ("cat_file", "info", "glob", "ls"):
        original = getattr(files, name)
        monkeypatch.setattr(
            files, name, lambda path, *a, o=original, **k: o(path.removeprefix("hf://"), *a, **k), raising=False
        )
    monkeypatch.setattr(remote, "_file_system", lambda scheme: files)
    dataset = load("hf://datasets/ORG/NAME")
    assert (dataset.name, dataset.classes, list(dataset.splits)) == ("NAME", ("cat", "dog"), ["train", "test"])
    run = vitral.train("hf://datasets/ORG/NAME", out=str(tmp_path / "run"), quiet=True, **{**TINY, "epochs": 1})
    found = as_json(capsys, "predict", str(run.folder), "hf://datasets/ORG/NAME/data/test-0.parquet")
    assert len(found["predictions"]) == 4


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "train.parquet", [0, 1], ["a", "b"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"vitral\[parquet\]"):
        load(path)
