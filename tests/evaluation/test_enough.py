"""Each threshold of a number of images, at its edge."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from images import MakeImages
from running import TINY
from vitral.data import Split
from vitral.evaluation.calibration import fit_temperature
from vitral.evaluation.enough import FOR_A_CLASS, FOR_A_FIT, FOR_ADVICE, FOR_RATES, TO_CHOOSE_AN_EPOCH
from vitral.evaluation.metrics import measure
from vitral.training.options import Run
from vitral.workflows.planning.plan import keep_last, plan_run

ROOT = Path(__file__).parents[2]


def test_the_values():
    """A change of one is a decision: messages and documentation state them."""
    assert (FOR_RATES, TO_CHOOSE_AN_EPOCH, FOR_A_FIT, FOR_ADVICE, FOR_A_CLASS) == (100, 100, 50, 30, 30)


def test_the_page_in_the_browser_and_its_documentation_have_them():
    page = (ROOT / "src/vitral/web/teach/figures.js").read_text("utf-8")
    assert dict(re.findall(r"const (FOR_\w+) = (\d+);", page)) == {
        "FOR_ADVICE": str(FOR_ADVICE),
        "FOR_A_FIT": str(FOR_A_FIT),
    }
    guide = " ".join((ROOT / "docs/label.md").read_text("utf-8").split())
    assert set(re.findall(r"[Ff]ewer than (\d+) images", guide)) == {str(FOR_ADVICE)}


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize(("independent", "few"), [(FOR_RATES - 1, True), (FOR_RATES, False)])
def test_rates(independent, few, grouped):
    """Of groups of two images, the groups count."""
    count = 2 * independent if grouped else independent
    labels = np.arange(count) % 2
    probabilities = np.where(np.eye(2)[labels] == 1, 0.8, 0.2)
    groups = np.arange(count) // 2 if grouped else None
    found = measure(probabilities, labels, ("a", "b"), groups)
    assert found.groups == independent
    assert bool(found.of_ten_new()) == few


@pytest.mark.parametrize(("count", "fitted"), [(FOR_A_FIT - 1, False), (FOR_A_FIT, True)])
def test_a_temperature(count, fitted):
    labels = np.zeros(count, int)
    logits = np.tile([[4.0, 0.0]], (count, 1))
    logits[: count // 5] = logits[: count // 5, ::-1]  # wrong, and as sure
    assert (fit_temperature(logits, labels) != 1.0) == fitted


@pytest.mark.parametrize(("count", "last"), [(TO_CHOOSE_AN_EPOCH - 1, True), (TO_CHOOSE_AN_EPOCH, False)])
def test_choosing_an_epoch(count, last):
    val = Split([f"{n}.png" for n in range(count)], np.zeros(count, int), lambda index: np.zeros((8, 8, 3), np.uint8))
    changed: dict[str, Any] = {}
    draft: Any = SimpleNamespace(
        run=Run(ema=0.9),
        given={},
        dataset=SimpleNamespace(splits={"val": val}),
        change=lambda *choices, **options: changed.update(options),
    )
    keep_last(draft)
    assert changed == ({"keep": "last"} if last else {})


@pytest.mark.parametrize(("count", "few"), [(FOR_ADVICE - 1, True), (FOR_ADVICE, False)])
def test_advice_to_hold_out_more(make_images: MakeImages, count, few):
    job = plan_run({"data": str(make_images({"a": count * 5, "b": count * 5})), "val_fraction": 0.1, **TINY})
    (choice,) = (one for one in job.plan.choices if one.name == "validation")
    assert len(job.dataset["val"]) == count
    assert ("--val-fraction 0.3" in choice.reason) == few
