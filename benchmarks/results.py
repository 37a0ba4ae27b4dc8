"""Results as plain data (benchmarks/results/MACHINE/NAME.json)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import ROOT

FOLDER = ROOT / "benchmarks" / "results"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """What was asked of a program."""

    command: str
    names: tuple[str, ...] = ()  # what of it, where a program has parts (accuracy), or of what (peers)
    quick: bool = False  # tiny shapes, few rounds: shows that the program works, is not kept
    device: str = "cpu"
    seeds: int = 1
    rounds: int | None = None  # how often everything takes its turn (peers); else as the program has it
    data_root: Path = ROOT.parent / "shared" / "data"
    keep: Path | None = None  # where whole runs stay (accuracy, fewer, photographs)

    def data(self, name: str) -> Path | None:
        """A file or folder of the real data; None, and a line that says so, where it is absent."""
        path = self.data_root / name
        if path.exists():
            return path
        print(f"left out: there is no {name} under --data-root")
        return None


@dataclass(frozen=True)
class Table:
    """Rows with the same columns. `columns`: key → heading, with a format after a bar: "median|.1f"."""

    caption: str
    columns: Mapping[str, str]
    rows: Sequence[Row]
    name: str = ""  # results of one program that are measured apart are kept apart: NAME-name.json

    def markdown(self) -> str:
        """A Markdown table."""
        headings = [heading.partition("|")[0] for heading in self.columns.values()]
        formats = [heading.partition("|")[2] for heading in self.columns.values()]
        lines = [headings, ["---:" if form else "---" for form in formats]]
        lines += [[_shown(row.get(k), f) for k, f in zip(self.columns, formats, strict=True)] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(value: Any, form: str) -> str:
    if value is None:
        return "–"
    return format(value, form) if form and not isinstance(value, str) else str(value)


@dataclass(frozen=True)
class Result:
    """What a program measured, and on what."""

    program: str
    command: str
    machine: Mapping[str, Any]
    load_average: Sequence[float | None]  # before and after
    commit: str
    date: str
    versions: Mapping[str, str]
    tables: Sequence[Table] = field(default_factory=tuple)

    @property
    def place(self) -> str:
        """What it was measured on: the GPU where there is one, else the processor and its cores."""
        return str(self.machine.get("gpu") or _processor(self.machine))

    def save(self, folder: Path = FOLDER) -> list[Path]:
        """Write one file for each name among the tables, replacing the older measurement of the same on the same."""
        paths = []
        for name, path in self.paths(folder).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            tables = [asdict(table) for table in self.tables if table.name == name]
            text = json.dumps({**asdict(self), "tables": tables}, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", "utf-8")
            paths.append(path)
        return paths

    def paths(self, folder: Path = FOLDER) -> dict[str, Path]:
        """Where the tables of each name belong."""
        own = folder / "-".join(re.findall(r"[a-z0-9]+", self.place.lower().replace("(r)", "")))
        names = dict.fromkeys(table.name for table in self.tables)
        return {name: own / f"{'-'.join(filter(None, (self.program, name)))}.json" for name in names}

    @classmethod
    def read(cls, path: Path) -> Result:
        """What `save` wrote."""
        data = json.loads(path.read_text("utf-8"))
        return cls(**{**data, "tables": [Table(**table) for table in data["tables"]]})

    def markdown(self) -> str:
        """The tables, each under its caption, and below them where they come from."""
        parts = [f"**{table.caption}**\n\n{table.markdown()}" for table in self.tables]
        return "\n\n".join([*parts, self._origin()])

    def _origin(self) -> str:
        machine = self.machine
        place = f"{_processor(machine)} ({', '.join(machine['instructions'])})"
        place = f"{machine['gpu']}; {place}" if "gpu" in machine else place
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        load = " → ".join("?" if one is None else f"{one:.1f}" for one in self.load_average)
        return (
            f"<sub>`{self.command}` · {self.date} · commit {self.commit} · {place} · {machine['system']} · "
            f"load {load} · {versions}</sub>"
        )


def _processor(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}"
