"""The part of each batch that one of several ranks computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vitral.kernels.random import Rows


@dataclass(frozen=True)
class Part:
    """Part `number` of `count`.

    Training batches are cut into consecutive rows, as equal as possible. Of an evaluation every count-th batch is
    whole: its logits are those of one process, bit by bit.
    """

    number: int = 0
    count: int = 1
    beside: int = 1
    """Parts on this machine, which share its memory and its cores."""

    def rows(self, total: int, mixed: bool) -> Rows | None:
        """Return the rows of a training batch; None for all of them. `mixed` images need the one before them, too."""
        if self.count == 1:
            return None
        start, stop = (number * total // self.count for number in (self.number, self.number + 1))
        return Rows(start, stop, total, halo=mixed)

    def cut(self, batch: np.ndarray, rows: Rows | None) -> np.ndarray:
        """Select the images of a training batch."""
        if rows is None:
            return batch
        return batch[np.arange(rows.start - rows.halo, rows.stop)]  # the row before the first is the last

    def whole(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """Select the batches of an evaluation."""
        return batches[self.number :: self.count]
