"""The whole of `vitral bench`: what was asked, checked before anything is measured, then measured case by case."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from vitral.bench import engines, machine, peers
from vitral.bench.measure import WHAT, Case, measure
from vitral.bench.report import OURS, Report, Row
from vitral.bench.subject import Subject, subject
from vitral.data import load as load_data
from vitral.device import choose, keep_freed_memory
from vitral.errors import UsageError, unknown

BATCHES = {"inference": (1, 32), "training": (32,), "jpeg": (32,)}
"""Batch sizes where none are given."""
GPU_BATCH = 256
"""On a GPU of what trains."""

_OURS = {
    "inference": "Predictor, from uint8 pictures to probabilities",
    "training": "its objective on uint8 pictures, its parameter groups, fused AdamW",
    "jpeg": "its batches, every file read in every pass; kept: decoded once, as it does where the set fits",
}


@dataclass(frozen=True)
class Asked:
    """What to measure; empty is the default of each."""

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
        """Raise `UsageError` for what makes no sense by itself."""
        if bad := [what for what in self.what if what not in WHAT]:
            raise unknown("thing to measure", bad[0], WHAT)
        if not self.models or not self.what:
            raise UsageError("nothing to measure", hint="vitral bench S/16 --what inference")
        for flag, values in (
            ("--batch", self.batches),
            ("--image-size", self.image_sizes),
            ("--rounds", [self.rounds]),
        ):
            if bad_number := [value for value in values if value < 1]:
                raise UsageError(f"{flag} must be at least 1, not {bad_number[0]}")
        if "jpeg" in self.what and not self.data:
            raise UsageError("--what jpeg trains from picture files", why="none are named", hint="--data photos/")
        if self.data and "jpeg" not in self.what:
            raise UsageError("--data is what --what jpeg trains from", hint="--what jpeg")
        if set(self.engines) - {engines.DEFAULT} and "inference" not in self.what:
            raise UsageError("--engines are what computes in inference", hint="--what inference")


Progress = Callable[[str, int, int], None]


def bench(asked: Asked, progress: Progress = lambda what, done, total: None) -> Report:
    """Measure everything that was asked for.

    `progress` is called with what is being measured, how much of it is done, and how much there is. Raises
    `UsageError` for an unknown name or device, a batch that does not fit into memory, and what makes no sense.
    """
    asked.check()
    before = machine.load_average()
    cases, notes = _cases(asked)
    if choose(asked.device).device.type == "cpu":
        keep_freed_memory()  # as our trainer does; it holds for the whole process, so the peers gain from it too
    return carry_out(cases, asked.rounds, notes, before, progress)


def carry_out(
    cases: Sequence[Case], rounds: int, notes: Sequence[str], before: float | None, progress: Progress
) -> Report:
    """Measure the cases one after the other."""
    rows: list[Row] = []
    told = list(notes)
    for case in cases:
        found, more = measure(case, rounds, progress)
        rows += found
        told += more
    return Report(
        rows=rows, machine=machine.describe(cases[0].device), threads=torch.get_num_threads(),
        load_average=(before, machine.load_average()), date=machine.today(), versions=machine.versions(),
        settings=_settings(cases), notes=tuple(dict.fromkeys(told)),
    )  # fmt: skip


def _cases(asked: Asked) -> tuple[list[Case], list[str]]:
    """Everything named is looked up before the first measurement; what is left out is said in the notes."""
    place = choose(asked.device).device
    if place.type == "cuda" and place.index is not None:
        torch.cuda.set_device(place)  # from here on a device is no more than its kind
    device = place.type
    dataset = load_data(asked.data, root=asked.data_root) if asked.data else None
    cases: list[Case] = []
    notes: list[str] = []
    for found in _subjects(asked):
        some, left_out = peers.chosen(asked.peers, found.config)
        ours, refused = engines.chosen(asked.engines, found, device)
        notes += left_out + refused
        precisions = tuple(
            dict.fromkeys(choose(device, p, found.config.dim).precision for p in asked.precisions or ("auto",))
        )
        cases += [
            Case(found, what, batch, device, precisions, some, asked.compile, dataset if what == "jpeg" else None, ours)
            for what in asked.what
            for batch in dict.fromkeys(asked.batches or _batches(what, device))
        ]
    return cases, notes


def _subjects(asked: Asked) -> Iterator[Subject]:
    for model in asked.models:
        for size in asked.image_sizes or (None,):
            yield subject(model, size)


def _batches(what: str, device: str) -> tuple[int, ...]:
    return (GPU_BATCH,) if device == "cuda" and what != "inference" else BATCHES[what]


def _settings(cases: Sequence[Case]) -> dict[str, str]:
    """How each was built and called; the machine's part of it is told elsewhere."""
    whats = dict.fromkeys(case.what for case in cases)
    found = {OURS: "; ".join(f"{what}: {_OURS[what]}" for what in whats)}
    for name in dict.fromkeys(name for case in cases for name in case.engines):
        found[f"{OURS} ({name})"] = engines.ENGINES[name].settings
    known = {name: peer for case in cases for name, peer in case.peers.items()}
    if known:
        found["every peer"] = "; ".join(peers.SETTINGS[what] for what in whats)
    if any(case.compile for case in cases):
        found["compiled"] = (
            "torch.compile(dynamic=False), its default mode; in inference with frozen weights, and the networks alone, "
            "ours called as theirs are; in training ours with its loss, as `vitral train --compile` does"
        )
    return found | {name: peer.settings for name, peer in known.items()}
