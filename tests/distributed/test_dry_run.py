"""`vitral train --dry-run`: traffic against formulas and real ranks; memory, time and cost by their definitions."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from together import on_ranks

from running import mostly_slow, printed
from vitral.device import Machine
from vitral.distributed.ranks import ALONE, current, joined
from vitral.distributed.simulated import Collective, Recorder
from vitral.distributed.strategies import STRATEGIES, blocks_of
from vitral.distributed.tensors import all_like, whole
from vitral.errors import UsageError
from vitral.kernels import reference_ops
from vitral.model import ViT, variants
from vitral.training.optimizers import OptimizerSet
from vitral.training.options import Run
from vitral.training.step import NoMonitor, Step
from vitral.workflows.dry_run import Cluster, Estimate, _objective, estimate, link_seconds

OPTIONS: dict[str, Any] = {
    "model": "mu/4", "dim": 16, "depth": 3, "heads": 2, "mlp_dim": 24, "image_size": 8, "epochs": 3, "batch_size": 64,
    "optimizer": "adamw", "precision": "fp32", "ema": 0.9, "accumulate": 1,
}  # fmt: skip
IMAGES, CLASSES = 1000, 10


def estimated(world: int, strategy: str, per_machine: int = 8, price: float | None = None, **more: Any) -> Estimate:
    cluster = Cluster.of("h200", world, per_machine, price)
    return estimate(cluster, {**OPTIONS, "strategy": strategy, **more}, (IMAGES, CLASSES))


def network_of(found: Estimate) -> ViT:
    config = variants.config("mu/4", **{**found.run.model_changes(), "classes": CLASSES})
    return ViT(config)


def padded(parameters: Any, parts: int) -> int:
    """Bytes of parameters whose first dimension is filled up to a multiple of the parts."""
    return sum(4 * math.ceil(len(p) / parts) * parts * math.prod(p.shape[1:]) if p.ndim else 4 for p in parameters)


@pytest.mark.parametrize(("strategy", "world", "per_machine"), mostly_slow(
    [("fsdp", 16, 8), ("hsdp", 16, 8), ("fsdp", 3, 8)], every=3
))  # fmt: skip
def test_traffic_of_shared_out_parameters_by_formula(strategy, world, per_machine):
    found = estimated(world, strategy, per_machine)
    model, parts = network_of(found), per_machine if strategy == "hsdp" else world
    blocks = [padded(block.parameters(), parts) for block in blocks_of(model)]
    inside = {id(p) for block in blocks_of(model) for p in block.parameters()}
    rest = padded((p for p in model.parameters() if id(p) not in inside), parts)
    by_kind = {kind: [one for one in found.collectives if one.kind == kind] for kind in (
        "all-gather", "reduce-scatter", "all-reduce",
    )}  # fmt: skip
    assert sum(one.bytes for one in by_kind["all-gather"]) == 2 * sum(blocks) + rest  # the rest stays for backward
    assert sum(one.bytes for one in by_kind["reduce-scatter"]) == sum(blocks) + rest
    machines = sum(one.bytes for one in by_kind["all-reduce"])
    assert machines == (0 if strategy == "fsdp" else (sum(blocks) + rest) // parts)
    ring = (3 * sum(blocks) + 2 * rest) * (parts - 1) / parts
    across = 2 * machines * (world // parts - 1) / (world // parts) if strategy == "hsdp" else 0
    expected = {("fsdp", 16): (ring, ring / 8), ("hsdp", 16): (ring, across), ("fsdp", 3): (ring, 0)}
    assert found.traffic == pytest.approx(expected[strategy, world])


def test_traffic_of_whole_parameters():
    found = estimated(16, "ddp")
    sent = 2 * 4 * found.parameters * 15 / 16
    assert found.traffic == pytest.approx((sent, sent / 8))
    assert found.parameters == sum(p.numel() for p in network_of(found).parameters())


def test_traffic_is_that_of_real_ranks(tmp_path):
    """The same collectives, in the same order and of the same size, as two processes call over gloo."""
    found = estimated(2, "fsdp")

    def work() -> int:
        with joined("cpu") as ranks:
            model = network_of(found)
            reference_ops(model)
            strategy = STRATEGIES["fsdp"](model, ranks)
            objective = _objective(found.run, CLASSES)
            machine = Machine(torch.device("cpu"), "fp32", "")
            step: Any = Step(model, OptimizerSet(model, found.run), objective, machine, found.run, strategy=strategy)
            batch = torch.rand(32, 3, 8, 8), torch.zeros(32, dtype=torch.long)
            with Recorder() as recorder:
                step(batch, NoMonitor(), lr=0.1)
            called = [(one.kind, one.ranks, one.bytes) for one in recorder.collectives]
            (tmp_path / f"{ranks.number}.json").write_text(json.dumps(called))
            return 0

    assert on_ranks(2, work) == [0, 0]
    simulated = json.loads(json.dumps([(one.kind, one.ranks, one.bytes) for one in found.collectives]))
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == simulated


def test_real_ranks_after_a_simulation_of_as_many():
    """torch keeps results by the mesh of ranks; those of the simulated rank 0 are not another one's."""
    model = network_of(estimated(2, "fsdp"))
    expected = {name: value.clone() for name, value in model.state_dict().items()}

    def work() -> int:
        with joined("cpu") as ranks:
            STRATEGIES["fsdp"](model, ranks)
            parts = all_like(expected, model.state_dict())
            return int(not all(torch.equal(whole(part), expected[name]) for name, part in parts.items()))

    assert on_ranks(2, work) == [0, 0]


@pytest.mark.slow
def test_memory_is_shared_out():
    one, part = estimated(1, "ddp").memory, estimated(2, "fsdp").memory
    parameters = 4 * estimated(1, "ddp").parameters
    assert (one.parameters, one.gradients, one.averaged, one.gathered) == (parameters,) * 3 + (0,)
    assert one.optimizer == pytest.approx(2 * parameters, rel=0.01)  # beside the moments a counter of steps
    for name in ("parameters", "gradients", "averaged", "optimizer"):
        assert getattr(part, name) == pytest.approx(getattr(one, name) / 2, rel=0.05)
    assert part.activations == one.activations // 2
    assert current() is ALONE


def test_time_and_cost_follow_from_their_parts():
    found = estimated(16, "fsdp", price=2.0)
    assert found.steps == 3 * (found.images // 64)
    training = found.steps * found.seconds.step
    validation = 3 * found.validated * found.seconds.compute / (64 * 3)
    assert found.hours == pytest.approx((training + validation) / 3600)
    assert found.cost == pytest.approx(2.0 * 16 * found.hours)
    assert found.seconds.communication == pytest.approx(
        sum(link_seconds(one, found.cluster) for one in found.collectives)
    )
    assert found.seconds.exposed <= found.seconds.communication
    assert found.to_json()["estimated"] is True
    assert all(source for _, _, source in found.assumptions)


def test_a_ring_on_its_links():
    one = Collective("all-gather", tuple(range(16)), 1600)
    assert one.sent == 1500
    assert one.on_links(16) == (1500, 0)
    assert one.on_links(8) == (1500, 187.5)
    assert one.on_links(1) == (0, 1500)
    assert Collective("all-reduce", (0, 8), 100).on_links(8) == (0, 100)
    cluster = Cluster.of("h100", 16, 8)
    assert link_seconds(one, cluster) == pytest.approx(187.5 / 50e9 / 0.8)  # the slower link
    assert link_seconds(one, Cluster.of("h100", 16, 16)) == pytest.approx(1500 / 450e9 / 0.8)


WORDS = ["train", "--assume", "1000", "10", "--dry-run", "--epochs", "2", "--model", "mu/4", "--image-size", "8"]


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out, _ = printed(capsys, *WORDS, "--world", "16", "--price", "2.5")
    for part in ("Estimated, not measured: mu/4 on 16 × H200 (2 × 8), ddp", "memory a GPU", "between machines",
                 "not hidden", "efficiency", "cost", "Assumptions", "assumed, not measured", "DGX H200"):  # fmt: skip
        assert part in out
    assert list(tmp_path.iterdir()) == []


REFUSED = {
    "no dry run": (["train", "digits", "--world", "4"], "--world goes with --dry-run"),
    "an unknown GPU": ([*WORDS, "--gpu", "h2000"], "unknown GPU 'h2000'"),
    "a part of a machine": ([*WORDS, "--world", "12"], "12 GPUs are not whole machines of 8"),
    "data and none": ([*WORDS, "digits"], "--assume replaces DATA"),
    "minutes": ([*WORDS[:5], "--minutes", "3"], "a dry run needs epochs and labels"),
    "too few images": (["train", "--assume", "3", "2", "--dry-run"], "--assume takes images and classes"),
    "a rank without images": ([*WORDS, "--world", "64", "--batch-size", "8"], "a rank would have no image"),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refusals(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words, message = REFUSED[name]
    assert message in " ".join(printed(capsys, *words, code=2)[1].split())
    assert current() is ALONE


def test_sharded_steps_are_not_compiled():
    with pytest.raises(UsageError, match="--compile does not go with --strategy fsdp"):
        estimated(2, "fsdp", compile=True)
    assert isinstance(Run(compile=True), Run)
