"""What a recipe may look at before it decides: the data in numbers, and how long it may take."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from vitral.data import DataSet
from vitral.data.intake import probe
from vitral.errors import ImageError

_SAMPLED = 64
_FEW_STEPS = 10
"""Of an epoch: beyond, what is left out is less than a tenth."""


@dataclass(frozen=True)
class Facts:
    """A data set in numbers; sizes come from a sample of up to 64 training pictures."""

    images: int
    classes: int
    size: tuple[int, int]
    """Median height and width in pixels."""
    uniform: bool
    """Whether all sampled pictures have this size."""
    channels: int
    """1 where every sampled picture is grey, else 3."""
    imbalance: float
    """Largest class : smallest class."""
    sampled: int = 0
    """How many pictures were opened to find sizes and channels."""
    epochs: int | None = None
    """Passes that a person asks for (`--epochs`), or that fit into a time (`--minutes`)."""
    kept: int | None = None
    """Pictures that are learned from, without those for validation or beyond a share; None for all."""

    def batch(self, most: int) -> int:
        """How many pictures a batch has: `most`, or where an epoch is only some steps, as many as make them even. An
        epoch leaves out the incomplete batch at its end: 11 of 27 pictures where batches have 16, but one where they
        have 13.
        """
        count = self.images if self.kept is None else self.kept
        steps = -(-count // most)
        return most if steps > _FEW_STEPS else max(1, count // max(1, steps))


def facts(dataset: DataSet) -> Facts:
    """Look at a data set. Pictures that cannot be read are left out here; checking them is another step."""
    train = dataset["train"]
    sizes, channels = [], Counter[int]()
    for index in np.linspace(0, len(train) - 1, min(len(train), _SAMPLED)).astype(int):
        try:
            raw = train.raw(int(index))
            if isinstance(raw, bytes):
                found = probe(raw, name=train.names[int(index)])
                sizes.append((found.height, found.width))
                channels[1 if found.channels == 1 else 3] += 1
            else:
                sizes.append(raw.shape[:2])
                channels[1 if raw.ndim == 2 or raw.shape[2] == 1 else 3] += 1
        except ImageError:
            continue
    height, width = np.median(sizes, axis=0).astype(int) if sizes else (224, 224)
    counts = np.bincount(train.labels, minlength=len(dataset.classes))
    return Facts(
        images=len(train),
        classes=len(dataset.classes),
        size=(int(height), int(width)),
        uniform=len(set(sizes)) == 1,
        channels=1 if set(channels) == {1} else 3,
        imbalance=float(counts.max() / max(counts[counts > 0].min(), 1)),
        sampled=len(sizes),
    )
