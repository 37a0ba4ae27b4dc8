"""Report of a benchmark: rows with the machine they were measured on, as a table and as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement

from vitral.bench.harness import Sample
from vitral.console import table
from vitral.wording import count

VITRAL = "vitral"


@dataclass(frozen=True)
class Row:
    """Measurement of one library in one task at one precision."""

    model: str
    image_size: tuple[int, int]
    what: str  # inference, training, jpeg
    who: str  # vitral, with an engine other than the default in brackets, or the name of a peer
    compiled: bool
    precision: str  # bf16, fp32, int8
    via: str  # a peer's route to bf16 in inference: cast, autocast
    batch: int
    images: int  # of one call
    seconds: tuple[float, ...]  # of one call, round by round
    reference: float  # median seconds of vitral, not compiled, at the same precision; for int8, at the default one
    flops: int  # operations of one call; a multiply-add is two
    matrix_rate: float | None  # of the machine, FLOP/s, in the same rounds; not measured in integers
    memory: int | None  # bytes of a call on top of the memory in use before
    first: float | None  # seconds of the first call, if it compiles, packs weights or opens files

    @property
    def sample(self) -> Sample:
        return Sample(self.seconds)

    @property
    def rate(self) -> float:
        """Images a second."""
        return self.images / self.sample.median

    @property
    def share(self) -> float | None:
        """FLOP/s as a share of the machine's matrix-product rate."""
        return None if self.matrix_rate is None else self.flops / self.sample.median / self.matrix_rate

    @property
    def times(self) -> float:
        """Median time as a multiple of vitral's."""
        return self.sample.median / self.reference

    def to_json(self) -> dict[str, object]:
        """Convert to plain data: measured and derived values (times in seconds)."""
        derived = {**self.sample.columns(), "images_per_second": self.rate, "times": self.times, "share": self.share}
        return {**dataclasses.asdict(self), **derived}

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> Row:
        """Read the form of `to_json`; derived values are ignored."""
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
    "images/s": lambda row: f"{row.rate:,.1f}",
    "× vitral": lambda row: f"{row.times:.2f}",
    "of matrix rate": lambda row: "–" if row.share is None else f"{row.share:.0%}",
    "memory MB": lambda row: "–" if row.memory is None else f"{row.memory / 1e6:,.1f}",
    "first s": lambda row: "" if row.first is None else f"{row.first:.1f}",
}
"""Heading → cell. The last column is left out if all its cells are empty."""


@dataclass(frozen=True)
class Report:
    """Rows, and the machine they were measured on."""

    rows: Sequence[Row]
    machine: Mapping[str, Any]
    threads: int
    load_average: Sequence[float | None]  # before and after
    date: str
    versions: Mapping[str, str]
    settings: Mapping[str, str]
    """Contender → how it was built and called."""
    notes: Sequence[str] = ()

    def to_json(self) -> dict[str, object]:
        """Convert to plain data; `from_json` reads it."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        lists = {"load_average": list(self.load_average), "notes": list(self.notes)}
        return {**fields, **lists, "rows": [row.to_json() for row in self.rows]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Report:
        """Read the form of `to_json`."""
        return cls(**{**data, "rows": [Row.from_json(row) for row in data["rows"]]})

    def print_table(self, console: Console) -> None:
        """Print a table for each network and image size, and below them the origin of the figures."""
        for (model, (height, width)), rows in groupby(self.rows, key=lambda row: (row.model, row.image_size)):
            _print_rows(f"{model} at {height}×{width}", list(rows), console)
        for line in self.origin():
            console.print(escape(line), style="dim", highlight=False, soft_wrap=True)

    def origin(self) -> Iterator[str]:
        """Iterate over lines on the machine, its matrix rate, load, versions and settings."""
        machine = self.machine
        place = [machine["gpu"]] if "gpu" in machine else []
        place += [f"{machine['cpu']}, {count(machine['cores'], 'core')}, {count(self.threads, 'torch thread')}"]
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
            "× vitral: median ÷ vitral's at the same precision (for int8 at its default), not compiled; above 1 is "
            "slower than vitral; memory: peak of a call, without weights and optimizer"
        )
        if any(row.first is not None for row in self.rows):
            yield "first s: the first call, which compiles, packs weights or opens files; not in the median"
        if (fewest := min(row.sample.n for row in self.rows)) < _FEW_ROUNDS:
            yield f"n is {fewest}: such medians show large differences only; --rounds 7 shows more"


_FEW_ROUNDS = 3
"""Fewer rounds than this give unreliable medians on a busy machine."""


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
    # truncated figures are useless: a narrow terminal wraps the lines instead
    console.width = max(console.width, Measurement.get(console, console.options.update(max_width=1000), found).maximum)
    console.print(found)


def _milliseconds(seconds: float) -> str:
    """Format with three digits, or all digits before the point."""
    taken = 1000 * seconds
    return f"{taken:,.{2 if taken < 10 else 1 if taken < 100 else 0}f}"


def _rates(found: set[float]) -> str:
    low, high = (f"{rate / 1e9:,.0f}" for rate in (min(found), max(found)))
    return f"{low} GFLOP/s" if low == high else f"{low} to {high} GFLOP/s"
