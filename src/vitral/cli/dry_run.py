"""`vitral train --dry-run`: an estimate of a run on GPUs that are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vitral.cli.options import Option
from vitral.cli.output import print_json, print_text
from vitral.console import duration, stdout, table
from vitral.distributed.environment import launched
from vitral.errors import UsageError

if TYPE_CHECKING:
    from vitral.workflows.dry_run import Estimate

DRY_RUN = Option("dry_run", bool, "train nothing: estimate memory, traffic, time and cost on other GPUs", False)

_CLUSTER = (
    Option("world", int, "dry run: number of GPUs", 8),
    Option("gpu", str, "dry run: a100, h100, h200 or b200", "h200"),
    Option("per_machine", int, "dry run: GPUs of a machine", 8),
    Option("price", float, "dry run: price of a GPU for an hour", None),
    Option("assume", tuple[int, int], "dry run: numbers of images and classes, instead of DATA", None),
)
OPTIONS = (DRY_RUN, *_CLUSTER)


def take(given: dict[str, Any]) -> dict[str, Any] | None:
    """Remove the options of a dry run from `given`; return them, or None for a run that trains.

    Raises `UsageError` for options of a dry run without it.
    """
    wanted = given.pop(DRY_RUN.name, False)
    values = {option.name: given.pop(option.name) for option in _CLUSTER if option.name in given}
    if not wanted and values:
        name = next(option.title for option in _CLUSTER if option.name in values)
        raise UsageError(f"{name} goes with --dry-run", hint="--dry-run, or leave it out")
    if wanted and launched():
        raise UsageError(
            "a dry run is one process", why="it simulates the ranks", hint="leave out --nproc, or torchrun"
        )
    if wanted and values.get("assume") and given.get("data"):
        raise UsageError("--assume replaces DATA", hint="leave one out")
    return values if wanted else None


def print_estimate(given: dict[str, Any], values: dict[str, Any], format: str) -> int:
    """Estimate the run of the options `given` on the cluster of `values`, and print it."""
    from vitral.workflows.dry_run import Cluster, estimate

    for name in ("resume", "overwrite", "quiet"):
        given.pop(name, None)
    assumed = values.pop("assume", None)
    cluster = Cluster.of(values.pop("gpu", "h200"), values.pop("world", 8), **values)
    found = estimate(cluster, {name: value for name, value in given.items() if value is not None}, assumed)
    if format == "json":
        print_json(found.to_json())
    else:
        _print(found)
    return 0


def _print(found: Estimate) -> None:
    cluster, run = found.cluster, found.run
    machines = cluster.world // cluster.per_machine
    print_text(
        f"Estimated, not measured: {run.model} on {cluster.world:,} × {cluster.gpu.name} "
        f"({machines:,} × {cluster.per_machine}), {run.strategy}, {run.precision}"
    )
    rows = table(header=False)
    for name, value in _rows(found):
        rows.add_row(name, value)
    stdout().print(rows)
    print_text("Assumptions")
    rows = table()
    for column in ("assumption", "value", "source"):
        rows.add_column(column, overflow="fold")
    for row in found.assumptions:
        rows.add_row(*row)
    stdout().print(rows)


def _rows(found: Estimate) -> list[tuple[str, str]]:
    memory, seconds, run = found.memory, found.seconds, found.run
    inside, between = found.traffic
    share = memory.total / found.cluster.gpu.memory
    rows = [
        ("parameters", f"{found.parameters:,}"),
        ("batch", f"{run.step_batch:,} images a step, in {run.accumulate} × {run.batch_size:,}"),
        ("memory a GPU", f"{_bytes(memory.total)}, {share:.0%} of it"),
        ("  parameters", _bytes(memory.parameters)),
        ("  gradients", _bytes(memory.gradients)),
        ("  optimizer", _bytes(memory.optimizer)),
        ("  averaged weights", _bytes(memory.averaged)),
        ("  gathered blocks", _bytes(memory.gathered)),
        ("  activations", _bytes(memory.activations)),
        ("sent by a GPU", f"in a step; as much is received (collectives: {len(found.collectives)})"),
        ("  within its machine", _bytes(inside)),
        ("  between machines", _bytes(between)),
        ("a step", _milliseconds(seconds.step)),
        ("  compute", _milliseconds(seconds.compute)),
        ("  communication", f"{_milliseconds(seconds.communication)}, not hidden {_milliseconds(seconds.exposed)}"),
        ("  input", f"{_milliseconds(seconds.input)} to decode, beside the rest"),
        ("efficiency", f"{found.efficiency:.1%} of a step computes; {found.images_per_second:,.0f} images/s"),
        ("run", f"{run.epochs:,} epochs, {found.steps:,} steps: {duration(3600 * found.hours)}"),
    ]  # fmt: skip
    if found.cost is not None:
        rows.append(("cost", f"{found.cost:,.2f} at {found.cluster.price:g} a GPU and hour"))
    if not found.fits:
        rows.append(("", "does not fit: more GPUs, --checkpointing, --accumulate or --strategy fsdp"))
    return rows


def _bytes(count: float) -> str:
    return f"{count / 1e9:,.2f} GB" if count >= 1e7 else f"{count / 1e6:,.2f} MB"


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.3g} ms" if seconds < 1 else f"{seconds:,.3g} s"
