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


def assert_same(one: list[dict[str, Any]], other: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert a["train_loss"] == pytest.approx(b["train_loss"], rel=tolerance)
        assert a["gradient_norm"] == pytest.approx(b["gradient_norm"], rel=10 * tolerance)
        assert a["val_loss"] == pytest.approx(b["val_loss"], rel=tolerance)
        assert a["train_accuracy"] == pytest.approx(b["train_accuracy"], rel=1e-6)
        for name in ("val_accuracy", "images_seen", "step", "lr"):
            assert a[name] == b[name], name


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
