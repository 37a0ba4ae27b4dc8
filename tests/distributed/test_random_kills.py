"""Ranks killed at random times: the others end, and the run ends with the bits of a run that was not killed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # benchmarks/ is not installed

from benchmarks import kills

from running import soak


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_with_kills_ends_with_the_bits_of_one_without(strategy):
    runs = list(kills.killed_runs(soak(10, 2), epochs=8, seed=1, strategy=strategy))
    every = [kill for one in runs for kill in one.kills]
    assert len(every) == soak(10, 2)
    assert all(one.equal for one in runs)
    assert all("Traceback" not in one.printed for one in runs)
    for kill in every:
        assert kill.seconds < 30
        assert kill.codes in ((2,), (0,), (130,)), "it reported the loss, had just finished, or had not begun to wait"
