"""Load report: every tensor of the source with its status, and every newly initialized parameter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

from vitral.console import table
from vitral.wording import some

Fate = Literal["loaded", "transformed", "resized", "left out"]


@dataclass(frozen=True)
class Line:
    """One tensor of the source."""

    source: str
    shape: tuple[int, ...]
    fate: Fate
    ours: str | None = None
    note: str = ""
    """Transformation, sizes before and after a resize, or the reason for omission."""


@dataclass(frozen=True)
class Assumption:
    """Fields that the file does not prove, taken from published networks."""

    fields: dict[str, Any]
    """Field of the configuration → the value taken."""
    source: str
    """The network or family with these values."""
    alternatives: tuple[str, ...] = ()
    """Other architectures of timm with the same tensors and other arithmetic."""

    def __str__(self) -> str:
        values = ", ".join(f"{name.replace('_', ' ')} {_value(value)}" for name, value in self.fields.items())
        line = f"assumed, as in {self.source}: {values}" if values else f"assumed to be {self.source}"
        if self.alternatives:
            line += f"; the same tensors fit {', '.join(self.alternatives)}: --like timm:NAME"
        return line

    @classmethod
    def from_json(cls, data: object) -> Assumption | None:
        """Read the form of `to_json`; None for anything else, as in files without assumptions."""
        kinds = {"fields": dict, "from": str, "alternatives": list}
        if not isinstance(data, dict) or any(not isinstance(data.get(key), kind) for key, kind in kinds.items()):
            return None
        return cls(data["fields"], data["from"], tuple(map(str, data["alternatives"])))

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        return {"fields": self.fields, "from": self.source, "alternatives": list(self.alternatives)}


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else "none" if value is None else str(value)


@dataclass(frozen=True, repr=False)
class LoadReport:
    """Load report of one source of weights: a value, of which each step of reading makes the next.

    Example:
        report = vitral.load("runs/photos").account
        print(report.headline(), report.notes)
    """

    source: str
    format: str
    lines: tuple[Line, ...] = ()
    fresh: Mapping[str, str] = field(default_factory=dict)
    """Newly initialized parameters → reason."""
    notes: tuple[str, ...] = ()
    """Further notes, a sentence each: assumptions, renamings, values that are not finite. Their kinds are in
    `vitral.weights.notes`.
    """
    assumed: Assumption | None = None
    """Fields stated by no file, and their source."""
    nameless: bool = False
    """True if no file states the names of the classes."""
    class_order: str | None = None
    """The order of the classes that the user stated for weights without names."""
    digest: str = ""
    """Digest that the file states of itself; empty if it states none."""
    changes: tuple[str, ...] = ()
    """Changes of the network since its numbers were fitted (`vitral.weights.fitted.CHANGES`)."""
    written: tuple[str, ...] = ()
    """Files written from it."""

    def noted(self, *notes: str) -> LoadReport:
        """Return the report with more notes at the end."""
        return replace(self, notes=(*self.notes, *notes))

    def without(self, *kinds: type[str]) -> LoadReport:
        """Return the report without the notes of these kinds."""
        return replace(self, notes=tuple(note for note in self.notes if not isinstance(note, kinds)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.headline()}>"

    def counts(self) -> dict[str, int]:
        """Count the tensors by status."""
        return dict(Counter(line.fate for line in self.lines))

    def counts_text(self) -> str:
        """Format the counts: tensors loaded, transformed, resized, left out; parameters newly initialized."""
        counts = [f"{n} {fate}" for fate, n in self.counts().items()]
        return ", ".join([*counts, f"{len(self.fresh)} new"] if self.fresh else counts)

    def headline(self) -> str:
        """Format source, format and counts in one line."""
        return f"{self.source}: {self.format}, {self.counts_text()}"

    def highlights(self) -> list[str]:
        """List what deserves attention: tensors resized or left out, new parameters, assumptions, notes."""
        found = [f"resized {line.ours}: {line.note}" for line in self.lines if line.fate == "resized"]
        left: dict[str, list[str]] = {}
        for line in self.lines:
            if line.fate == "left out":
                left.setdefault(line.note, []).append(line.source)
        found += [f"left out {some(names)}: {why}" for why, names in left.items()]
        new: dict[str, list[str]] = {}
        for name, why in self.fresh.items():
            new.setdefault(why, []).append(name)
        found += [f"new {some(names)}: {why}" for why, names in new.items()]
        return [*found, *([str(self.assumed)] if self.assumed else []), *self.notes]

    def to_json(self) -> dict[str, object]:
        """Plain data."""
        lines = [asdict(line) | {"shape": list(line.shape)} for line in self.lines]
        return {
            "source": self.source,
            "format": self.format,
            "counts": self.counts(),
            "tensors": lines,
            "new": dict(self.fresh),
            "assumed": self.assumed.to_json() if self.assumed else None,
            "notes": list(self.notes),
            "written": list(self.written),
        }

    def print_table(self, console: Console, *, full: bool = False) -> None:
        """Print the headline and what deserves attention; with `full` every tensor."""
        console.print(Text(self.headline(), style="bold"))
        if full:
            rows = table()
            for heading in ("tensor of the source", "shape", "status", "ours", ""):
                rows.add_column(heading, overflow="fold")
            for line in self.lines:
                rows.add_row(*map(Text, (line.source, str(line.shape), line.fate, line.ours or "", line.note)))
            console.print(rows)
        for note in self.highlights():
            console.print(Text(f"  {note}"))
