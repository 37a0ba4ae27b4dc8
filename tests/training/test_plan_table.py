"""The table of a plan, as wide as the terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from vitral.training.options import Run
from vitral.training.plan import Choice, Plan
from vitral.training.progress import print_plan

NAME = "timm:vit_tiny_patch16_224.augreg_in21k_ft_in1k"
CHOICES = (
    Choice("precision", "bf16 on AMD EPYC, 1 thread", "the CPU has bf16 instructions"),
    Choice("init", "none", f"245 images are few: pretrained weights would help most, --init {NAME}"),
)


@pytest.mark.parametrize(("width", "whole"), [(60, False), (80, True), (200, True)])
def test_names_to_type_stay_on_one_line_if_there_is_room(width: int, whole: bool) -> None:
    output = io.StringIO()
    print_plan(Console(file=output, width=width), Plan(Run(), CHOICES), whole=True)
    assert all(len(line) <= width for line in output.getvalue().splitlines())
    assert (NAME in output.getvalue()) == whole
    letters = "".join(output.getvalue().split())
    everything = "".join(one.name + one.value + one.reason for one in CHOICES).replace(" ", "")
    assert sorted(letters) == sorted("Planchoicevaluewhy" + everything), "nothing is cut off"


def test_a_run_prints_what_depends_on_the_images() -> None:
    output = io.StringIO()
    more = (
        Choice("seed", "3", "requested"),
        Choice("epochs", "9", "requested"),
        Choice("threads", "WARNING: 1", "busy"),
        Choice("mirror", "yes", "photographs"),
        Choice("data", "1 note", "2 files are not used"),
    )
    print_plan(Console(file=output, width=100), Plan(Run(), (*CHOICES, *more)))
    rows = [line.split()[0] for line in output.getvalue().splitlines()[2:] if line.strip() and line[0] != " "]
    assert rows == ["init", "epochs", "threads", "data", "3"]
    assert "3 more settings: --plan-only" in output.getvalue()


def test_a_plan_without_choices_is_a_table() -> None:
    print_plan(Console(file=io.StringIO(), width=80), Plan(Run()))
