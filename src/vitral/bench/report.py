"""What was measured: rows, what they were measured on, and both as a table and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement

from vitral.bench.timing import Sample
from vitral.console import table

OURS = "vitral"


@dataclass(frozen=True)
class Row:
    """One library doing one thing at one precision."""

    model: str
    image_size: tuple[int, int]
    what: str  # inference, training, jpeg
    who: str  # vitral, with another engine than its own choice in brackets, or the name of a peer
    compiled: bool
    precision: str  # bf16, fp32, int8
    via: str  # how a peer came to bf16 in inference: cast, autocast
    batch: int
    pictures: int  # of one call
    seconds: tuple[float, ...]  # of one call, round by round
    ours: float  # median seconds of ours, not compiled, at the same precision; beside int8, at the usual one
    flops: int  # operations of one call; a multiply-add is two
    matrix_rate: float | None  # the machine's own, FLOP/s, in the same rounds; not measured in integers
    memory: int | None  # bytes that a call needs above what is there before
    first: float | None  # seconds of the first call, where it compiles, lays weights out or opens files

    @property
    def sample(self) -> Sample:
        return Sample(self.seconds)

    @property
    def rate(self) -> float:
        """Pictures a second."""
        return self.pictures / self.sample.median

    @property
    def share(self) -> float | None:
        """FLOP/s as a share of the machine's matrix-product rate."""
        return None if self.matrix_rate is None else self.flops / self.sample.median / self.matrix_rate

    @property
    def times(self) -> float:
        """Median time as a multiple of ours."""
        return self.sample.median / self.ours

    def to_json(self) -> dict[str, Any]:
        """Plain data: what was measured, and what follows from it (times in seconds)."""
        derived = {**self.sample.columns(), "pictures_per_second": self.rate, "times": self.times, "share": self.share}
        return {**dataclasses.asdict(self), **derived}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """Read `to_json`'s form; what follows from the rest is not read."""
        values: dict[str, Any] = {field.name: data[field.name] for field in dataclasses.fields(cls)}
        lists = {name: tuple(values[name]) for name in ("image_size", "seconds")}
        return cls(**{**values, **lists})


COLUMNS: dict[str, Callable[[Row], str]] = {
    "what": lambda row: row.what,
    "who": lambda row: f"{row.who}, compiled" if row.compiled else row.who,
    "precision": lambda row: f"{row.precision}, {row.via}" if row.via else row.precision,
    "batch": lambda row: f"{row.batch:,}",
    "n": lambda row: str(row.sample.n),
    "median ms": lambda row: _milliseconds(row.sample.median),
    "least": lambda row: _milliseconds(min(row.seconds)),
    "greatest": lambda row: _milliseconds(max(row.seconds)),
    "pictures/s": lambda row: f"{row.rate:,.1f}",
    "× ours": lambda row: f"{row.times:.2f}",
    "of matrix rate": lambda row: "–" if row.share is None else f"{row.share:.0%}",
    "memory MB": lambda row: "–" if row.memory is None else f"{row.memory / 1e6:,.1f}",
    "first s": lambda row: "" if row.first is None else f"{row.first:.1f}",
}
"""Heading → cell. The last is left out where no row has one."""


@dataclass(frozen=True)
class Report:
    """Rows, and what they were measured on."""

    rows: Sequence[Row]
    machine: Mapping[str, Any]
    threads: int
    load_average: Sequence[float | None]  # before and after
    date: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    """Who → how it was built and called."""
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data; `from_json` is the way back."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = {"load_average": list(self.load_average), "notes": list(self.notes)}
        return {**fields, **lists, "rows": [row.to_json() for row in self.rows]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Read `to_json`'s form."""
        return cls(**{**data, "rows": [Row.from_json(row) for row in data["rows"]]})

    def print_table(self, console: Console) -> None:
        """A table for each network and image size, and under them where the figures come from."""
        for (model, (height, width)), rows in groupby(self.rows, key=lambda row: (row.model, row.image_size)):
            _print_rows(f"{model} at {height}×{width}", list(rows), console)
        for line in self.origin():
            console.print(escape(line), style="dim", highlight=False, soft_wrap=True)

    def origin(self) -> Iterator[str]:
        """Machine, its matrix rate, load, versions, settings: a line each."""
        machine = self.machine
        place = [machine["gpu"]] if "gpu" in machine else []
        place += [f"{machine['cpu']}, {machine['cores']} cores, {self.threads} of torch's threads"]
        yield "; ".join([*place, machine["system"], self.date])
        rates: dict[str, set[float]] = {}
        for row in self.rows:
            if row.matrix_rate is not None:
                rates.setdefault(row.precision, set()).add(row.matrix_rate)
        yield "matrix products: " + "; ".join(f"{precision} {_rates(found)}" for precision, found in rates.items())
        load = " → ".join("?" if one is None else f"{one:.1f}" for one in self.load_average)
        yield f"load average {load}; " + ", ".join(f"{name} {number}" for name, number in self.versions.items())
        for who, settings in self.settings.items():
            yield f"{who}: {settings}"
        yield (
            "× ours: median ÷ vitral's at the same precision, of int8 at its default, not compiled: above 1 is slower "
            "than ours; memory: above weights and optimizer, at the peak of a call"
        )
        if any(row.first is not None for row in self.rows):
            yield "first s: the first call, which compiles, lays weights out or opens files; it is not in the median"
        if (fewest := min(row.sample.n for row in self.rows)) < _FEW_ROUNDS:
            yield f"n is {fewest}: such medians tell large differences alone; --rounds 7 tells more"


_FEW_ROUNDS = 3
"""Below so many rounds a median says little on a machine that does other things, too."""


def _print_rows(title: str, rows: list[Row], console: Console) -> None:
    cells = {name: [cell(row) for row in rows] for name, cell in COLUMNS.items()}
    if not any(cells["first s"]):
        del cells["first s"]
    found = table(escape(title))
    for name in cells:
        found.add_column(name, justify="left" if name in ("what", "who", "precision") else "right", no_wrap=True)
    for before, row, line in zip([rows[0], *rows], rows, zip(*cells.values(), strict=True), strict=False):
        if (row.what, row.batch) != (before.what, before.batch):
            found.add_row()
        found.add_row(*map(escape, line))
    # figures that are cut off are worth nothing: a terminal that is too narrow wraps the lines
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=1000), found).maximum)
    console.print(found)


def _milliseconds(seconds: float) -> str:
    """Three digits, or all that are before the point."""
    taken = 1000 * seconds
    return f"{taken:,.{2 if taken < 10 else 1 if taken < 100 else 0}f}"


def _rates(found: set[float]) -> str:
    low, high = (f"{rate / 1e9:,.0f}" for rate in (min(found), max(found)))
    return f"{low} GFLOP/s" if low == high else f"{low} to {high} GFLOP/s"
