"""Each kind of study is one class; sentences and figures are there for all of them."""

from __future__ import annotations

import pytest

from vitral.errors import UsageError
from vitral.studies.conclusions import SENTENCES
from vitral.studies.designs import DESIGNS, Design
from vitral.studies.drawing import DRAWINGS
from vitral.studies.study import Study


def test_all_kinds_have_sentences_and_a_figure():
    assert DESIGNS.keys() == SENTENCES.keys() == DRAWINGS.keys()


class BySize(Design):
    """Networks over the image size."""

    title, figure, command, factor, column, sets = "Accuracy by size", ("", ""), "size", "epochs", "size", ("model",)

    def grid(self, asked):
        yield from ({"image_size": 8 * n} for n in asked.epochs)

    def in_words(self, value):
        return f"{8 * value} pixels"


def test_another_kind_is_one_class(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(DESIGNS, "size", BySize())
    study = Study("size", "digits", epochs=(2, 4), seeds=2)
    assert [cell.options["image_size"] for cell in study.cells] == [16, 32, 16, 32]
    assert study.command == "vitral study size digits --epochs 2 4 --seeds 2"
    assert Study.from_json(study.to_json()) == study
    with pytest.raises(UsageError, match="--model cannot be set for single runs"):
        Study("size", "digits", epochs=(2,), options={"model": "S/16"})


@pytest.mark.parametrize(
    ("kind", "given", "refused"),
    [
        ("data", {"fractions": (0.5,)}, False),
        ("data", {"fractions": (0.5,), "options": {"epochs": 3}}, True),
        ("compute", {"epochs": (2,)}, True),
        ("options", {"vary": {"epochs": (1, 2)}}, True),
        ("options", {"vary": {"lr": (0.1, 0.2)}}, False),
        ("search", {"vary": {"epochs": (1, 2, 3)}, "trials": 2}, False),
    ],
)
def test_minutes_and_epochs_exclude_each_other_but_in_a_search(kind, given, refused):
    if refused:
        with pytest.raises(UsageError, match="mutually exclusive"):
            Study(kind, "digits", minutes=5.0, **given)
    else:
        assert Study(kind, "digits", minutes=5.0, **given).minutes == 5.0


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="nearest: compute"):
        Study("computes", "digits")
