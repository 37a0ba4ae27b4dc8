"""A training step (forward, cross-entropy, backward, clipping, AdamW) by each strategy of several ranks, with one rank,
beside the same step of one process. With one rank nothing travels: what remains is the overhead of the strategy itself.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import vitral
from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio
from vitral.data.loader import Batch
from vitral.device import choose
from vitral.distributed.ranks import Ranks, joined
from vitral.distributed.strategies import STRATEGIES, Strategy
from vitral.training.optimizer_set import OptimizerSet
from vitral.training.options import Run
from vitral.training.step import NoMonitor, Step

# name, image size, batch
NETWORKS = (("Nano/4", 32, 64), ("Ti/16", 224, 8), ("S/16", 224, 8))
QUICK = (("mu/4", 8, 2),)


def run(options: Options) -> list[Table]:
    """Make one table with a row for each network."""
    with _one_rank(options.device) as ranks:
        rows = [_row(*network, ranks, options) for network in (QUICK if options.quick else NETWORKS)]
    columns = {
        "name": "network",
        "size": "image size|d",
        "batch": "batch|d",
        "n": "n|d",
        "alone": "one process, ms|.1f",
    }
    for name in STRATEGIES:
        columns |= {name: f"{name}, ms|.1f", f"{name}_spread": "spread", f"{name}_ratio": f"{name} : one process|.3f"}
    return [Table("Milliseconds a step", columns, rows, name="cuda" if options.device == "cuda" else "")]


@contextmanager
def _one_rank(device: str) -> Iterator[Ranks]:
    with socket.socket() as server:
        server.bind(("localhost", 0))
        port = server.getsockname()[1]
    names = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, names), joined(device) as ranks:
        yield ranks


def _row(name: str, size: int, batch: int, ranks: Ranks, options: Options) -> dict[str, object]:
    steps = {"alone": _step(name, size, batch, options.device, lambda model: Strategy(model))}
    for strategy, build in STRATEGIES.items():
        steps[strategy] = _step(name, size, batch, options.device, lambda model, build=build: build(model, ranks))
    found = alternate(steps, rounds=1 if options.quick else 9, warm_up=2, device=options.device)
    row: dict[str, object] = {"name": name, "size": size, "batch": batch, "n": found["alone"].n}
    row["alone"] = found["alone"].columns(1000)["median"]
    for strategy in STRATEGIES:
        cells = found[strategy].columns(1000)
        row |= {strategy: cells["median"], f"{strategy}_spread": f"{cells['least']:.1f}–{cells['greatest']:.1f}"}
        row[f"{strategy}_ratio"] = ratio(found[strategy], found["alone"])
    return row


def _step(
    name: str, size: int, batch: int, device: str, share: Callable[[nn.Module], Strategy]
) -> Callable[[], object]:
    torch.manual_seed(0)
    machine, run = choose(device), Run(optimizer="adamw", lr=1e-4, clip=1.0)
    model = vitral.create(name, image_size=size, classes=10).to(machine.device).train()
    strategy = share(model)
    images = torch.randn(batch, 3, size, size, device=machine.device)
    labels = torch.randint(10, (batch,), device=machine.device)

    def objective(network: nn.Module, given: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        return F.cross_entropy(network(given.images).float(), given.labels), {}

    step = Step(model, OptimizerSet(model, run), objective, machine, run, strategy=strategy)
    drawn = Batch(images, labels, torch.arange(batch).numpy())
    return lambda: step(drawn, NoMonitor(), lr=1e-4)
