"""The table of a plan, as wide as the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vitral.training.progress import print_plan
from vitral.training.run import Choice, Plan, Run

NAME = "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k"
CHOICES = (
    Choice("precision", "bf16 on AMD EPYC, 1 thread", "the processor has bf16 instructions"),
    Choice("init", "none", f"245 pictures are few: weights that have learned would help most, --init {NAME}"),
)


@pytest.mark.parametrize(("width", "whole"), [(60, False), (80, True), (200, True)])
def test_what_is_to_be_typed_stays_in_one_piece_where_there_is_room(width: int, whole: bool) -> None:
    told = io.StringIO()
    print_plan(Console(file=told, width=width), Plan(Run(), CHOICES))
    assert all(len(line) <= width for line in told.getvalue().splitlines())
    assert (NAME in told.getvalue()) == whole
    letters = "".join(told.getvalue().split())
    everything = "".join(one.name + one.value + one.reason for one in CHOICES).replace(" ", "")
    assert sorted(letters) == sorted("Planchoicevaluewhy" + everything), "nothing is cut off"


def test_a_plan_without_choices_is_a_table() -> None:
    print_plan(Console(file=io.StringIO(), width=80), Plan(Run()))
