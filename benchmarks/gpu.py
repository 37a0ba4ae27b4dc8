"""The figures that a GPU decides, by one command of at most nine minutes: `python -m benchmarks gpu --device cuda`.

Photographs that are streamed and kept (`streaming`), a step by each strategy of one rank (`scaling`), and CIFAR-10 in
150 seconds (`accuracy cifar10-minutes`, where `cifar10.tar` is under `--data-root`). `python -m benchmarks gpu
tiny-imagenet` is a command of its own: ten minutes from scratch on `tiny-imagenet.tar` under `--data-root`.
"""

from __future__ import annotations

import dataclasses

from benchmarks import accuracy, scaling, streaming
from benchmarks.results import Options, Table

LONG = "tiny-imagenet"


def run(options: Options) -> list[Table]:
    """Measure all parts but the long one, or the long one alone if it is named."""
    if LONG in options.names:
        return accuracy.run(dataclasses.replace(options, names=(LONG,)))
    tables = [*streaming.run(options), *scaling.run(options)]
    if not options.quick and options.data("cifar10.tar"):
        tables += accuracy.run(dataclasses.replace(options, names=("cifar10-minutes",)))
    return [dataclasses.replace(table, name="-".join(filter(None, ("gpu", table.name)))) for table in tables]
