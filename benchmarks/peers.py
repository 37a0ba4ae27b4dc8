"""ViT-S/16 at 224 pixels, 1000 classes, the same random images for all, in alternating rounds: the same as
`vitral bench S/16 --precision bf16 fp32 --engines all`. `python -m benchmarks peers B/16 S/16@384` measures other
networks, or S/16 at other sizes, in vitral's default precision and in smaller batches for larger networks;
`peers compiled` also measures everyone under torch.compile, `peers jpeg` training from files
([definition](../docs/bench.md#what-is-measured)). The beginning of a peer's name (`timm`) leaves out the others.

A training step is forward, cross-entropy, backward and AdamW. vitral uses its own parts: precision from
`vitral.device.choose`, the objective on uint8 images, its parameter groups and optimizer. The others get standardized
floats, fused AdamW, fused attention if they have a switch for it, and `torch.autocast` for bf16. On a CPU the process
keeps freed memory, as our trainer does; the others gain from that too. vit-pytorch's network has no bias in attention
and computes attention explicitly, in the same few products as vitral.

Inference of vitral is `Predictor` from uint8 images to probabilities; the others compute logits from standardized
images, in bf16 both by casting the module and by autocast, of which the faster counts. `vitral` is the default engine
of `Predictor`; other engines stand in brackets. They use the same weights, compiled or packed before the rounds.
Integers are compared with vitral's default; their ranges are those of the random images, so that they show speed only.
"Defaults" is fp32 for the others, their default precision, and the fastest precision of the machine for vitral. A CPU
without instructions for bf16 is measured in fp32 only. The share is relative to the machine's matrix-product rate at
the same precision, measured in the same rounds, with the FLOPs of the network counted once (a multiply-add is two;
a training step is three forward passes); there is no such rate for integers. Memory is the peak of one call above the
memory in use before, which includes weights and optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.results import Options, Table
from vitral.bench import engines
from vitral.bench.measure import Case, measure
from vitral.bench.models import ModelUnderTest, model_under_test, of_config
from vitral.bench.peers import PEERS, chosen
from vitral.bench.report import VITRAL, Row
from vitral.data import load
from vitral.device import choose
from vitral.model import ViTConfig
from vitral.system import keep_freed_memory

QUICK = ViTConfig(image_size=32, patch_size=16, dim=64, depth=1, heads=1, mlp_dim=128)
PRECISIONS = ("bf16", "fp32")
ORDER = (*PRECISIONS, "int8")
USUAL, COMPILED, JPEG = "S/16", "compiled", "jpeg"
PHOTOGRAPHS = "hymenoptera.tar"


def run(options: Options) -> list[Table]:
    """Make for each network a table for the training step, and one for each batch size of inference."""
    if options.device != "cuda":
        keep_freed_memory()  # as our trainer does; it affects the whole process
    some = tuple(name for name in options.names if any(peer.startswith(name) for peer in PEERS))
    models = [name for name in options.names if name not in (*some, COMPILED, JPEG)] or [USUAL]
    requested = [name for name in PEERS if not some or name.startswith(some)]
    return [table for name in models for table in _tables(name, requested, options)]


def _network(name: str, options: Options) -> ModelUnderTest:
    """Resolve `B/16` or, at 384 pixels, `B/16@384`."""
    if options.quick:
        return of_config(name, QUICK)
    model, _, size = name.partition("@")
    return model_under_test(model, int(size) if size else None)


def _tables(name: str, requested: Sequence[str], options: Options) -> Iterator[Table]:
    network = _network(name, options)
    compiled, files = (word in options.names for word in (COMPILED, JPEG))
    path = options.data(PHOTOGRAPHS) if files and not options.quick else None
    photographs = load(str(path)) if path else None
    if files and not photographs:
        return
    peers, left_out = chosen(requested, network.config)
    ours, refused = ([], []) if compiled else engines.chosen(["all"], network, options.device)
    for note in [*left_out, *refused]:
        print(note)
    whole = name == USUAL and not compiled and not files  # the others in fp32 would take hours
    usual = choose(options.device, dim=network.config.dim).precision
    precisions = PRECISIONS if whole and usual == "bf16" else (usual,)
    # each combination is saved to its own file
    parts = {name.replace("/", "-"): name != USUAL, COMPILED: compiled, JPEG: files, "cuda": options.device == "cuda"}
    file = "-".join(part for part, there in parts.items() if there)
    for what, batch in [(JPEG, _large(network, options))] if files else _shapes(network, options):
        case = Case(network, what, batch, options.device, precisions, peers, compiled, photographs, ours)
        rows, notes = measure(
            case, rounds=options.rounds or (1 if options.quick else 9 if case.device == "cuda" else 5)
        )
        for note in notes:
            print(note)
        yield _table(rows, usual, file)


def _shapes(network: ModelUnderTest, options: Options) -> list[tuple[str, int]]:
    """List the tasks with their batch sizes."""
    if options.quick:
        return [("training", 2), ("inference", 2)]
    large = _large(network, options)
    return [("training", large), ("inference", large), ("inference", 1)]


def _large(network: ModelUnderTest, options: Options) -> int:
    """Choose the large batch size: smaller for large networks on a CPU, so that a step takes seconds."""
    if options.device == "cuda":
        return 256 if network.flops < 60e9 else 128
    return 32 if network.flops < 20e9 else 16 if network.flops < 60e9 else 8


def _table(rows: Sequence[Row], usual: str, file: str) -> Table:
    ours = {row.precision: row.sample.median for row in rows if row.who == VITRAL and not row.compiled}
    ready = next((row.rate for row in rows if row.who == f"{VITRAL}, synthetic"), None)
    cells = [
        {
            "name": f"{row.who}, compiled" if row.compiled else row.who,
            "precision": f"{row.precision} ({row.via})" if row.via else row.precision,
            **row.sample.columns(1000),
            "rate": row.rate,
            "share": row.share,
            "first": row.first,
            "same": row.times,
            "memory": None if row.memory is None else row.memory / 2**20,
            "synthetic": row.rate / ready if ready and row.who.startswith(VITRAL) else None,
            "default": row.sample.median / ours[usual] if len(ours) > 1 else None,
        }
        for row in sorted(rows, key=lambda row: ORDER.index(row.precision))
    ]
    columns = {
        "name": "",
        "precision": "precision",
        "n": "n|d",
        "median": "ms|.1f",
        "least": "least|.1f",
        "greatest": "greatest|.1f",
        "rate": "images/s|.1f",
        "share": "of the matrix rate|.0%",
        "memory": "memory, MiB|,.0f",
        "first": "first call, s|.1f",
        "synthetic": "rate : synthetic|.2f",
        "same": "time : ours, same precision|.2f",
        "default": "time : ours, by default|.2f",
    }
    kept = [key for key in columns if any(cell[key] is not None for cell in cells)]
    rates = ", ".join(
        f"{p} {rate / 1e9:,.0f} GFLOP/s" for p, rate in {r.precision: r.matrix_rate for r in rows}.items() if rate
    )
    one, height, width = rows[0], *rows[0].image_size
    what = {"training": "training step", "inference": "inference", JPEG: f"training from {PHOTOGRAPHS}"}[one.what]
    caption = f"{one.model} at {height}×{width}, {what}, batch {one.batch} (matrix products: {rates})"
    return Table(caption, {key: columns[key] for key in kept}, cells, name=file)
