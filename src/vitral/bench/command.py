"""`vitral bench`: check all options before the first measurement, then measure case by case."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from vitral.bench import engines, machine, peers
from vitral.bench.measure import WHAT, Case, measure
from vitral.bench.models import model_under_test
from vitral.bench.report import VITRAL, Report, Row
from vitral.data import load as load_data
from vitral.device import choose
from vitral.errors import UsageError, check_positive, unknown
from vitral.system import keep_freed_memory

BATCHES = {"inference": (1, 32), "training": (32,), "jpeg": (32,)}
"""Default batch sizes."""
GPU_BATCH = 256
"""Default batch size of training on a GPU."""

_SETTINGS = {
    "inference": "Predictor, from uint8 images to probabilities",
    "training": "its objective on uint8 images, its parameter groups, fused AdamW",
    "jpeg": "its batches, every file read in every pass; kept: decoded once, as it does if the set fits in memory",
}


@dataclass(frozen=True)
class BenchOptions:
    """Options of a benchmark; empty means the default."""

    models: Sequence[str] = ("S/16",)
    what: Sequence[str] = ("inference", "training")
    image_sizes: Sequence[int] = ()
    batches: Sequence[int] = ()
    precisions: Sequence[str] = ("auto",)
    device: str = "auto"
    peers: Sequence[str] = ("all",)
    engines: Sequence[str] = (engines.DEFAULT,)
    compile: bool = False
    rounds: int = 5
    data: str | None = None
    data_root: str = "data"

    def check(self) -> None:
        """Raise `UsageError` for options that contradict each other or are out of range."""
        if bad := [what for what in self.what if what not in WHAT]:
            raise unknown("thing to measure", bad[0], WHAT)
        if not self.models or not self.what:
            raise UsageError("nothing to measure", hint="vitral bench S/16 --what inference")
        check_positive(
            batch=(min(self.batches, default=1), 32),
            image_size=(min(self.image_sizes, default=1), 224),
            rounds=(self.rounds, 5),
        )
        if "jpeg" in self.what and not self.data:
            raise UsageError("--what jpeg needs image files", why="no --data is given", hint="--data photos/")
        if self.data and "jpeg" not in self.what:
            raise UsageError("--data applies to --what jpeg only", hint="--what jpeg")
        if set(self.engines) - {engines.DEFAULT} and "inference" not in self.what:
            raise UsageError("--engines apply to inference only", hint="--what inference")


Progress = Callable[[str, int, int], None]


def bench(options: BenchOptions, progress: Progress = lambda what, done, total: None) -> Report:
    """Run a benchmark.

    `progress` is called with the current case, the steps done and their total. Raises `UsageError` for an unknown name
    or device, a batch that does not fit into memory, and contradictory options.
    """
    options.check()
    before = machine.load_average()
    cases, notes = _cases(options)
    if choose(options.device).device.type == "cpu":
        keep_freed_memory()  # as our trainer does; it affects the whole process, so the peers gain from it too
    return run_cases(cases, options.rounds, notes, before, progress)


def run_cases(
    cases: Sequence[Case], rounds: int, notes: Sequence[str], before: float | None, progress: Progress
) -> Report:
    """Measure the cases one after the other."""
    rows: list[Row] = []
    collected = list(notes)
    for case in cases:
        measured, more = measure(case, rounds, progress)
        rows += measured
        collected += more
    return Report(
        rows=rows,
        machine=machine.describe(cases[0].device),
        threads=torch.get_num_threads(),
        load_average=(before, machine.load_average()),
        date=machine.today(),
        versions=machine.versions(),
        settings=_settings(cases),
        notes=tuple(dict.fromkeys(collected)),
    )


def _cases(options: BenchOptions) -> tuple[list[Case], list[str]]:
    """Build all cases before the first measurement, with notes on what is left out."""
    place = choose(options.device).device
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)  # from here on a device is only its type
    device = place.type
    dataset = load_data(options.data, root=options.data_root) if options.data else None
    cases: list[Case] = []
    notes: list[str] = []
    for model, size in itertools.product(options.models, options.image_sizes or (None,)):
        found = model_under_test(model, size)
        some, left_out = peers.chosen(options.peers, found.config)
        more, refused = engines.chosen(options.engines, found, device)
        notes += left_out + refused
        precisions = tuple(
            dict.fromkeys(choose(device, p, found.config.dim).precision for p in options.precisions or ("auto",))
        )
        cases += [
            Case(
                found, what, batch, device, precisions, some, options.compile, dataset if what == "jpeg" else None, more
            )
            for what in options.what
            for batch in dict.fromkeys(options.batches or _batches(what, device))
        ]
    return cases, notes


def _batches(what: str, device: str) -> tuple[int, ...]:
    return (GPU_BATCH,) if device == "cuda" and what != "inference" else BATCHES[what]


def _settings(cases: Sequence[Case]) -> dict[str, str]:
    """Describe how each contender was built and called; the machine is described elsewhere."""
    whats = dict.fromkeys(case.what for case in cases)
    found = {VITRAL: "; ".join(f"{what}: {_SETTINGS[what]}" for what in whats)}
    for name in dict.fromkeys(name for case in cases for name in case.engines):
        found[f"{VITRAL} ({name})"] = engines.ENGINES[name].settings
    known = {name: peer for case in cases for name, peer in case.peers.items()}
    if known:
        found["every peer"] = "; ".join(peers.SETTINGS[what] for what in whats)
    if any(case.compile for case in cases):
        found["compiled"] = (
            "torch.compile(dynamic=False), its default mode; in inference with frozen weights, and the networks alone, "
            "vitral called as the peers are; in training vitral with its loss, as `vitral train --compile`"
        )
    return found | {name: peer.settings for name, peer in known.items()}
