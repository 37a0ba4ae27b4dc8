"""Predictions of few pictures on a GPU: the network's kernels, recorded once for each number of pictures and repeated.

With one picture a GPU is done with a kernel before Python has named the next; a recording (`vitral.graphs`) asks for
all of them at once. What it gives are the same bits.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from torch import Tensor, nn

from vitral.graphs import Aside, Record, Recording, kinds_of

FEW = 32
"""Pictures up to which kernels are so short that asking for them takes longer."""
MOST = 8
"""Numbers of pictures that are recorded: each holds memory."""
WARM_UP = 2
"""Calls of each that are computed as always."""


class Graphed(nn.Module):
    """A network for inference, called from any thread; where its weights are other tensors, another one is needed."""

    def __init__(self, network: nn.Module, record: Record | None = None):
        super().__init__()
        self.network = network
        self._aside = Aside(next(network.parameters()).device)
        self._record = record or self._aside.record
        self._calls: Counter[Any] = Counter()
        self._recordings: dict[Any, Recording] = {}
        self._turn = threading.Lock()  # a recording has one place for its pictures

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, K); to be called in inference mode."""
        if len(images) > FEW:
            return self.network(images)
        kind = kinds_of([images])
        with self._turn:
            self._calls[kind] += 1
            if self._calls[kind] > WARM_UP and kind not in self._recordings and len(self._recordings) < MOST:
                self._recordings[kind] = Recording.of(self.network, [images], self._record)
            if recording := self._recordings.get(kind):
                return recording([images]).clone()
            with self._aside.there():
                return self.network(images)
