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
    """Options of a program."""

    command: str
    names: tuple[str, ...] = ()  # parts of the program (accuracy), or networks (peers)
    quick: bool = False  # tiny shapes, few rounds: a smoke test, not saved
    device: str = "cpu"
    seeds: int = 1
    rounds: int | None = None  # alternating rounds (peers); default of the program if None
    data_root: Path = ROOT.parent / "shared" / "data"
    keep: Path | None = None  # folder for whole runs (accuracy, photographs)

    def data(self, name: str) -> Path | None:
        """Find a file or folder of the real data; print a line and return None if it is absent."""
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
    name: str = ""  # tables measured separately are saved separately: NAME-name.json

    def json(self) -> str:
        """Format as JSON with a line for each row."""
        head = "".join(f"{_json(key)}: {_json(value)}, " for key, value in asdict(self).items() if key != "rows")
        return "{" + head + '"rows": [\n' + ",\n".join(map(_json, self.rows)) + "\n]}"

    def markdown(self) -> str:
        """Format as a Markdown table."""
        headings = [heading.partition("|")[0] for heading in self.columns.values()]
        formats = [heading.partition("|")[2] for heading in self.columns.values()]
        lines = [headings, ["---:" if form else "---" for form in formats]]
        lines += [[_formatted(row.get(k), f) for k, f in zip(self.columns, formats, strict=True)] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _formatted(value: Any, form: str) -> str:
    if value is None:
        return "–"
    return format(value, form) if form and not isinstance(value, str) else str(value)


@dataclass(frozen=True)
class Result:
    """Tables of a program, with the machine they were measured on."""

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
        """Name of the machine: its GPU, else the CPU and its cores."""
        return str(self.machine.get("gpu") or _cpu(self.machine))

    @property
    def folder(self) -> str:
        """Name of the machine's folder."""
        return "-".join(re.findall(r"[a-z0-9]+", self.place.lower().replace("(r)", "")))

    def save(self, folder: Path = FOLDER) -> list[Path]:
        """Write one file per table name, replacing the older measurement on the same machine."""
        paths = []
        for name, path in self.paths(folder).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self._text([table for table in self.tables if table.name == name]), "utf-8")
            paths.append(path)
        return paths

    def _text(self, tables: Sequence[Table]) -> str:
        """Format as JSON with a line for each field and each row."""
        lines = [f"{_json(name)}: {_json(value)}" for name, value in asdict(self).items() if name != "tables"]
        lines += ['"tables": [\n' + ",\n".join(table.json() for table in tables) + "\n]"]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def paths(self, folder: Path = FOLDER) -> dict[str, Path]:
        """Return the path for the tables of each name."""
        own = folder / self.folder
        names = dict.fromkeys(table.name for table in self.tables)
        return {name: own / f"{'-'.join(filter(None, (self.program, name)))}.json" for name in names}

    @classmethod
    def read(cls, path: Path) -> Result:
        """Read a file of `save`."""
        data = json.loads(path.read_text("utf-8"))
        return cls(**{**data, "tables": [Table(**table) for table in data["tables"]]})

    def markdown(self) -> str:
        """Format the tables, each under its caption, and their origin below."""
        parts = [f"**{table.caption}**\n\n{table.markdown()}" for table in self.tables]
        return "\n\n".join([*parts, self._origin()])

    def _origin(self) -> str:
        machine = self.machine
        place = f"{_cpu(machine)} ({', '.join(machine['instructions'])})"
        place = f"{machine['gpu']}; {place}" if "gpu" in machine else place
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        load = " → ".join("?" if one is None else f"{one:.1f}" for one in self.load_average)
        return (
            f"<sub>`{self.command}` · {self.date} · commit {self.commit} · {place} · {machine['system']} · "
            f"load {load} · {versions}</sub>"
        )


def _cpu(machine: Mapping[str, Any]) -> str:
    name = machine["cpu"].replace(" Processor", "")
    return f"{name}, {machine['cores']} {'core' if machine['cores'] == 1 else 'cores'}"
