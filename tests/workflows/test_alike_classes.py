"""Classes that look like one, by features."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from faults import drawn
from running import as_json, printed
from vitral.data import DataSet, Split
from vitral.data.checks.findings import Place
from vitral.workflows.checks.classes import alike_classes, auc_with_error
from vitral.workflows.checks.set_features import SetFeatures


def features(counts: list[int], means: list[float], seed: int = 0) -> SetFeatures:
    """Draw features of classes around these multiples of a direction of their own; equal multiples are one class."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(len(counts)), counts)
    directions = {mean: rng.normal(0, 1, 32) * (mean != 0) for mean in sorted(set(means))}
    values = np.stack([directions[means[label]] for label in labels]) * 1.5 + rng.normal(0, 1, (len(labels), 32))
    names = tuple(f"{i}.png" for i in range(len(labels)))
    classes = tuple(f"kind {k}" for k in range(len(counts)))
    dataset = DataSet("drawn", classes, {"train": Split(names, labels, lambda i: b"")}, "drawn")
    return SetFeatures(dataset, tuple(Place("train", i, name, "") for i, name in enumerate(names)), values)


@pytest.mark.parametrize("seed", range(5))
def test_a_class_split_at_random_is_a_pair(seed: int) -> None:
    (pair,) = alike_classes(features([40, 40, 40, 60, 40], [1, 2, 3, 3, 4], seed))
    assert (pair.first, pair.second) == ("kind 2", "kind 3")
    assert 0.3 < pair.auc < 0.65


@pytest.mark.parametrize(
    ("counts", "means"),
    [
        ([40, 40, 40, 40], [1, 2, 3, 4]),
        ([40, 40, 40, 19, 40], [1, 2, 3, 3, 4]),
        ([40, 40], [1, 1]),
        ([40, 40, 40, 40], [0, 0, 0, 0]),
    ],
    ids=["all apart", "few images", "one pair", "weak features"],
)
def test_nothing_is_claimed(counts: list[int], means: list[float]) -> None:
    assert alike_classes(features(counts, means)) == []


def test_auc_and_its_standard_error() -> None:
    rng = np.random.default_rng(0)
    draws = [auc_with_error(rng.normal(0.5, 1, 30), rng.normal(0, 1, 40)) for _ in range(400)]
    values, errors = np.transpose(draws)
    assert values.mean() == pytest.approx(0.638, abs=0.01)
    assert errors.mean() == pytest.approx(values.std(), rel=0.1)


@pytest.mark.slow
def test_the_check_lists_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "photos"
    for kind, name in enumerate(("stripes", "bars", "waves", "waves again")):
        for number in range(20 if kind < 2 else 40):
            path = folder / name / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn(min(kind, 2), 100 * kind + number).save(path)
    out, _ = printed(capsys, "data", "check", str(folder))
    assert "'waves' and 'waves again': AUC 0." in out
    (pair,) = as_json(capsys, "data", "check", str(folder))["alike_classes"]
    assert {pair["first"], pair["second"]} == {"waves", "waves again"}
