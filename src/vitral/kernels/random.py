"""Random numbers for some rows of a batch, drawn as for the whole batch.

Ranks that train together share each batch. Each draws the numbers of all rows, in the same order, and keeps the numbers
of its own rows. The images, and so the run, do not depend on the number of ranks. Outside `drawing` a batch is whole,
and every function is torch's own.

`dropout` costs as many random numbers as the whole batch has values; all others draw a few numbers an image.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Rows:
    """Rows `start` to `stop` of a batch of `total`. With `halo` the row before `start` comes first: mixup's partner."""

    start: int
    stop: int
    total: int
    halo: bool = False
    copies: int = 1
    """Times that the batch is repeated, as views of its images."""

    def __len__(self) -> int:
        return self.copies * (self.stop - self.start + self.halo)

    @property
    def own(self) -> Rows:
        """The rows without the halo."""
        return replace(self, halo=False)

    @property
    def share(self) -> float:
        """Share of the batch, without the halo."""
        return (self.stop - self.start) / self.total

    def of(self, whole: Tensor, dim: int = 0) -> Tensor:
        """Select these rows of a tensor of all rows."""
        if self.copies > 1:
            views = whole.unflatten(dim, (self.copies, self.total))
            return views.narrow(dim + 1, self.start, self.stop - self.start).flatten(dim, dim + 1)
        if not self.halo:
            return whole.narrow(dim, self.start, len(self))
        if self.start:
            return whole.narrow(dim, self.start - 1, len(self))
        return torch.cat([whole.narrow(dim, self.total - 1, 1), whole.narrow(dim, 0, self.stop)], dim)


_rows: Rows | None = None
"""One for the process, like torch's generator: backward recomputes blocks in other threads."""


@contextmanager
def drawing(rows: Rows | None) -> Iterator[None]:
    """Draw for these rows of a batch; None for a whole one."""
    global _rows
    before, _rows = _rows, rows
    try:
        yield
    finally:
        _rows = before


@contextmanager
def repeated(copies: int) -> Iterator[None]:
    """Draw for so many copies of the current rows, one after another."""
    with drawing(None if _rows is None else replace(_rows, copies=copies)):
        yield


def current() -> Rows | None:
    """Return the rows that numbers are drawn for; None for a whole batch."""
    return _rows


def total(count: int) -> int:
    """Return the number of rows to draw for a tensor of `count` rows."""
    if _rows is None:
        return count
    if count != len(_rows):
        raise RuntimeError(f"random numbers for {count} rows, but {_rows} are {len(_rows)}")
    return _rows.total * _rows.copies


def kept(drawn: Tensor, dim: int = 0) -> Tensor:
    """Return the numbers of the current rows, out of the numbers of all rows."""
    return drawn if _rows is None else _rows.of(drawn, dim)


def held(order: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places in a permutation of all rows that hold current rows, and which of these they hold.

    Synchronizes with a GPU.
    """
    if _rows is None:
        return torch.arange(len(order), device=order.device), order
    own = _rows.of(torch.arange(len(order), device=order.device))
    number = torch.full_like(order, -1).scatter_(0, own, torch.arange(len(own), device=order.device))[order]
    places = (number >= 0).nonzero()[:, 0]
    return places, number[places]


def each(items: Sequence[T], function: Callable[[T], R]) -> list[R]:
    """Call a function for each image of a batch, with random numbers of its own: how many one takes may depend on its
    size, which other ranks do not know.
    """
    base, start = int(torch.randint(2**62, ())), 0 if _rows is None else _rows.start
    after, made = total(len(items)), []
    with drawing(None):
        for number, item in enumerate(items, start):
            torch.manual_seed(base + number)
            made.append(function(item))
    torch.manual_seed(base + after)
    return made


def dropout(x: Tensor, rate: float, training: bool) -> Tensor:
    """`F.dropout` of x (B, …)."""
    if _rows is None or not rate or not training:
        return F.dropout(x, rate, training)
    scaled = F.dropout(x.new_ones(total(len(x)), *x.shape[1:]), rate)  # the same calls as for a whole batch
    return x * kept(scaled)
