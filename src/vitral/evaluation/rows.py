"""The predictions of an evaluation as a table: one row per image, with its label."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from vitral.console import html_table
from vitral.data import Split
from vitral.data.targets import targets_of
from vitral.errors import MissingExtraError
from vitral.inference.outputs.output import Output
from vitral.wording import printable

if TYPE_CHECKING:
    import pandas

_SHOWN = 10
"""Rows that a notebook shows."""


class Rows(Sequence[dict[str, Any]]):
    """One row per image: `image`, `true`, and the columns of `vitral predict --out`, made when they are asked for.

    `true` is the label. If the network predicts numbers, it is a column for each, such as `true_age`.
    """

    def __init__(self, images: Split, values: np.ndarray, output: Output):
        """`values` (n, K) are the result of `Output.values`."""
        self._images, self._values, self._output = images, values, output
        self._columns = output.columns()

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, which: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, which: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, which: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        numbers = range(len(self))[which]
        return self._row(numbers) if isinstance(numbers, int) else [self._row(i) for i in numbers]

    def _row(self, i: int) -> dict[str, Any]:
        name, label, names = self._images.names[i], self._images.labels[i], self._output.names
        if np.issubdtype(self._images.labels.dtype, np.floating):
            true: dict[str, Any] = {f"true_{target}": float(one) for target, one in zip(names, label, strict=True)}
        else:
            true = {"true": targets_of(self._output.task).describe(label, names)}
        cells = self._columns.cells(self._output.prediction(name, self._values[i]))
        return {"image": name, **true, **dict(zip(self._columns.names, cells, strict=True))}

    def to_frame(self) -> pandas.DataFrame:
        """Return a pandas data frame. Raises `MissingExtraError` if pandas is not installed."""
        try:
            import pandas
        except ImportError as error:
            raise MissingExtraError("pandas is not installed", why=str(error), hint="pip install pandas") from error
        return pandas.DataFrame(self[:])

    def __repr__(self) -> str:
        return f"Rows({len(self):,} images)"

    def _repr_html_(self) -> str:
        rows = [(*map(_text, [*row.values()][:-1]), html.escape(_text([*row.values()][-1]))) for row in self[:_SHOWN]]
        return html_table(f"{len(self):,} images", rows)


def _text(value: Any) -> str:
    return printable(f"{value:.4g}" if isinstance(value, float) else str(value))
