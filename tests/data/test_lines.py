"""Images with texts: tables and pairs of files, vocabularies, and what is refused by name."""

from __future__ import annotations

import numpy as np
import pytest

from textlines import draw, write_lines
from vitral.data import load
from vitral.data.sources.lines import load_lines
from vitral.data.splits import with_validation
from vitral.data.tokens import END, PADDING, SPECIAL, decode, encode, vocabulary
from vitral.errors import DataError


def texts_of(dataset, split):
    return [decode(row, dataset.classes) for row in dataset[split].labels]


def test_tokens_are_the_characters_of_the_text():
    names = vocabulary(["ba", "a c"])
    assert names == (*SPECIAL, " ", "a", "b", "c")
    rows = encode(["ba", "", "a c"], names, 5)
    assert [decode(row, names) for row in rows] == ["ba", "", "a c"]
    assert rows[0].tolist() == [5, 4, END, PADDING, PADDING]
    assert decode([5, 4], names, " ") == "b a"


def test_a_table_and_pairs_of_files_are_the_same_data(tmp_path):
    table, pairs = write_lines(tmp_path / "table"), write_lines(tmp_path / "pairs", pairs=True)
    for data in (table, table / "labels.csv", pairs):
        dataset = load_lines(data)
        assert dataset.classes == (*SPECIAL, "a", "b")
        assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 24, "val": 8}
        for split in dataset.splits.values():
            for number, row in enumerate(split.labels):
                text = decode(row, dataset.classes)
                np.testing.assert_array_equal(split.image(number, 1)[..., 0], np.asarray(draw(text)))
    assert sorted(texts_of(load_lines(table), "train")) == sorted(texts_of(load_lines(pairs), "train"))


def test_validation_is_cut_with_short_and_long_texts(tmp_path):
    folder = write_lines(tmp_path / "lines", 80)
    for path in (folder / "val").iterdir():
        path.rename(folder / "train" / path.name)
    rows = (folder / "labels.csv").read_text().replace("val", "train")
    (folder / "labels.csv").write_text(rows)
    dataset = with_validation(load_lines(folder), 0.2, seed=3)
    assert len(dataset["val"]) == 16
    assert {len(text) for text in texts_of(dataset, "val")} == {1, 2, 3}


def test_characters_that_training_never_shows_are_noted(tmp_path):
    folder = write_lines(tmp_path / "lines")
    table = folder / "labels.csv"
    lines = table.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if line.endswith(",val"))
    file, _, split = lines[number].split(",")
    table.write_text("\n".join([*lines[:number], f"{file},é,{split}", *lines[number + 1 :]]))
    (note,) = [one for one in load_lines(folder).notes if "no training text" in one]
    assert "é" in note


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (["file,label2", "a.png,x"], "no text column"),
        (["name,text", "a.png,x"], "no file column"),
        (["file,text", "b.png,x"], "does not exist"),
        (["file,text", "a.png,"], "without a text"),
        (["file,text,split", "a.png,x,extra"], "an unknown split"),
        (["file,text"], "without rows"),
        (["file,text", "a.png," + "x" * 1001], "too long"),
        (["file,text,split", "a.png,x,val"], "no images to train on"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_by_name(tmp_path, rows, words):
    draw("a").save(tmp_path / "a.png")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    with pytest.raises(DataError, match=words):
        load_lines(tmp_path)


def test_images_without_a_text_and_other_data_are_refused(tmp_path):
    draw("a").save(tmp_path / "a.png")
    with pytest.raises(DataError, match="without a text"):
        load_lines(tmp_path)
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="cannot read a text"):
        load_lines(tmp_path)
    with pytest.raises(DataError, match="no images with texts"):
        load_lines(tmp_path / "nothing")


def test_a_table_of_texts_has_the_columns_of_other_tables(tmp_path):
    """`is_valid` holds lines out, and `group` keeps them on one side of a cut."""
    for number in range(6):
        draw("ab").save(tmp_path / f"{number}.png")
    rows = "".join(f"{n}.png,{'ab'[n % 2]},{'True' if n > 3 else 'False'},page {n // 2}\n" for n in range(6))
    (tmp_path / "labels.csv").write_text("file,text,is_valid,group\n" + rows)
    dataset = load_lines(tmp_path)
    assert {name: len(split) for name, split in dataset.splits.items()} == {"train": 4, "val": 2}
    assert dataset["train"].groups.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("column", ["text", "label", "comment"])
def test_a_quotation_mark_that_swallows_lines_is_refused(tmp_path, column):
    """A TSV without quoting, one cell of which begins with a quotation mark."""
    for number in range(6):
        draw("ab").save(tmp_path / f"{number}.png")
    marked = [f"{n}.png\t{'ab'[n % 2]}\t{chr(34) * (n == 2)}note" for n in range(6)]
    if column != "comment":
        marked = [f"{n}.png\t{chr(34) * (n == 2)}{'ab'[n % 2]}" for n in range(6)]
    header = f"file\t{column}" if column != "comment" else "file\tlabel\tcomment"
    (tmp_path / "labels.tsv").write_text("\n".join([header, *marked]) + "\n")
    with pytest.raises(DataError, match=r"(?s)quotation mark is not closed.*lines 4 to 7"):
        load(tmp_path / "labels.tsv") if column != "text" else load_lines(tmp_path)


def test_a_comment_of_several_lines_is_no_fault(tmp_path):
    for number in range(3):
        draw("a").save(tmp_path / f"{number}.png")
    rows = ["0.png,a,fine", '1.png,b,"two\nlines"', "2.png,a,fine"]
    (tmp_path / "labels.csv").write_text("\n".join(["file,label,comment", *rows]))
    assert len(load(tmp_path / "labels.csv")["train"]) == 3
