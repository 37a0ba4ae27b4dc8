"""Write the pages of results from the files of `Result.save`: RESULTS.md as a summary, and one page per machine."""

from __future__ import annotations

import importlib
import inspect
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks import PROGRAMS
from benchmarks.machine import ROOT
from benchmarks.results import FOLDER, Result
from benchmarks.summary import headlines, summary

PAGE = ROOT / "benchmarks" / "RESULTS.md"
WITHDRAWN = "withdrawn.json"
"""File in the folder of results: machine → caveat on its figures, such as code that changed since."""

_HEAD = """# Results

Made by `python -m benchmarks report` from the files in `benchmarks/results/`; do not edit. A figure is the median of n
alternating rounds (A B A B) of all contenders in its table; a ratio is a ratio of medians. Times on two machines cannot
be compared: compare within a table. `python -m benchmarks NAME` measures again.
"""


def pages(folder: Path = FOLDER) -> dict[Path, str]:
    """Build path, relative to `benchmarks/`, and text of each page; the same files give the same pages."""
    everything = [Result.read(path) for path in sorted(folder.glob("*/*.json"))]
    marks = _marks(folder)
    found = {Path(PAGE.name): "\n".join([_HEAD, *filter(None, [headlines(everything, marks)]), _index(everything)])}
    for place in _places(everything):
        own = [one for one in everything if one.place == place]
        found[Path(folder.name, own[0].folder, "README.md")] = _machine(place, own, marks.get(place))
    return found


def write(folder: Path = FOLDER, target: Path = PAGE.parent) -> None:
    """Write all pages below `target`."""
    for path, text in pages(folder).items():
        (target / path).write_text(text, "utf-8")


def _marks(folder: Path) -> dict[str, str]:
    file = folder / WITHDRAWN
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def _places(everything: Sequence[Result]) -> list[str]:
    """List machines, the most recently measured first."""
    last = {place: max(one.date for one in everything if one.place == place) for place in {r.place for r in everything}}
    return sorted(last, key=lambda place: (last[place], place), reverse=True)


def _index(everything: Sequence[Result]) -> str:
    """Make a line for each machine: its page, dates and programs."""
    lines = ["## All figures", "", "| machine | measured | programs |", "| --- | --- | --- |"]
    for place in _places(everything):
        own = [one for one in everything if one.place == place]
        dates = sorted(one.date for one in own)
        when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        programs = ", ".join(name for name in PROGRAMS if any(one.program == name for one in own))
        lines.append(f"| [{place}](results/{own[0].folder}/README.md) | {when} | {programs} |")
    return "\n".join(lines) + "\n" if everything else ""


def _machine(place: str, results: Sequence[Result], mark: str | None) -> str:
    """Make the page of one machine, in the order of the programs."""
    parts = [f"# {place}\n", "[All machines](../../RESULTS.md). Made by `python -m benchmarks report`; do not edit.\n"]
    parts += [f"**{mark}**\n"] if mark else []
    parts += filter(None, [summary(results)])
    for program, title in PROGRAMS.items():
        found = [result for result in results if result.program == program]
        if found:
            parts.append(f"## {title}\n\n{explanation(program)}\n")
            parts += [result.markdown() + "\n" for result in found]
    return "\n".join(parts)


def explanation(program: str) -> str:
    """Return the program's docstring, with its links adapted to the page."""
    text = inspect.cleandoc(importlib.import_module(f"benchmarks.{program}").__doc__ or "")
    return text.replace("](../", "](../../../")  # its links are relative to benchmarks/
