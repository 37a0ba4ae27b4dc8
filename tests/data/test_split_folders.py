"""Folders that are splits, and folders that are classes: which is which, by names and by what they hold."""

from __future__ import annotations

import shutil
import tarfile
import unicodedata
from pathlib import Path

import pytest
from PIL import Image

from images import MakeImages, noise
from running import as_json, printed, train
from vitral.cli.main import main
from vitral.data import load
from vitral.data.checks.validate import check
from vitral.data.dataset import split_name
from vitral.data.targets import Labeling
from vitral.errors import DataError


def counts(data: Path, **wanted: str) -> dict[str, dict[str, int]]:
    """Split → class → images."""
    found = load(str(data), wanted=Labeling(**wanted))  # type: ignore[arg-type]
    return {
        name: {label: int((split.labels == i).sum()) for i, label in enumerate(found.classes)}
        for name, split in found.splits.items()
    }


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("train", "train"),
        ("Training", "train"),
        ("training_set", "train"),
        ("seg_train", "train"),
        ("train2017", "train"),
        ("TRAIN_IMAGES", "train"),
        ("trainset", "train"),
        ("dev", "val"),
        ("valid", "val"),
        ("Validation", "val"),
        ("validation-set", "val"),
        ("val", "val"),
        ("test", "test"),
        ("testing data", "test"),
        ("test_set", "test"),
        ("trains", None),
        ("steam train", None),
        ("test tube", None),
        ("cat", None),
        ("", None),
        ("images", None),
        ("2017", None),
        ("train_test", None),
    ],
)
def test_names_that_say_split(text, split):
    assert split_name(text) == split


LAYOUTS = {
    "usual names": ({"training_set/a": 3, "training_set/b": 3, "test_set/a": 2, "test_set/b": 1}, "train", "test"),
    "seg": ({"seg_train/a": 3, "seg_train/b": 3, "seg_test/a": 2, "seg_test/b": 1}, "train", "test"),
    "dev": ({"train/a": 3, "train/b": 3, "dev/a": 2, "dev/b": 1}, "train", "val"),
    "upper case": ({"TRAIN/a": 3, "TRAIN/b": 3, "Validation/a": 2, "Validation/b": 1}, "train", "val"),
    "repeated": (
        {
            "training_set/training_set/a": 3,
            "training_set/training_set/b": 3,
            "test_set/test_set/a": 2,
            "test_set/test_set/b": 1,
        },
        "train",
        "test",
    ),
    "below a wrapping folder": (
        {"set/v2/train/a": 3, "set/v2/train/b": 3, "set/v2/val/a": 2, "set/v2/val/b": 1},
        "train",
        "val",
    ),
    "around the classes": (
        {"train/images/a": 3, "train/images/b": 3, "test/images/a": 2, "test/images/b": 1},
        "train",
        "test",
    ),
    "below the classes": ({"a/train": 3, "b/train": 3, "a/val": 2, "b/val": 1}, "train", "val"),
    "below the classes, deeper": ({"a/train/x": 3, "b/train/y": 3, "a/test/x": 2, "b/test/y": 1}, "train", "test"),
}


@pytest.mark.parametrize("packed", [False, True], ids=["folder", "tar"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_splits_are_read_at_any_depth(make_images: MakeImages, name, packed):
    layout, first, second = LAYOUTS[name]
    data = make_images(layout)
    if packed:
        with tarfile.open(data.with_name("packed.tar"), "w") as tar:
            tar.add(data, arcname=".")
        data = data.with_name("packed.tar")
    assert counts(data) == {first: {"a": 3, "b": 3}, second: {"a": 2, "b": 1}}


def test_one_class_folder_of_a_split_is_no_wrapping_one(make_images: MakeImages):
    """val has images of one class, whose sub-folders have the names of other classes' sub-folders."""
    data = make_images({"train/a/x": 2, "train/a/y": 2, "train/b/x": 2, "val/a/x": 1, "val/a/y": 1})
    assert counts(data) == {"train": {"a": 4, "b": 2}, "val": {"a": 2, "b": 0}}


def test_a_larger_folder_without_labels_is_named_and_unused(make_images: MakeImages, tmp_path, capsys):
    data = make_images({"train/c0": 3, "train/c1": 3, "test": 20, "docs": 1})
    dataset = load(str(data))
    assert (dataset.classes, set(dataset.splits), dataset.unused) == (("c0", "c1"), {"train"}, 21)
    assert "20 images without class folders in test/ are not used: test/0.png, test/1.png" in dataset.notes[1]
    assert "1 image outside class folders is not used: docs/0.png" in dataset.notes[0]
    report = check(dataset)
    assert report.invalidates
    words = ["train", str(data), "--plan-only", "--model", "mu/4", "--image-size", "8"]
    found = as_json(capsys, *words)
    line = next(one for one in found["choices"] if one["name"] == "data")
    assert "20 images without class folders" in line["reason"]
    run = train(data, tmp_path / "run", epochs=1)
    assert "20 images without class folders" in (run.folder / "config.json").read_text("utf-8")


@pytest.mark.parametrize("inside", ["test", "unlabeled", "images"])
def test_a_split_of_one_folder_that_is_no_class_has_no_labels(make_images: MakeImages, inside):
    """As test/test/1.jpg of some downloads."""
    data = make_images({"train/a": 3, "train/b": 3, f"test/{inside}": 9})
    dataset = load(str(data))
    assert (dataset.classes, set(dataset.splits), dataset.unused) == (("a", "b"), {"train"}, 9)
    assert "9 images without class folders in test/" in dataset.notes[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"fold1/a": 2, "fold1/b": 2, "fold2/a": 2, "fold2/b": 2},
        {"train/a": 9, "train/b": 9, "holdout/a": 2, "holdout/b": 2},
        {"train/a": 2, "train/b": 2, "train/c": 2, "eval/a": 9, "eval/b": 9},
        {"cat/front": 2, "cat/side": 2, "dog/front": 2, "dog/side": 2},
    ],
)
def test_what_may_be_splits_or_classes_is_refused_with_both_readings(make_images: MakeImages, layout, capsys):
    data = make_images(layout)
    with pytest.raises(DataError, match="splits or classes") as caught:
        load(str(data))
    assert "--class-folders top" in str(caught.value)
    assert "train, val and test" in str(caught.value)
    _, err = printed(capsys, "data", "check", str(data), code=2)
    assert "splits or classes" in err
    assert main(["data", "check", str(data), "--class-folders", "leaf"]) < 2
    tops = sorted({folder.split("/")[0] for folder in layout})
    if "train" not in tops:
        assert list(counts(data, class_folders="top")["train"]) == tops
    leaves = sorted({folder.split("/")[1] for folder in layout})
    assert list(counts(data, class_folders="leaf")["train"]) == leaves


def test_images_beside_splits_below_classes_are_refused(make_images: MakeImages):
    data = make_images({"a/train": 2, "a/val": 2, "b/train": 2, "b": 3})
    with pytest.raises(DataError, match="images of no split") as caught:
        load(str(data))
    assert "3 images are beside them" in str(caught.value)
    assert counts(data, class_folders="top") == {"train": {"a": 4, "b": 5}}


def test_three_levels_are_noted_and_leaves_can_be_classes(make_images: MakeImages, capsys):
    data = make_images({"animal/cat": 2, "animal/dog": 2, "plant/rose": 2, "plant/fern": 2})
    dataset = load(str(data))
    assert dataset.classes == ("animal", "plant")
    assert "4 folders below 2 classes (animal/cat counts as animal)" in dataset.notes[0]
    assert counts(data, class_folders="leaf") == {"train": {"cat": 2, "dog": 2, "fern": 2, "rose": 2}}
    found = as_json(capsys, "train", str(data), "--plan-only", "--class-folders", "leaf", "--model", "mu/4")
    assert "8 images" in str(found) or found["run"]["class_folders"] == "leaf"


def test_a_class_called_train_among_others_is_noted(make_images: MakeImages):
    dataset = load(str(make_images({"train": 4, "car": 5, "bus": 5, "pred": 3})))
    assert dataset.classes == ("bus", "car", "pred", "train")
    assert "'pred', 'train' are taken for a class" in dataset.notes[0]


def test_splits_without_classes_are_refused(make_images: MakeImages):
    with pytest.raises(DataError, match="images without class folders"):
        load(str(make_images({"train": 4, "test": 4})))


def test_names_in_two_encodings_are_one_class(make_images: MakeImages):
    name = "café Ü 한국"
    data = make_images(
        {
            f"train/{unicodedata.normalize('NFC', name)}": 3,
            "train/b": 3,
            f"val/{unicodedata.normalize('NFD', name)}": 2,
            "val/b": 2,
        }
    )
    assert counts(data) == {"train": {name: 3, "b": 3}, "val": {name: 2, "b": 2}}


def test_names_that_differ_in_case_are_noted(make_images: MakeImages, tmp_path):
    data = make_images({"Cat": 3, "cat": 3, "dog": 3})
    assert "differ only in case: 'Cat' and 'cat'" in load(str(data)).notes[0]
    table = tmp_path / "table.csv"
    rows = [f"{file},{file.parent.name}" for file in sorted(data.rglob("*.png"))]
    table.write_text("\n".join(["file,label", *rows]))
    assert "differ only in case: 'Cat' and 'cat'" in load(str(table)).notes[0]


# ---------------------------------------------------------------- tables


def table_of(data: Path, header: str, row: str, **values: list[str]) -> Path:
    """A table beside `photos` with a row for each image; `{name}` is its path without suffix, `{label}` its folder."""
    lines = [header] if header else []
    for number, file in enumerate(sorted(data.rglob("*.png"))):
        name = file.relative_to(data.parent).with_suffix("")
        more = {key: options[number % len(options)] for key, options in values.items()}
        lines.append(row.format(name=name, label=file.parent.name, **more))
    table = data.with_name("table.csv")
    table.write_text("\n".join(lines) + "\n")
    return table


def test_a_table_without_suffixes_finds_the_images(make_images: MakeImages):
    table = table_of(make_images({"a": 3, "b": 3}), "file,label", "{name},{label}")
    assert counts(table) == {"train": {"a": 3, "b": 3}}
    assert "6 file names of the table have no suffix: photos/a/0 is photos/a/0.png" in load(str(table)).notes[0]


def test_a_table_without_suffixes_is_not_guessed(make_images: MakeImages):
    data = make_images({"a": 3, "b": 3})
    shutil.copy(data / "a/0.png", data / "a/0.jpg")
    with pytest.raises(DataError, match="1 file of the table does not exist"):
        load(str(table_of(data, "file,label", "{name},{label}")))


@pytest.mark.parametrize("label", ["nan", "NaN", ""])
def test_a_missing_label_is_named_with_its_line(make_images: MakeImages, label):
    table = table_of(make_images({"a": 3, "b": 3}), "file,label", "{name}.png,{own}", own=["a", "b", label])
    with pytest.raises(DataError, match="2 rows without a label") as caught:
        load(str(table))
    assert "line 4, 7" in str(caught.value)


@pytest.mark.parametrize(("column", "split"), [("is_valid", "val"), ("is_val", "val"), ("is_test", "test")])
@pytest.mark.parametrize("values", [("True", "False"), ("1", "0"), ("yes", "no")])
def test_a_column_of_booleans_is_the_split(make_images: MakeImages, column, split, values):
    true, false = values
    table = table_of(
        make_images({"a": 4, "b": 4}),
        f"file,label,{column}",
        "{name}.png,{label},{own}",
        own=[false, false, false, true],
    )
    assert counts(table) == {"train": {"a": 3, "b": 3}, split: {"a": 1, "b": 1}}
    assert f"splits by the columns {column} as {split}" in load(str(table)).notes[0]


def test_a_boolean_that_is_none_is_refused(make_images: MakeImages):
    data = make_images({"a": 4, "b": 4})
    with pytest.raises(DataError, match=r"1 row of an unknown split(.|\n)*write true or false"):
        load(str(table_of(data, "file,label,is_valid", "{name}.png,{label},{own}", own=["False"] * 7 + ["maybe"])))


def test_split_names_of_a_table_are_those_of_folders(make_images: MakeImages):
    table = table_of(
        make_images({"a": 4, "b": 4}),
        "file,label,split",
        "{name}.png,{label},{own}",
        own=["training_set", "training_set", "Dev", "test-set"],
    )
    assert counts(table) == {"train": {"a": 2, "b": 2}, "val": {"a": 1, "b": 1}, "test": {"a": 1, "b": 1}}


def test_a_table_without_a_header_asks_for_one(make_images: MakeImages):
    with pytest.raises(DataError, match="no header in the table") as caught:
        load(str(table_of(make_images({"a": 3, "b": 3}), "", "{name}.png,{label}")))
    assert "add a line above it" in str(caught.value)
    assert "file,label" in str(caught.value)


# ---------------------------------------------------------------- what check shows


def test_copies_are_counted_in_files_and_shown_across_splits(make_images: MakeImages):
    data = make_images({"train/a": 3, "train/b": 3, "val/a": 3, "val/b": 3})
    for i in range(5):
        Image.fromarray(noise(99, (8, 10))).save(data / f"train/a/copy{i}.png")
    for i in range(3):
        Image.fromarray(noise(99, (8, 10))).save(data / f"val/b/copy{i}.png")
    findings = dict(check(load(str(data))).findings())
    for heading in ("leak between splits", "contradicting labels"):
        assert "1 image in 8 files" in findings[heading]
        assert "train/a/copy0.png [a] = " in findings[heading]
        assert "val/b/copy0.png [b]" in findings[heading]


def test_names_with_joiners_are_kept(make_images: MakeImages, tmp_path, capsys):
    """Ordinary in Persian and Malayalam, and in emoji of several people."""
    names = ["می\u200cخواهم", "👩\u200d👧", "a\u00a0b"]
    data = make_images(dict.fromkeys(names, 4))
    assert set(load(str(data)).classes) == set(names)
    run = train(data, tmp_path / "run", epochs=1)
    found = as_json(capsys, "predict", str(run.folder), str(data / names[0] / "0.png"))
    assert {row["class"] for row in found["predictions"][0]["top"]} == set(names)
    words = ["explain", str(run.folder), str(data / names[0] / "0.png"), "--target", names[0]]
    printed(capsys, *words, "--out", str(tmp_path / "why.png"))


def test_controls_and_marks_of_direction_in_names_are_escaped(make_images: MakeImages):
    data = make_images({"a\u202eb": 2, "c\nd": 2})
    assert set(load(str(data)).classes) == {"a\\u202eb", "c\\nd"}
