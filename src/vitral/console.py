"""How vitral prints: results to standard output, everything else to standard error, tables in one style."""

from __future__ import annotations

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
