"""benchmarks/RESULTS.md, made from the files that `Result.save` wrote."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

from benchmarks import PROGRAMS
from benchmarks.machine import ROOT
from benchmarks.results import FOLDER, Result
from benchmarks.summary import summary

PAGE = ROOT / "benchmarks" / "RESULTS.md"

_HEAD = """# Results

Made by `python -m benchmarks report` from the files in `benchmarks/results/`; do not edit. A figure is the median of n
rounds in which everything in its table took its turn (A B A B), with the least and the greatest; a ratio is one of
medians. `python -m benchmarks NAME` measures anew; what another processor or GPU gave stays beside it. Times of two
machines say nothing of the programs: compare within a table.
"""


def page(folder: Path = FOLDER) -> str:
    """RESULTS.md: the same files give the same page."""
    everything = [Result.read(path) for path in sorted(folder.glob("*/*.json"))]
    parts = [_HEAD, *filter(None, [summary(everything)])]
    for program, title in PROGRAMS.items():
        found = [result for result in everything if result.program == program]
        places = dict.fromkeys(result.place for result in found)
        if found:
            parts.append(f"## {title}\n\n{explanation(program)}\n")
        for place in places:
            parts += [f"### {place}\n"] if len(places) > 1 else []
            parts += [result.markdown() + "\n" for result in found if result.place == place]
    return "\n".join(parts)


def explanation(program: str) -> str:
    """The program's docstring."""
    return inspect.cleandoc(importlib.import_module(f"benchmarks.{program}").__doc__ or "")
