"""Rows of results: a list of dicts, which notebooks show as a table and pandas reads as a data frame."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex, TypeVar, overload

from vitral.console import html_table
from vitral.errors import MissingExtraError
from vitral.wording import printable

if TYPE_CHECKING:
    import pandas

Row = TypeVar("Row", bound=Mapping[str, Any])

_SHOWN = 10
"""Rows that a prompt or a notebook shows."""


class Rows(list[Row]):
    """A list of rows, each a dict by column, with `to_frame` for pandas.

    Example:
        losses = [epoch["train_loss"] for epoch in run.history]
        frame = run.history.to_frame()
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[Row]: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | Rows[Row]:
        item = super().__getitem__(index)
        return Rows(item) if isinstance(item, list) else item

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas data frame. Raises `MissingExtraError` if pandas is not installed."""
        return data_frame(self)

    def __repr__(self) -> str:
        left = len(self) - _SHOWN
        return f"[{', '.join(map(repr, self[:_SHOWN]))}{f', and {left:,} more' if left > 0 else ''}]"

    def _repr_html_(self) -> str:
        shown = self[:_SHOWN]
        names = list(dict.fromkeys(name for row in shown for name in row))
        cells = [[_text(row.get(name, "")) for name in names] for row in shown]
        title = f"{len(self):,} rows" if len(self) == len(shown) else f"{len(shown)} of {len(self):,} rows"
        return html_table(title, [(*row[:-1], html.escape(row[-1])) for row in cells], names)


def data_frame(rows: Iterable[object], columns: Sequence[str] | None = None) -> pandas.DataFrame:
    """Return rows as a pandas data frame. Raises `MissingExtraError` if pandas is not installed."""
    try:
        import pandas
    except ImportError as error:
        raise MissingExtraError("pandas is not installed", why=str(error), hint="pip install pandas") from error
    return pandas.DataFrame([*rows], columns=columns)


def _text(value: object) -> str:
    return printable(f"{value:.4g}" if isinstance(value, float) else str(value))
