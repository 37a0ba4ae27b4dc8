"""Images of a proof: held-out images of the data, then its other images, then the bundled drawings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitral.data import DataSet, Split
from vitral.data.dataset import SPLITS
from vitral.data.images.decode import read_image
from vitral.demo import IMAGES
from vitral.errors import ImageError
from vitral.inference.outputs import Output
from vitral.weights.class_names import match

LEAST = 64
"""Fewest images of a proof."""

_WINDOWS = ((0, 0, 1), (0, 0, 0.8), (0.2, 0, 0.8), (0, 0.2, 0.8), (0.2, 0.2, 0.8), (0.1, 0.1, 0.8), (0.15, 0.15, 0.7))
"""Crops of a drawing, each used as a separate image: left, top and side, as fractions of the whole."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Images with names and labels; -1 for an unlabeled image."""

    parts: Sequence[Split]
    about: str
    """Origin of the images: "64 test images of photos/"."""
    held_out: int = 0
    """Number of images of a test or val split, which come first."""

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    @property
    def labels(self) -> np.ndarray:
        return np.concatenate([part.labels for part in self.parts])

    @property
    def names(self) -> list[str]:
        return [name for part in self.parts for name in part.names]

    def image(self, index: int, channels: int) -> np.ndarray:
        """Return an image as uint8 (H, W, C). Raises `ImageError` for an unreadable one."""
        for part in self.parts:
            if index < len(part):
                return part.image(index, channels)
            index -= len(part)
        raise IndexError(index)


def sample(
    dataset: DataSet | None, output: Output, count: int, *, skip: bool = False, levels: tuple[int, int] | None = None
) -> Sample:
    """Choose `count` images of the test split, or of val or train where there is no test split.

    If these are fewer than `LEAST`, images of other splits follow, then drawings. `skip` leaves out unreadable images.
    """
    parts: list[Split] = []
    origins: list[str] = []
    held_out = 0
    for name in reversed(SPLITS):
        missing = LEAST - sum(map(len, parts)) if parts else count
        if dataset is not None and name in dataset.splits and missing > 0:
            part = dataset[name].spread(missing)
            part = (readable(part) if skip else part).with_levels(levels)
            parts.append(part)
            held_out += len(part) * (name != "train")
            origins.append(f"{len(part):,} {name} images of {dataset.source}")
    if (missing := LEAST - sum(map(len, parts))) > 0:
        drawn = drawings(output.names, missing if parts else max(count, LEAST))
        if not output.one_class:  # without labels, which are as wide as those of the other images
            width = parts[0].labels.shape[1] if parts else len(output.names)
            drawn = Split(drawn.names, np.full((len(drawn), width), -1), drawn.fetch)
        parts.append(drawn)
        origins.append(f"{len(parts[-1])} drawings of vitral demo")
    return Sample(parts, " and ".join(origins), held_out)


def drawings(classes: Sequence[str], count: int) -> Split:
    """Return the bundled drawings and crops of them, at most seven of each, labeled if `classes` has their class."""
    scenes = sorted(path.stem for path in IMAGES.iterdir())
    labels = [-1 if place is None else place for place in match(tuple(scenes), tuple(classes))]
    count = min(count, len(scenes) * len(_WINDOWS))

    def fetch(index: int) -> np.ndarray:
        left, top, side = _WINDOWS[index // len(scenes)]
        whole = read_image((IMAGES / f"{scenes[index % len(scenes)]}.png").read_bytes())
        y, x, size = (round(share * len(whole)) for share in (top, left, side))
        return whole[y : y + size, x : x + size]

    names = [f"drawing of {scenes[i % len(scenes)]}, part {i // len(scenes)}" for i in range(count)]
    return Split(names, np.array([labels[i % len(scenes)] for i in range(count)]), fetch)


def readable(split: Split) -> Split:
    """Return the readable images of a split."""

    def is_readable(index: int) -> bool:
        try:
            split.image(index)
        except ImageError:
            return False
        return True

    return split.select([index for index in range(len(split)) if is_readable(index)])
