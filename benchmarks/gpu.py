"""The figures that a GPU decides, by one command of at most nine minutes: `python -m benchmarks gpu --device cuda`.

Photographs that are streamed and kept (`streaming`), a step by each strategy of one rank (`scaling`), and CIFAR-10 in
150 seconds (`accuracy cifar10-minutes`, where `cifar10.tar` is under `--data-root`). `python -m benchmarks gpu
tiny-imagenet` is a command of its own: ten minutes from scratch on `tiny-imagenet.tar` under `--data-root`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from types import ModuleType

from benchmarks import accuracy, scaling, streaming
from benchmarks.results import Options, Table

LONG = "tiny-imagenet"


def run(options: Options) -> Iterator[Table]:
    """Measure all parts but the long one, or the long one alone if it is named; each table as soon as it is there."""
    parts: dict[str, tuple[ModuleType, tuple[str, ...]]] = {"streaming": (streaming, ()), "scaling": (scaling, ())}
    if LONG in options.names:
        parts = {LONG: (accuracy, (LONG,))}
    elif not options.quick and options.data("cifar10.tar"):
        parts["cifar10"] = accuracy, ("cifar10-minutes",)
    for part, (program, names) in parts.items():
        started = time.perf_counter()
        for table in program.run(dataclasses.replace(options, names=names)):
            yield dataclasses.replace(table, name="-".join(filter(None, ("gpu", table.name))))
        print(f"\n{part} took {time.perf_counter() - started:.0f} s", flush=True)
