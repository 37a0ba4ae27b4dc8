"""Cutting a validation split, and taking a random part of a set; both are functions of a seed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from vitral.data.dataset import DataSet, Split, in_order
from vitral.errors import DataError, UsageError

FRACTION = 0.1
"""Share of train that validates when nothing is said …"""
LARGEST = 2500
"""… and the most pictures that this takes: enough to choose an epoch by, and the rest is there to learn from."""


def with_validation(dataset: DataSet, fraction: float | None = None, seed: int = 0) -> DataSet:
    """The data set with a "val" split; where it has none, one is cut from train, with the same share of every class.

    `fraction` of train; None takes 10 %, but at most 2,500 pictures; 0 cuts nothing. A class keeps at least one picture
    in train, and one with two or more has at least one in val where val is large enough for all classes. Test is left
    alone.
    """
    if fraction is not None and not 0 <= fraction < 1:
        raise UsageError(f"the share for validation must be from 0 to below 1, not {fraction}", hint="0.1 takes 10 %")
    if "val" in dataset.splits or fraction == 0:
        return dataset
    train = dataset["train"]
    counts = np.bincount(train.labels, minlength=len(dataset.classes))
    room = int(np.maximum(counts - 1, 0).sum())
    wanted = min(round(len(train) * FRACTION), LARGEST) if fraction is None else round(len(train) * fraction)
    if fraction is None:
        wanted = max(wanted, min(int((counts > 1).sum()), LARGEST))
    wanted = min(max(wanted, 1), room)
    if not wanted:
        raise DataError(
            "cannot cut a validation split",
            where=dataset.source,
            why="every class has a single picture",
            hint="add pictures, or train without validation: --val-fraction 0",
        )
    rng = np.random.default_rng(seed)
    taken = _shares(counts, wanted, rng)
    shuffled = rng.permutation(len(train))
    # A stable sort by label keeps the shuffled order within each class: its first `taken` pictures validate.
    by_class = shuffled[np.argsort(train.labels[shuffled], kind="stable")]
    rank = np.arange(len(train)) - np.repeat(np.cumsum(counts) - counts, counts)
    in_val = rank < np.repeat(taken, counts)
    parts = {"train": train.select(np.sort(by_class[~in_val])), "val": train.select(np.sort(by_class[in_val]))}
    return replace(dataset, splits=in_order({**dataset.splits, **parts}))


def _shares(counts: np.ndarray, wanted: int, rng: np.random.Generator) -> np.ndarray:
    """How many of `wanted` pictures come from each class (K,): in proportion, by largest remainder.

    scikit-learn's stratified splits refuse classes of one picture and splits smaller than the number of classes, which
    are what small sets of one's own have.
    """
    most = np.maximum(counts - 1, 0)
    least = np.minimum(most, 1) if wanted >= (most > 0).sum() else np.zeros_like(most)
    exact = wanted * counts / counts.sum()
    shares = np.clip(np.floor(exact).astype(np.int64), least, most)
    chance = rng.random(len(counts))  # decides between equal remainders
    while (rest := wanted - int(shares.sum())) != 0:
        step = 1 if rest > 0 else -1
        free = np.flatnonzero(shares < most if step > 0 else shares > least)
        order = free[np.lexsort((chance[free], step * (shares - exact)[free]))]
        shares[order[: abs(rest)]] += step
    return shares


def subset(dataset: DataSet, train: float, val: float, seed: int = 0) -> DataSet:
    """A random share of the train and of the val pictures, in their order; other splits stay.

    Without a val split both are drawn from train and have no picture in common: `subset(places365, 0.10, 0.05)` is the
    Places365 write-up's 3,650 and 1,825 pictures.
    """
    shares = {"train": train, "val": val}
    apart = "val" not in dataset.splits
    if not (0 < train <= 1 and 0 <= val <= 1 and (not apart or train + val <= 1)):
        raise UsageError(f"shares of {train} and {val} cannot be taken", hint="from 0 to 1, and together at most 1")
    rng = np.random.default_rng(seed)
    parts: dict[str, Split] = {}
    if apart:
        pictures = dataset["train"]
        order = rng.permutation(len(pictures))
        first, second = round(train * len(order)), round(val * len(order))
        parts = {"train": pictures.select(np.sort(order[:first]))}
        if second:
            parts["val"] = pictures.select(np.sort(order[first : first + second]))
    else:
        for name, share in shares.items():
            pictures = dataset[name]
            order = rng.permutation(len(pictures))
            parts[name] = pictures.select(np.sort(order[: round(share * len(order))]))
    if not all(len(part) for part in parts.values()):
        raise UsageError("such a small share leaves no pictures", where=dataset.source, hint="take a larger share")
    return replace(dataset, splits=in_order({**dataset.splits, **parts}))
