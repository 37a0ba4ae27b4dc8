"""ViT-S/16 at 224 pixels, 1000 classes, the same random pictures for all, everything in turn: the
same as `vitral bench S/16 --precision bf16 fp32`.

A training step is forward, cross-entropy, backward and AdamW. Ours goes through the library's own parts: precision
from `vitral.device.choose`, the objective on uint8 pictures, its parameter groups and optimizer. The others get
standardised floats, fused AdamW, their fused attention where they have a switch for it, and `torch.autocast` for bf16.
On a CPU the process keeps freed memory, as our trainer has it; the others gain from that too. vit-pytorch's network has
no bias in attention and computes attention explicitly, in the same few products as ours.

Inference of ours is `Predictor` from uint8 pictures to probabilities; the others compute logits from standardised
pictures, in bf16 both by casting the module and by autocast, of which the faster counts. "Defaults" is fp32 for the
others, which is what they compute in when nothing is said, and what the machine can do best for ours. The share is
that of the machine's own matrix-product rate at the same precision, measured in the same rounds, with the operations
of the network counted once (a multiply-add is two; a training step is three forward passes).
"""

from __future__ import annotations

from collections.abc import Sequence

import vitral
from benchmarks.results import Options, Table
from vitral.bench.measure import Case, measure
from vitral.bench.peers import PEERS, chosen
from vitral.bench.report import OURS, Row
from vitral.bench.subject import of_config
from vitral.device import choose, keep_freed_memory
from vitral.model import ViTConfig

QUICK = ViTConfig(image_size=32, patch_size=16, dim=64, depth=1, heads=1, mlp_dim=128)
PRECISIONS = ("bf16", "fp32")


def run(options: Options) -> list[Table]:
    """A table for the training step, and one for each batch size of inference."""
    if options.device != "cuda":
        keep_freed_memory()  # as our trainer does; it holds for the whole process
    network = of_config("S/16", QUICK if options.quick else vitral.create("S/16").config)
    asked = [name for name in PEERS if not options.names or name.startswith(options.names)]
    peers, notes = chosen(asked, network.config)
    for note in notes:
        print(note)
    tables = []
    for what, batch in _shapes(options):
        case = Case(network, what, batch, options.device, PRECISIONS, peers)
        rows, notes = measure(case, rounds=1 if options.quick else 9 if options.device == "cuda" else 5)
        for note in notes:
            print(note)
        tables.append(_table(rows, options))
    return tables


def _shapes(options: Options) -> list[tuple[str, int]]:
    """What is measured, and with how many pictures."""
    if options.quick:
        return [("training", 2), ("inference", 2)]
    large = 256 if options.device == "cuda" else 32
    return [("training", large), ("inference", large), ("inference", 1)]


def _table(rows: Sequence[Row], options: Options) -> Table:
    ours = {row.precision: row.sample.median for row in rows if row.who == OURS}
    default = ours[choose(options.device).precision]
    cells = [
        {
            "name": row.who, "precision": f"{row.precision} ({row.via})" if row.via else row.precision,
            **row.sample.columns(1000), "rate": row.rate, "share": row.share, "same": row.times,
            "default": row.sample.median / default,
        }
        for row in sorted(rows, key=lambda row: PRECISIONS.index(row.precision))
    ]  # fmt: skip
    columns = {
        "name": "", "precision": "precision", "n": "n|d", "median": "ms|.1f", "least": "least|.1f",
        "greatest": "greatest|.1f", "rate": "pictures/s|.1f", "share": "of the matrix rate|.0%",
        "same": "time : ours, same precision|.2f", "default": "time : ours, by default|.2f",
    }  # fmt: skip
    rates = ", ".join(
        f"{p} {rate / 1e9:,.0f} GFLOP/s" for p, rate in {r.precision: r.matrix_rate for r in rows}.items()
    )
    what = {"training": "Training step", "inference": "Inference"}[rows[0].what]
    name = "cuda" if options.device == "cuda" else ""
    return Table(f"{what}, batch {rows[0].batch} (matrix products: {rates})", columns, cells, name=name)
