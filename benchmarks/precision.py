"""A training step (forward, cross-entropy, backward, AdamW) of small networks in fp32 and under bf16 autocast.
"Choice" is the default of `vitral.device.choose`: bf16 from a width of `BF16_MIN_DIM_ON_CPU` on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

import vitral
from benchmarks.results import Options, Table
from vitral.bench.harness import alternate, ratio
from vitral.device import BF16_MIN_DIM_ON_CPU, choose
from vitral.training.optimizers import OptimizerSet
from vitral.training.options import Run

# name, image size, channels, batch
NETWORKS = (
    ("mnist-7562", 28, 1, 1024),
    ("mu/4", 28, 1, 256),
    ("Pico/2", 8, 1, 256),
    ("Pico/4", 28, 1, 256),
    ("Nano/4", 32, 3, 256),
    ("Ti/4", 32, 3, 64),
)


def run(options: Options) -> list[Table]:
    """Make one table with a row for each network."""
    rows = []
    for name, size, channels, batch in NETWORKS[:1] if options.quick else NETWORKS:
        batch = 4 if options.quick else batch
        steps = {p: training_step(name, size, channels, batch, p, options.device) for p in ("fp32", "bf16")}
        found = alternate(steps, rounds=1 if options.quick else 9, warm_up=2, device=options.device)
        dim = vitral.create(name, image_size=size, channels=channels).config.dim
        row: dict[str, object] = {
            "name": name, "size": size, "batch": batch, "dim": dim, "n": found["fp32"].n,
            "ratio": ratio(found["fp32"], found["bf16"]), "choice": choose(options.device, dim=dim).precision,
        }  # fmt: skip
        for precision, sample in found.items():
            cells = sample.columns(1000)
            row |= {precision: cells["median"], f"{precision}_spread": f"{cells['least']:.1f}–{cells['greatest']:.1f}"}
        rows.append(row)
    columns = {
        "name": "network", "size": "image size|d", "batch": "batch|d", "dim": "width|d", "n": "n|d",
        "fp32": "fp32, ms|.1f", "fp32_spread": "spread", "bf16": "bf16, ms|.1f", "bf16_spread": "spread",
        "ratio": "fp32 : bf16|.2f", "choice": "choice",
    }  # fmt: skip
    caption = f"Milliseconds a step; bf16 is chosen from width {BF16_MIN_DIM_ON_CPU} on"
    return [Table(caption, columns, rows, name="cuda" if options.device == "cuda" else "")]


def training_step(name: str, size: int, channels: int, batch: int, precision: str, device: str) -> Callable[[], object]:
    """Make a training step on random images, with the library's precision and optimizer."""
    torch.manual_seed(0)
    machine = choose(device, precision)
    model = vitral.create(name, image_size=size, channels=channels, classes=10).to(machine.device).train()
    optimizer = OptimizerSet(model, Run(optimizer="adamw", lr=1e-4))
    images = torch.randn(batch, channels, size, size, device=machine.device)
    labels = torch.randint(10, (batch,), device=machine.device)

    def step() -> None:
        with machine.autocast():
            logits = model(images)
        F.cross_entropy(logits.float(), labels).backward()
        optimizer.step()

    return step
