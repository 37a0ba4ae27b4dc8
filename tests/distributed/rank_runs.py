"""Tiny runs of ranks: their command, a fault at a step, comparison by their metrics."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from running import TINY, as_words
from vitral.distributed.ranks import Group


def history(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


TIMES = {"images_per_second", "waited", "seconds", "compile_seconds"}
EXACT = {"val_accuracy", "lr"}
"""Fractions that are equal, as all numbers that are integers."""


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """Compare all metrics of all epochs, except for times."""
    assert len(one) == len(other)
    within = {"gradient_norm": 10 * tolerance, "train_accuracy": 1e-6}
    for a, b in zip(one, other, strict=True):
        assert a.keys() - TIMES == b.keys() - TIMES
        for name in a.keys() - TIMES:
            rounded = isinstance(a[name], float) and name not in EXACT
            assert b[name] == (pytest.approx(a[name], rel=within.get(name, tolerance)) if rounded else a[name]), name


OPTIONS: dict[str, Any] = {**TINY, "val_fraction": 0.2, "batch_size": 5, "ema": 0.9, "mixup": 0.2, "drop_path": 0.2}


def command(photos: Path, out: Path, *more: str, **options: object) -> list[str]:
    return ["train", str(photos), *as_words({**OPTIONS, "out": out, **options}), *more]


def at_step(step: int, rank: int, act: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Call `act` in one rank after this optimizer step."""
    before = Group.at

    def at(self: Group, epoch: int, now: int) -> None:
        before(self, epoch, now)
        if now == step and self.number == rank:
            act()

    monkeypatch.setattr(Group, "at", at)
