"""What RESULTS.md begins with: how many times as fast as the fastest of the others, and whole runs, a line each. All of
it follows from the tables below, none of it is measured here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vitral.bench.report import OURS

if TYPE_CHECKING:
    from benchmarks.results import Result

Row = Mapping[str, Any]

_SUBJECT = re.compile(
    r"(?P<network>\S+) at (?P<size>\d+)×\d+, (?P<what>training step|inference), batch (?P<batch>\d+) "
)
_SECONDS = re.compile(r", ([\d,.]+) s, ")
LIBRARIES = ("timm", "transformers", "torchvision", "vit-pytorch")
ENOUGH = {"test": 0, "val": 1}  # which pictures tell of a run: test, or where there are none those of validation


@dataclass(frozen=True)
class Contest:
    """One network doing one thing on one machine, in all runs in which it was measured there."""

    place: str
    network: str  # "S/16", at other sizes than 224 "S/16 at 384"
    training: bool
    batch: int
    runs: Sequence[Sequence[Row]]  # of each run its rows
    commits: Sequence[str]  # of each run

    @property
    def usual(self) -> str:
        """The precision that ours takes by itself: the first that is told."""
        return _precision(self.runs[0][0])

    @property
    def others(self) -> str:
        """The libraries beside which it was measured, "all four" or by name."""
        names = {row["name"] for rows in self.runs for row in rows if not row["name"].startswith(OURS)}
        found = [library for library in LIBRARIES if any(name.startswith(library) for name in names)]
        return "all four" if len(found) == len(LIBRARIES) else ", ".join(found)

    def rates(self) -> list[float]:
        """Pictures a second of ours, compiled where that is faster, run by run."""
        return [_rate(_ours(rows, self.usual, compiled=True)) for rows in self.runs]

    def shares(self) -> list[float]:
        """Of the machine's matrix rate, ours, likewise."""
        return [max(row["share"] for row in _ours(rows, self.usual, compiled=True)) for rows in self.runs]

    def times(self, *, precision: str = "", compiled: bool = False) -> list[float]:
        """Our rate over the greatest of the others', eager ones or compiled ones, run by run, of the runs that have
        such; at the usual precision or another. Beside compiled ones ours is compiled, too, where that is faster.
        """
        wanted = precision or self.usual
        pairs = [(_ours(rows, wanted, compiled), _others(rows, wanted, compiled)) for rows in self.runs]
        return [_rate(ours) / _rate(others) for ours, others in pairs if ours and others]

    def times_in_integers(self) -> list[float]:
        """Our rate in integers, by the fastest engine, over the greatest of the eager others'."""
        pairs = [
            ([row for row in rows if row["precision"] == "int8"], _others(rows, self.usual, False))
            for rows in self.runs
        ]
        return [_rate(ours) / _rate(others) for ours, others in pairs if ours and others]

    def times_defaults(self) -> list[float]:
        """Our rate over the greatest of the eager others' in fp32, which is what they compute in when nothing is
        said; none where that is our own choice, too.
        """
        if self.usual == "fp32":
            return []
        pairs = [(_ours(rows, self.usual), _others(rows, "fp32", False)) for rows in self.runs]
        return [_rate(ours) / _rate(others) for ours, others in pairs if others]


def _precision(row: Row) -> str:
    """ "bf16" of "bf16 (cast)"."""
    return str(row["precision"]).split()[0]


def _rate(rows: Sequence[Row]) -> float:
    return max(row["rate"] for row in rows)


def _ours(rows: Sequence[Row], precision: str, compiled: bool = False) -> list[Row]:
    """Ours by its own choice of engine, and compiled."""
    names = [OURS, *[f"{OURS}, compiled"] * compiled]
    return [row for row in rows if row["name"] in names and _precision(row) == precision]


def _others(rows: Sequence[Row], precision: str, compiled: bool) -> list[Row]:
    theirs = (row for row in rows if not row["name"].startswith(OURS) and _precision(row) == precision)
    return [row for row in theirs if row["name"].endswith(", compiled") == compiled]


def contests(results: Sequence[Result]) -> list[Contest]:
    """Everything that was measured beside others, in the order of the report."""
    runs: dict[tuple[str, str, bool, int], list[tuple[Sequence[Row], str]]] = {}
    for result in results:
        for table in result.tables if result.program == "peers" else ():
            if found := _SUBJECT.match(table.caption):
                network, size, what, batch = found.groups()
                named = network if size == "224" else f"{network} at {size}"
                key = (result.place, named, what != "inference", int(batch))
                runs.setdefault(key, []).append((table.rows, result.commit[:7]))
    ordered = sorted(runs.items(), key=lambda item: _order(*item[0]))
    return [Contest(*key, *zip(*found, strict=True)) for key, found in ordered]


def _order(place: str, network: str, training: bool, batch: int) -> tuple[Any, ...]:
    sizes = ["Ti", "S", "B", "L", "H"]
    size = network.partition("/")[0]
    return place, sizes.index(size) if size in sizes else len(sizes), network, not training, -batch


def summary(results: Sequence[Result]) -> str:
    """The section as Markdown; empty where nothing of it was measured."""
    found = contests(results)
    parts = [*_training([one for one in found if one.training]), *_inference([o for o in found if not o.training])]
    parts += _whole(results)
    return "\n\n".join(["## In short", _HEAD.strip(), *parts]) + "\n" if parts else ""


_HEAD = """What follows from the tables below: pictures a second of vitral, compiled where that is faster, and how many
times as many pictures it gets through as the fastest of the others in the same run ("all four" are timm, transformers,
torchvision and vit-pytorch): eager at the precision that ours takes by itself, eager in fp32, and compiled (ours, too,
where that is faster). Ours in integers stands beside eager ones, and in training ours beside their default, which is
fp32. Two figures are the least and the greatest of several runs. What a machine gave that is not at hand any more
stays, by the code of its commit: kernels of our own for a processor are younger than all figures of processors but
those of family 25, model 17.
"""


def _training(found: Sequence[Contest]) -> Iterator[str]:
    headings = [
        "machine", "network", "others", "batch", "precision", "pictures/s", "of the matrix rate", "× eager",
        "× eager, fp32", "× compiled", "× their defaults", "commit",
    ]  # fmt: skip
    rows = [
        [
            *_subject(one), _span(one.shares(), ".0%"), *_beside(one), _span(one.times_defaults()),
            ", ".join(dict.fromkeys(one.commits)),
        ]
        for one in found
    ]  # fmt: skip
    if rows:
        yield f"**A training step**\n\n{_markdown(headings, rows, left=3)}"


def _inference(found: Sequence[Contest]) -> Iterator[str]:
    headings = [
        "machine", "network", "others", "batch", "precision", "pictures/s", "× eager", "× eager, fp32", "× compiled",
        "integers × eager", "commit",
    ]  # fmt: skip
    rows = [
        [*_subject(one), *_beside(one), _span(one.times_in_integers()), ", ".join(dict.fromkeys(one.commits))]
        for one in found
    ]
    if rows:
        yield f"**Inference**\n\n{_markdown(headings, rows, left=3)}"


def _subject(one: Contest) -> list[str]:
    return [one.place, one.network, one.others, str(one.batch), one.usual, _span(one.rates(), ",.1f")]


def _beside(one: Contest) -> list[str]:
    return [_span(one.times()), _span(one.times(precision="fp32")), _span(one.times(compiled=True))]


def _whole(results: Sequence[Result]) -> Iterator[str]:
    """Runs from a command to an accuracy."""
    rows = []
    for result in results:
        for table in result.tables if result.program == "accuracy" else ():
            told = [row for row in table.rows if row.get("what") in ENOUGH]
            if told and (command := re.match(r"`[^`]+`", table.caption)):
                row = min(told, key=lambda row: ENOUGH[row["what"]])
                seconds = _SECONDS.search(table.caption)
                rows.append([
                    command[0], result.place, str(row["n"]), f"{row['accuracy']:.2%}", seconds[1] if seconds else "–"
                ])  # fmt: skip
    if rows:
        headings = ["run", "machine", "seeds", "accuracy", "seconds"]
        yield f"**Whole runs, judged by pictures kept back**\n\n{_markdown(headings, rows, left=2)}"


def _span(values: Sequence[float], form: str = ".2f") -> str:
    if not values:
        return "–"
    least, most = format(min(values), form), format(max(values), form)
    return least if least == most else f"{least} to {most}"


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    marks = ["---" if number < left else "---:" for number in range(len(headings))]
    return "\n".join("| " + " | ".join(line) + " |" for line in [headings, marks, *rows])
