"""The plan's choice of a strategy, from the memory of a rank, with its reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from vitral.data import load
from vitral.device import choose
from vitral.distributed.ranks import Ranks
from vitral.errors import UsageError
from vitral.workflows.planning import memory
from vitral.workflows.planning import ranks as plan_ranks
from vitral.workflows.planning.draft import Draft
from vitral.workflows.planning.plan import STEPS, draft_run

MIB = 2**20


class Many(Ranks):
    """Ranks that are only counted."""

    def __init__(self, count: int, local: int):
        self.count, self.local_count = count, local

    @property
    def together(self) -> bool:
        return True


@pytest.fixture
def chosen(make_images, monkeypatch: pytest.MonkeyPatch):
    photos = str(make_images({"cat": 12, "dog": 8}))

    def choose_for(held: int, count: int, local: int, device: str = "cuda", **given: Any) -> tuple[Draft, str]:
        """Return the draft with a strategy, and its reason, for weights, gradients and moments of `held` MiB and a
        rank's memory of 1,000.
        """
        given = {name: value for name, value in {"optimizer": "adamw", **given}.items() if value is not None}
        draft = draft_run({"data": photos, **given}, load(photos), choose("cpu"))
        for step in STEPS[: STEPS.index(plan_ranks.choose_strategy)]:
            draft = step(draft)
        draft = dataclasses.replace(draft, machine=dataclasses.replace(draft.machine, device=torch.device(device)))
        monkeypatch.setattr(plan_ranks, "current", lambda: Many(count, local))
        monkeypatch.setattr(plan_ranks, "training_bytes", lambda *_: (held * MIB, 1))
        monkeypatch.setattr(plan_ranks, "rank_bytes", lambda _: 1000 * MIB)
        after = plan_ranks.choose_strategy(draft)
        return after, after.choices[-1].reason

    return choose_for


@pytest.mark.parametrize(
    ("held", "count", "local", "device", "name", "part"),
    [
        (500, 16, 8, "cuda", "ddp", "take 500 MiB of a rank's 1,000 MiB"),
        (4000, 16, 8, "cuda", "hsdp", "divided within each machine, 500 MiB per rank"),
        (4000, 8, 8, "cuda", "fsdp", "divided among the ranks, 500 MiB per rank"),
        (8000, 16, 8, "cuda", "fsdp", "divided among the ranks, 500 MiB per rank"),
        (4000, 15, 8, "cuda", "fsdp", "divided among the ranks, 267 MiB per rank"),
        (8001, 16, 8, "cuda", "offload", "kept in the CPU's memory, 500 MiB per rank"),
        (8001, 16, 8, "cpu", "fsdp", "divided among the ranks, 500 MiB per rank"),
    ],
)
def test_the_first_strategy_that_fits(held, count, local, device, name, part, chosen):
    draft, why = chosen(held, count, local, device)
    assert draft.run.strategy == name
    assert part in why


def test_what_cannot_be_shared_out_stays_whole(chosen):
    draft, why = chosen(4000, 16, 8, compile=True)
    assert draft.run.strategy == "ddp"
    assert "each rank keeps all of them: compiled steps were not tested with sharding" in why


@pytest.mark.parametrize(
    ("strategy", "device", "why", "hint"),
    [
        ("hsdp", "cuda", "all ranks are on one machine", "--strategy fsdp"),
        ("offload", "cpu", "on cpu, there is no other memory to move the network to", "--strategy ddp"),
    ],
)
def test_refused_strategies(strategy, device, why, hint, chosen):
    with pytest.raises(UsageError, match=why) as refused:
        chosen(10, 4, 4, device, strategy=strategy)
    assert hint in str(refused.value)


def test_memory_of_a_part(chosen, monkeypatch):
    draft, _ = chosen(4000, 16, 8)
    monkeypatch.setattr(memory, "current", lambda: Many(16, 8))
    parts = {name: memory.rank_share(name, 4800, draft.config) for name in ("ddp", "fsdp", "hsdp")}
    assert parts == {"ddp": 4800, "fsdp": 300, "hsdp": 600}
    two_blocks = 2 * memory.needs(draft.config).weights // draft.config.depth
    assert memory.rank_share("offload", 4800, draft.config) == two_blocks


def test_parts_go_with_the_optimizer_of_the_plan(chosen):
    draft, _ = chosen(10, 4, 4, strategy="fsdp", optimizer="muon")
    assert (draft.run.strategy, draft.run.optimizer) == ("fsdp", "muon")
