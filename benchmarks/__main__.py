"""`python -m benchmarks [NAME [PART …]] [--quick] [--device cpu|cuda] [--seeds N] [--rounds N] [--keep FOLDER]
[--data-root FOLDER]`, or `report`.

Without a name everything in `benchmarks.USUAL` is measured, which takes some minutes on two cores. Leave the machine
alone meanwhile: the load average before and after is written down with the figures.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import PROGRAMS, SEEDS, USUAL
from benchmarks.machine import commit
from benchmarks.page import PAGE, page
from benchmarks.results import Options, Result
from vitral.bench import machine as machine_of


def measure(program: str, options: Options) -> Result:
    """Run one program and put what it found together with where."""
    before = machine_of.load_average()
    tables = importlib.import_module(f"benchmarks.{program}").run(options)
    return Result(
        program=program, command=options.command, machine=machine_of.describe(options.device),
        load_average=(before, machine_of.load_average()), commit=commit(), date=machine_of.today(),
        versions=machine_of.versions(), tables=tables,
    )  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, keep, and bring RESULTS.md up to date."""
    asked = _parse(words)
    if asked.program == "report":
        PAGE.write_text(page(), "utf-8")
        return 0
    for program in [asked.program] if asked.program else USUAL:
        print(f"## {PROGRAMS[program]}", flush=True)
        seeds = asked.seeds or (1 if asked.quick else SEEDS.get(program, 1))
        options = Options(
            _command(program, asked), tuple(asked.parts), asked.quick, asked.device, seeds, asked.rounds,
            asked.data_root, asked.keep,
        )  # fmt: skip
        result = measure(program, options)
        for table in result.tables:
            print(f"\n{table.caption}\n{table.markdown()}")
        if result.tables and not asked.quick:
            result.save()
            PAGE.write_text(page(), "utf-8")
        print(flush=True)
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    import torch

    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    parser.add_argument("program", nargs="?", choices=[*PROGRAMS, "report"])
    parser.add_argument("parts", nargs="*", help="what of it: `accuracy mnist cifar10`, `peers B/16 timm`")
    parser.add_argument("--quick", action="store_true", help="tiny: shows that it works; nothing is kept")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, help="repeat whole runs with seeds 0 … N-1")
    parser.add_argument("--rounds", type=int, help="how often everything takes its turn (peers)")
    parser.add_argument("--data-root", type=Path, default=Options("").data_root, help="folder of the real data")
    parser.add_argument("--keep", type=Path, help="keep whole runs in this folder, and go on from what is there")
    return parser.parse_args(words)


def _command(program: str, asked: argparse.Namespace) -> str:
    """What to type for the same figures; where the data lie is left to the reader."""
    threads = os.environ.get("OMP_NUM_THREADS")
    words = [f"OMP_NUM_THREADS={threads}"] if threads else []
    words += ["python -m benchmarks", program, *asked.parts]
    words += [f"--seeds {asked.seeds}"] if asked.seeds else []
    words += [f"--rounds {asked.rounds}"] if asked.rounds else []
    words += ["--device cuda"] if asked.device == "cuda" else []
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
