"""Statistics of a data set, and limits on training, as input of recipes."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitral.data import DataSet, Split
from vitral.data.dataset import spread
from vitral.data.images.decode import probe
from vitral.data.images.depth import Depth, distinct_values
from vitral.data.targets import targets_of
from vitral.errors import ImageError, RunError
from vitral.folders import is_run, same_path
from vitral.training.run_folder import RunFolder

_SAMPLED = 64
_PLAIN_SAMPLED = 16
_PLAIN_SIDE = 64  # pixels; a JPEG is decoded at a fraction of its size
_FEW_STEPS = 10
"""Steps of an epoch above which its incomplete last batch is less than a tenth of the images."""

MIRRORED = "half of the images are mirrored at random, because photographs stay realistic when mirrored"
NOT_MIRRORED = "images are not mirrored, because grayscale images may be text"
"""Reasons of several recipes for mirroring training images or not."""
PASSES = "passes over the training images, which vary at random from pass to pass; --minutes sets a time limit"
"""Reason of several recipes for a number of epochs."""
PROBE = (
    "before training, a linear classifier on the features of the initial weights shows a first accuracy; "
    "with 100 or more validation images, it is saved if no epoch is better"
)
"""Reason of several recipes for a probe before the training."""


def steps(stats: DatasetStats, batch: int) -> str:
    """Reason of several recipes for a batch size."""
    count = stats.images if stats.train_images is None else stats.train_images
    each = max(1, count // batch)
    return f"images per step, so that an epoch has {each:,} {'step' if each == 1 else 'steps'}"


def pixels_of(stats: DatasetStats) -> str:
    """Height and width of the images, the median if they vary."""
    size = f"{stats.size[0]}×{stats.size[1]} pixels"
    return size if stats.uniform else f"{size}, the median of {stats.sampled:,}"


def warmup(epochs: int) -> float:
    """Return epochs of linear warm-up: one, or a twentieth of a long run, and at most a tenth of a short one."""
    return min(max(1.0, epochs / 20), epochs / 10)


@dataclass(frozen=True)
class DatasetStats:
    """Statistics of a data set; sizes and channels come from a sample of up to 64 training images."""

    images: int
    classes: int
    size: tuple[int, int]
    """Median height and width in pixels."""
    uniform: bool
    """True if all sampled images have this size."""
    channels: int
    """1 if every sampled image is grayscale, else 3."""
    imbalance: float
    """Ratio of the largest to the smallest class."""
    plain: float = 0.0
    """Fraction of the pixels of a gray image that have its most frequent gray, such as the paper of a drawing: the
    median of a sample. 0 for color images. Photographs are near 0.1, drawings and writing near 0.9.
    """
    depth: Depth | None = field(default=None, compare=False)
    """Values of sampled images with more than 8 bits; None if there are none."""
    sampled: int = 0
    """Number of sampled images."""
    epochs: int | None = None
    """Number of epochs that `--epochs` states, or that fit into `--minutes`."""
    train_images: int | None = None
    """Number of images used for training, without those for validation or beyond `--train-share`; None for all."""
    finished_runs: tuple[str, ...] = ()
    """Finished runs under `runs/` whose weights could be used, the latest first."""

    def batch(self, most: int) -> int:
        """Return a batch size of at most `most` that wastes few images.

        An epoch drops its incomplete last batch. If it has only a few steps, the images are divided evenly: of 27
        images, batches of 16 would drop 11, batches of 13 drop one.
        """
        count = self.images if self.train_images is None else self.train_images
        steps = -(-count // most)
        return most if steps > _FEW_STEPS else max(1, count // max(1, steps))


def find_finished_runs(
    dataset: DataSet, stats: DatasetStats, place: Path = Path("runs"), most: int = 2
) -> tuple[str, ...]:
    """Return the latest finished runs in a folder whose weights could help with a data set, quoted for a shell: trained
    on other data, since these may hold out other images, with as many channels, and not to read text.
    """
    try:
        done = [one for one in place.iterdir() if (one / "result.json").is_file() and is_run(one)]
        done.sort(key=lambda one: (one / "result.json").stat().st_mtime, reverse=True)
        latest = itertools.islice((one for one in done if _could_help(one, dataset, stats)), most)
        return tuple(shlex.quote(str(one)) for one in latest)
    except OSError:
        return ()


def _could_help(run: Path, dataset: DataSet, stats: DatasetStats) -> bool:
    try:
        plan = RunFolder(run).read_plan()
    except RunError:
        return False
    other = not same_path(plan.located("data"), dataset.source)
    return other and not targets_of(plan.run.task).sequence and plan.run.channels == stats.channels


def dataset_stats(dataset: DataSet) -> DatasetStats:
    """Compute the statistics of a data set. Unreadable images are ignored here; another step reports them."""
    train = dataset["train"]
    sizes, channels, values = [], Counter[int](), []
    for index in spread(len(train), _SAMPLED):
        try:
            raw = train.raw(int(index))
            if isinstance(raw, bytes):
                header = probe(raw, name=train.names[int(index)])
                sizes.append((header.height, header.width))
                channels[1 if header.channels == 1 else 3] += 1
            else:
                sizes.append(raw.shape[:2])
                channels[1 if raw.ndim == 2 or raw.shape[2] == 1 else 3] += 1
            values.append(distinct_values(raw))
        except ImageError:
            continue
    height, width = np.median(sizes, axis=0).astype(int) if sizes else (224, 224)
    counts = dataset.targets.counts(train.labels, len(dataset.classes))
    return DatasetStats(
        images=len(train),
        classes=len(dataset.classes),
        size=(int(height), int(width)),
        uniform=len(set(sizes)) == 1,
        channels=1 if set(channels) == {1} else 3,
        imbalance=float(counts.max() / max(counts[counts > 0].min(), 1)),
        plain=_plain(train) if set(channels) == {1} else 0.0,
        depth=Depth.of(values),
        sampled=len(sizes),
    )


def _plain(images: Split) -> float:
    """Measure `DatasetStats.plain` of gray images, in 32 levels of gray."""
    shares = []
    for index in spread(len(images), _PLAIN_SAMPLED):
        with contextlib.suppress(ImageError):
            pixels = images.image(int(index), 1, at_least=(_PLAIN_SIDE, _PLAIN_SIDE))
            shares.append(np.bincount(pixels.ravel() >> 3).max() / pixels.size)
    return float(np.median(shares)) if shares else 0.0
