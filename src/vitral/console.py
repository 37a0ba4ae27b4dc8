"""How vitral prints: results to standard output, everything else to standard error, tables in one style."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table


def stdout() -> Console:
    """Where results go."""
    return Console()


def stderr(*, quiet: bool = False) -> Console:
    """Where a person looks: progress, plans, errors. Names of files are no markup."""
    return Console(stderr=True, quiet=quiet, markup=False, emoji=False)


def table(title: str | None = None, *, header: bool = True) -> Table:
    """A table without lines: a dim header, two spaces between columns."""
    return Table(
        title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False,
        header_style="dim", show_header=header,
    )  # fmt: skip


def flag(name: str) -> str:
    """What is typed for an option that Python calls `lr_batch`."""
    return f"--{name.replace('_', '-')}"


def command_line(command: str, arguments: Iterable[object], options: Mapping[str, Any]) -> str:
    """What to type for these, fit for a shell; `options` by Python's names."""
    words = ["vitral", command, *map(str, arguments)]
    for name, value in options.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else flag(f"no_{name}"))
        else:
            words += [flag(name), *map(str, value if isinstance(value, (tuple, list)) else [value])]
    return shlex.join(words)
