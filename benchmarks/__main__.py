"""`python -m benchmarks [NAME [PART …]] [--quick] [--device cpu|cuda] [--seeds N] [--rounds N] [--keep FOLDER]
[--data-root FOLDER]`, or `report`.

Without a name everything in `benchmarks.USUAL` is measured, which takes some minutes on two cores. Keep the machine
idle otherwise: the load average before and after is recorded with the figures.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import PROGRAMS, SEEDS, USUAL, page
from benchmarks.machine import commit
from benchmarks.results import Options, Result
from vitral.bench import machine as machine_of


def measure(program: str, options: Options) -> Result:
    """Run one program, print each table as it is measured, and return all with a description of the machine."""
    before, tables = machine_of.load_average(), []
    for table in importlib.import_module(f"benchmarks.{program}").run(options):
        print(f"\n{table.caption}\n{table.markdown()}", flush=True)
        tables.append(table)
    return Result(
        program=program,
        command=options.command,
        machine=machine_of.describe(options.device),
        load_average=(before, machine_of.load_average()),
        commit=commit(),
        date=machine_of.today(),
        versions=machine_of.versions(),
        tables=tables,
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, save, and update RESULTS.md."""
    args = _parse(words)
    if args.program == "report":
        page.write()
        return 0
    for program in [args.program] if args.program else USUAL:
        print(f"## {PROGRAMS[program]}", flush=True)
        seeds = args.seeds or (1 if args.quick else SEEDS.get(program, 1))
        options = Options(
            _command(program, args),
            tuple(args.parts),
            args.quick,
            args.device,
            seeds,
            args.rounds,
            args.data_root,
            args.keep,
        )
        result = measure(program, options)
        if result.tables and not args.quick:
            result.save()
            page.write()
        print(flush=True)
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("program", nargs="?", choices=[*PROGRAMS, "report"])
    parser.add_argument("parts", nargs="*", help="parts of the program: `accuracy mnist cifar10`, `peers B/16 timm`")
    parser.add_argument("--quick", action="store_true", help="tiny smoke test; nothing is saved")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, help="repeat whole runs with seeds 0 … N-1")
    parser.add_argument("--rounds", type=int, help="alternating rounds (peers)")
    parser.add_argument("--data-root", type=Path, default=Options("").data_root, help="folder of the real data")
    parser.add_argument("--keep", type=Path, help="keep whole runs in this folder, and resume those that are there")
    return parser.parse_args(words)


def _command(program: str, args: argparse.Namespace) -> str:
    """Format the command that repeats the measurement, without the location of the data."""
    threads = os.environ.get("OMP_NUM_THREADS")
    words = [f"OMP_NUM_THREADS={threads}"] if threads else []
    words += ["python -m benchmarks", program, *args.parts]
    words += [f"--seeds {args.seeds}"] if args.seeds else []
    words += [f"--rounds {args.rounds}"] if args.rounds else []
    words += ["--device cuda"] if args.device == "cuda" else []
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
