"""The account of a loading: every tensor of the source and where it went; every parameter of ours that got nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from vitral.console import table

Fate = Literal["loaded", "transformed", "resized", "left out"]


@dataclass(frozen=True)
class Line:
    """One tensor of the source."""

    source: str
    shape: tuple[int, ...]
    fate: Fate
    ours: str | None = None
    note: str = ""
    """How it was transformed, from what to what it was resized, or why it was left out."""


@dataclass(repr=False)
class Account:
    """What happened to a file of weights."""

    source: str
    format: str
    lines: list[Line] = field(default_factory=list)
    fresh: dict[str, str] = field(default_factory=dict)
    """Parameters of ours that got nothing from the file, and why that was allowed."""
    notes: list[str] = field(default_factory=list)
    """What else the reader should know, a sentence each: assumptions, renamings, values that are not finite."""
    written: list[str] = field(default_factory=list)
    """Files that were written from it."""

    def __repr__(self) -> str:
        return f"<Account of {self.headline()}>"

    def counts(self) -> dict[str, int]:
        """How many tensors met which fate."""
        return dict(Counter(line.fate for line in self.lines))

    def counted(self) -> str:
        """The counts in words: tensors loaded, transformed, resized, left out; parameters of ours that are new."""
        counts = [f"{n} {fate}" for fate, n in self.counts().items()]
        return ", ".join([*counts, f"{len(self.fresh)} new"] if self.fresh else counts)

    def headline(self) -> str:
        """One line: the format and the counts."""
        return f"{self.source}: {self.format}, {self.counted()}"

    def remarkable(self) -> list[str]:
        """Lines for a person who did not ask for the whole account: what was resized, left out, new or assumed."""
        found = [f"resized {line.ours}: {line.note}" for line in self.lines if line.fate == "resized"]
        left: dict[str, list[str]] = {}
        for line in self.lines:
            if line.fate == "left out":
                left.setdefault(line.note, []).append(line.source)
        found += [f"left out {_few(names)}: {why}" for why, names in left.items()]
        why_fresh: dict[str, list[str]] = {}
        for name, why in self.fresh.items():
            why_fresh.setdefault(why, []).append(name)
        found += [f"new {_few(names)}: {why}" for why, names in why_fresh.items()]
        return found + self.notes

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        lines = [asdict(line) | {"shape": list(line.shape)} for line in self.lines]
        return {
            "source": self.source,
            "format": self.format,
            "counts": self.counts(),
            "tensors": lines,
            "new": dict(self.fresh),
            "notes": list(self.notes),
            "written": list(self.written),
        }

    def print_table(self, console: Console, *, full: bool = False) -> None:
        """The headline and what is remarkable; with `full` every tensor."""
        console.print(Text(self.headline(), style="bold"))
        if full:
            rows = table()
            for heading in ("tensor of the source", "shape", "what became of it", "ours", ""):
                rows.add_column(heading, overflow="fold")
            for line in self.lines:
                rows.add_row(*map(Text, (line.source, str(line.shape), line.fate, line.ours or "", line.note)))
            console.print(rows)
        for told in self.remarkable():
            console.print(Text(f"  {told}"))


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
