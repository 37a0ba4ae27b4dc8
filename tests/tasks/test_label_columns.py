"""The columns of a table choose the task, and are read as it says; anything else is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from tasks.conftest import write
from vitral.data import load
from vitral.data.checks.fingerprint import Fingerprint
from vitral.data.sources.unlabeled import UNLABELED, load_images
from vitral.data.splits import with_validation
from vitral.data.targets import SEVERAL_LABELS, Labeling
from vitral.errors import DataError, UsageError

ALL = ("class", "labels", "numbers")


@pytest.fixture
def table(tmp_path):
    for name in "abcd":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")

    def make(header, *rows):
        return str(
            write(tmp_path / "t.csv", header.split(), [(f"{n}.png", *r) for n, r in zip("abcd", rows, strict=False)])
        )

    return make


def read(path, **wanted):
    return load(path, wanted=Labeling(**wanted), tasks=ALL)


CHOSEN = {
    "a class": ("file label", [("x",), ("y",)], "class"),
    "labels": ("file labels", [("x|y",), ("",), ("y",)], "labels"),
    "semicolons": ("file tags", [("x; y",), ("y",)], "labels"),
    "a semicolon in a class": ("file label", [("x;y",), ("z",)], "class"),
    "one label each": ("file labels", [("x",), ("y",)], "class"),
    "bits": ("file x y", [(1, 0), (0, 0)], "labels"),
    "one bit": ("file broken", [(1,), (0,)], "labels"),
    "numbers": ("file age", [(3,), (4.5,)], "numbers"),
    "fractions as label": ("file label", [(3.5,), (4,)], "numbers"),
    "a column text, chosen": ("file text label", [("073", "x"), ("12", "y")], "class"),
    "whole numbers as label": ("file label", [(3,), (4,)], "class"),
    "an identifier is no number": ("file id age", [(1, 3), (2, 4.5)], "numbers"),
}


SPELLINGS = {
    "no label is none of the labels": ("file labels", ["x|y", "nan", "None|x", ""], "labels", ("x", "y")),
    "lists of Python": ("file labels", ["['x', 'y']", "['y']", "[]", "nan"], "labels", ("x", "y")),
    "lists in a column of one class": ("file label", ["['x', 'y']", "['y']"], "labels", ("x", "y")),
    "lists of numbers": ("file labels", ["[1, 2]", "[2]"], "labels", ("1", "2")),
    "whole numbers as fractions": ("file label", ["1.0", "12.0", "2.0"], "class", ("1", "2", "12")),
    "two sides": ("file label", ["-1", "1", "-1.0"], "class", ("1", "-1")),
    "truth as words": ("file sunny wet", [("True", "False"), ("False", "True")], "labels", ("sunny", "wet")),
    "the index of a data frame": ("Unnamed:0,file,age", [(0, 3.5), (1, 4)], "numbers", ("age",)),
}


@pytest.mark.parametrize("case", SPELLINGS)
def test_cells_as_other_programs_write_them(case, tmp_path):
    header, rows, task, classes = SPELLINGS[case]
    names = header.replace(",", " ").split()
    place = names.index("file")
    for number in range(len(rows)):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
    cells = [[row] if isinstance(row, str) else list(row) for row in rows]
    written = [[*row[:place], f"{number}.png", *row[place:]] for number, row in enumerate(cells)]
    dataset = read(str(write(tmp_path / "t.csv", names, written)))
    assert (dataset.targets.task, dataset.classes) == (task, classes)


@pytest.mark.parametrize("missing", ["nan", "NULL", "None", "NA", "", "-1"])
def test_a_row_without_a_class_is_refused_by_its_line(missing, table):
    others = ("0", "3", "2") if missing == "-1" else ("x", "y", "x")
    with pytest.raises(DataError, match="1 row without a label") as caught:
        read(table("file label", *((cell,) for cell in (others[0], missing, *others[1:]))))
    assert caught.value.why == "line 3"


def test_the_line_of_excel_that_names_the_separator(table, tmp_path):
    read(table("file label", ("x",), ("y",)))
    (tmp_path / "excel.csv").write_text("sep=;\r\nfile;label\r\na.png;x,1\r\nb.png;y\r\n")
    assert read(tmp_path / "excel.csv").classes == ("x,1", "y")
    (tmp_path / "excel.csv").write_text("sep=;\nfile;label\na.png;x\nb.png;\n")
    with pytest.raises(DataError) as caught:
        read(tmp_path / "excel.csv")
    assert caught.value.why == "line 4"


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        (
            "file,label\na.png,x\nb.png,y,z\n",
            "a row with too many cells",
            "line 3 has 3 cells, and the first line names 2",
        ),
        ("file,label,label\na.png,x,z\n", "2 columns are called label", None),
    ],
)
def test_cells_that_belong_to_no_column(text, what, why, table, tmp_path):
    """An unquoted comma would cut a label short."""
    read(table("file label", ("x",), ("y",)))
    (tmp_path / "odd.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        read(tmp_path / "odd.csv")
    assert (caught.value.what, caught.value.why) == (what, why)
    (tmp_path / "odd.csv").write_text("file,label\na.png,x,\nb.png,y,,\n")
    assert read(tmp_path / "odd.csv").classes == ("x", "y"), "empty cells behind the last column hold nothing"


def test_a_spreadsheet_is_to_be_saved_as_csv(tmp_path):
    (tmp_path / "labels.xlsx").write_bytes(b"PK\3\4")
    with pytest.raises(DataError, match="a spreadsheet is not read"):
        read(tmp_path / "labels.xlsx")


def test_minus_one_is_a_class_if_classes_are_asked_for(table):
    assert read(table("file label", ("-1",), ("0",), ("1",)), task="class").classes == ("0", "1", "-1")


@pytest.mark.parametrize("case", CHOSEN)
def test_the_columns_choose_the_task(case, table):
    header, rows, task = CHOSEN[case]
    dataset = read(table(header, *rows))
    assert dataset.targets.task == task
    assert dataset.reason  # the plan prints it


def test_labels_are_read_in_every_form(table):
    dataset = read(table("file labels", ("y|x",), ("",), ("x | x",)))
    assert dataset.classes == ("x", "y")
    assert dataset["train"].labels.tolist() == [[1, 1], [0, 0], [1, 0]]
    spaced = read(table("file labels", ("y x",), ("",)), separator=" ")
    assert spaced.classes == ("x", "y")
    bits = read(table("file y x", (1, 1), (0, "0.0")))
    assert (bits.classes, bits["train"].labels.tolist()) == (("y", "x"), [[1, 1], [0, 0]])
    assert read(table("file label", (3,), (4,)), task="numbers")["train"].labels.tolist() == [[3.0], [4.0]]
    assert read(table("file text", (3,), (4,)), task="numbers")["train"].labels.tolist() == [[3.0], [4.0]]
    assert read(table("file labels", ("x|y",), ("z",)), task="class").classes == ("x|y", "z")
    chosen = read(table("file x note y", (1.5, "n", 2), (2.5, "n", 3)), columns=("y", "x"))
    assert (chosen.classes, chosen["train"].labels.tolist()) == (("y", "x"), [[2.0, 1.5], [3.0, 2.5]])


REFUSED = {
    "empty class": ("file label", [("x",), ("",)], {}, "1 row without a label"),
    "text among numbers": ("file age note", [(1.5, "n"), (2, "m")], {}, "--targets age"),
    "no number": ("file age", [(1.5,), ("old",)], {"task": "numbers"}, "needs columns of finite numbers"),
    "infinite": ("file age", [(1.5,), ("inf",)], {"task": "numbers"}, "needs columns of finite numbers"),
    "no bit": ("file a b", [(1, 0), (2, 0)], {"task": "labels"}, "needs columns of 0 and 1"),
    "no bit by line": ("file a b", [(1, 0), (2, 0)], {"task": "labels"}, "why: a, line 3: '2' is not 0 or 1\n"),
    "no number by line": ("file age", [("old",), (1.5,)], {"task": "numbers"}, "why: age, line 2: 'old' is no number"),
    "a bad cell": ("file age", [(1.5,), (2,), ("x",)], {}, r"column age are.*\n.*\n  why: line 4: 'x' is no number\n"),
    "a bad cell, asked": ("file age", [(1.5,), ("",), (3,)], {"task": "numbers"}, "why: line 3: '' is no number"),
    "a bad cell of two columns": (
        "file age size",
        [(1.5, 1), (2.5, "x"), (3, 3)],
        {},
        r"column size(.*\n)+.*; or --targets age$",
    ),
    "digits to read": ("file text", [("073111",), ("12",)], {}, r"may be text(.*\n)+.*--task text or --task numbers"),
    "bits to read": ("file caption", [("0",), ("1",)], {}, "the column caption may be text to read or numbers"),
    "no such column": ("file age", [(1.5,), (2,)], {"columns": ("aeg",)}, "nearest: age"),
    "no labels at all": ("file label", [("x",), ("y",)], {"separator": ","}, None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_read_is_refused_by_name(case, table):
    header, rows, wanted, message = REFUSED[case]
    if message is None:
        assert read(table(header, *rows), **wanted).targets.task == "labels"
        return
    with pytest.raises((DataError, UsageError), match=message):
        read(table(header, *rows), **wanted)


def test_other_data_and_other_commands_refuse_the_task(table, tmp_path):
    for name in ("x/1.png", "y/1.png"):
        (tmp_path / "photos" / name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "photos" / name)
    with pytest.raises(UsageError, match="--task labels needs a table"):
        load(tmp_path / "photos", wanted=Labeling("labels"), tasks=ALL)
    with pytest.raises(DataError, match="data of --task labels"):
        load(table("file labels", ("x|y",), ("z",)))
    path = tmp_path / "two.csv"
    write(path, ["file", "labels", "split"], [("a.png", "x|y", "train"), ("b.png", "z|x", "test")])
    with pytest.raises(DataError, match="classes that train lacks: z"):
        read(path)


def test_every_label_is_in_both_parts_of_a_split(tables):
    dataset = with_validation(load(tables / "labels.csv", tasks=ALL))
    for part in ("train", "val"):
        assert dataset[part].labels.sum(0).min() > 0
    numbers = with_validation(load(tables / "numbers.csv", tasks=ALL), 0.4)
    spread = [np.ptp(numbers[part].labels[:, 0]) for part in ("train", "val")]
    assert min(spread) >= 5


def test_a_changed_label_or_number_changes_the_fingerprint(table):
    def digests(*rows, header="file labels"):
        dataset = read(table(header, *rows))
        return Fingerprint.of(dataset, dataset).digests

    assert digests(("x|y",), ("x",)) != digests(("x|y",), ("y",))
    assert digests((1.5,), (2,), header="file age") != digests((1.5,), (2.25,), header="file age")


def test_a_stratum_is_the_rarest_label():
    labels = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 0, 1], [0, 1, 0]], np.uint8)
    assert SEVERAL_LABELS.strata(labels, 3).tolist() == [1, 0, 3, 2, 1]


def test_pretraining_reads_no_labels(tables):
    dataset = load_images(tables / "numbers.csv")
    assert (dataset.classes, dataset.targets.task) == ((UNLABELED,), "class")


@pytest.mark.parametrize("column", ["labels", "numbers"])
def test_groups_of_labels_and_numbers_stay_on_one_side(column, tmp_path):
    rows = []
    for number in range(40):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{number}.png")
        label = "x|y" if number % 3 else "y"
        rows.append((f"{number}.png", label if column == "labels" else number % 7 + 0.5, f"patient {number // 4}"))
    table = write(tmp_path / "t.csv", ["file", "labels" if column == "labels" else "age", "group"], rows)
    dataset = with_validation(load(table, tasks=ALL), 0.3)
    assert dataset.classes == (("x", "y") if column == "labels" else ("age",))
    sides = [set(dataset[part].groups.tolist()) for part in ("train", "val")]
    assert not sides[0] & sides[1]
    assert len(dataset["val"]) >= 4


@pytest.mark.parametrize("column", ["label", "age"])
def test_decimal_commas_are_refused(tmp_path, column):
    """Each value would be a class of its own."""
    for number in range(8):
        Image.new("RGB", (8, 8), (30 * number, 0, 0)).save(tmp_path / f"{number}.png")
    values = ["12,50", "7", "3,25", "-1,5", "12,50", "8", "9,75", "0,5"]
    rows = "".join(f"{number}.png;{value}\n" for number, value in enumerate(values))
    (tmp_path / "t.csv").write_text(f"file;{column}\n{rows}")
    with pytest.raises(
        DataError, match=rf"the column {column} holds numbers with a decimal comma(?s:.*)line 2: '12,50'"
    ):
        load(tmp_path / "t.csv")
