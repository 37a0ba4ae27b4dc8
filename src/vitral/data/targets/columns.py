"""Columns of a table that may hold labels, and their cells."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vitral.errors import DataError
from vitral.wording import shown, some

_DECIMAL_COMMA = re.compile(r"[-+]?\d+,\d+")
_LONGEST = 40
"""Most characters of a cell that a message shows."""


@dataclass(frozen=True)
class LabelColumns:
    """The columns of a table that may hold labels."""

    header: Sequence[str]
    rows: Mapping[int, Sequence[str]]
    """Line → cells."""
    label: int | None
    """The column of labels, if one is called so or is the only one that was named."""
    free: Sequence[int]
    """Columns of no other meaning, or those that were named."""
    named: bool
    """True if the user named the columns."""
    where: str

    @property
    def chosen(self) -> Sequence[int]:
        """The columns to read: that of labels, else the free ones."""
        return self.free if self.label is None else [self.label]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chosen columns."""
        return tuple(self.header[i] for i in self.chosen)

    @property
    def holding(self) -> str:
        """The chosen columns with their verb."""
        noun, verb = ("the column", "holds") if len(self.names) == 1 else ("the columns", "hold")
        return f"{noun} {some(self.names, 4)} {verb}"

    def cells(self, column: int) -> dict[int, str]:
        """Line → cell."""
        return {line: cell_of(row, column) for line, row in self.rows.items()}

    def odd(self, column: int, read: Callable[[str], float | None]) -> list[str]:
        """Return line and value of each cell that cannot be read."""
        return [
            f"line {line}: '{shown(cell[:_LONGEST])}'"
            for line, cell in self.cells(column).items()
            if read(cell) is None
        ]

    def all_numbers(self) -> bool:
        """True if all cells of the chosen columns are numbers, or truth values."""
        return bool(self.chosen and self.rows) and not any(self.odd(i, number_or_bit) for i in self.chosen)

    def all_bits(self) -> bool:
        """True if all cells of the chosen columns are 0 or 1."""
        return all(bit_of(cell) is not None for i in self.chosen for cell in self.cells(i).values())

    def refuse_commas(self, columns: Sequence[int]) -> None:
        """Raise `DataError` for a column of numbers with decimal commas, each of which would be a class of its own."""
        for column in columns:
            cells = self.cells(column)
            commas = [line for line, cell in cells.items() if _DECIMAL_COMMA.fullmatch(cell)]
            if commas and all(number_of(cell.replace(",", ".", 1)) is not None for cell in cells.values()):
                why = f"line {commas[0]}: '{cells[commas[0]]}'"
                what = f"the column {self.header[column]} holds numbers with a decimal comma"
                raise DataError(what, where=self.where, why=why, hint="write a point: 12.50")

    def refuse_odd(self) -> None:
        """Raise `DataError` for a column of numbers with a few other cells."""
        odd = {i: self.odd(i, number_or_bit) for i in self.chosen}
        for column, cells in odd.items():
            if cells and 2 * len(cells) < len(self.rows):
                verb = "is no number" if len(cells) == 1 else "are no numbers"
                others = " ".join(self.header[i] for i in odd if not odd[i])
                hint = "correct them, or delete the lines" + (f"; or --targets {others}" if others else "")
                what = f"not all cells of the column {self.header[column]} are numbers"
                raise DataError(what, where=self.where, why=f"{some(cells)} {verb}", hint=hint)

    def refuse_mixed(self) -> None:
        """Raise `DataError` for columns of which some hold numbers only, unless the user named them."""
        numeric = [i for i in self.chosen if self.rows and not self.odd(i, number_or_bit)]
        if numeric and not self.named:
            others = some([self.header[i] for i in self.chosen if i not in numeric])
            why = f"{others} {'do' if ' ' in others else 'does'} not"
            hint = f"--targets {' '.join(self.header[i] for i in numeric)}"
            raise DataError("not all columns hold numbers", where=self.where, why=why, hint=hint)

    def refuse(self, task: str, needed: str, kind: str, read: Callable[[str], float | None]) -> None:
        """Raise `DataError` for columns with cells that `read` cannot read."""
        odd = {i: self.odd(i, read) for i in self.chosen}
        bad = [f"{self.header[i]}, {cells[0]} is {kind}" for i, cells in odd.items() if cells]
        hint = "name the right ones: --targets COLUMN COLUMN"
        why = "; ".join(bad[:3]) or None
        raise DataError(f"--task {task} needs columns of {needed}", where=self.where, why=why, hint=hint)


def cell_of(row: Sequence[str], column: int) -> str:
    """Return a cell without spaces around it; empty in a row that is too short."""
    return row[column].strip() if column < len(row) else ""


def bit_of(cell: str) -> int | None:
    """Return a truth value as 0 or 1; None for any other cell."""
    return {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}.get(cell.lower())


def number_or_bit(cell: str) -> float | None:
    """Return a number, or a truth value as 0 or 1; None for any other cell."""
    number = number_of(cell)
    return bit_of(cell) if number is None else number


def number_of(cell: str) -> float | None:
    """Return a finite number; None for any other cell."""
    try:
        number = float(cell)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
