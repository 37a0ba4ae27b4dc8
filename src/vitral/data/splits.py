"""Cut a validation split, and select a random subset of a data set; both are functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vitral.data.checks.groups import whole_groups
from vitral.data.dataset import DataSet, Split, in_order
from vitral.errors import DataError, UsageError

FRACTION = 0.1
"""Default share of train that becomes the validation split …"""
LARGEST = 2500
"""… and its largest size: enough to choose an epoch, and leaves the rest for training."""


def with_validation(
    dataset: DataSet, fraction: float | None = None, seed: int = 0, kept: Sequence[int] = ()
) -> DataSet:
    """Return the data set with a "val" split, cut from train with the same share of every class if it has none.

    `fraction` of train; None takes 10%, but at most 2,500 images; 0 cuts nothing. A class keeps at least one image
    in train, and a class with two or more has at least one in val if val is large enough for all classes. The images
    of a group (`Split.groups`) stay on one side, so that shares are then approximate. Test does not change.

    The images `kept`, by number in train, are in val before others are drawn, also if they are more than the share.
    """
    if fraction is not None and not 0 <= fraction < 1:
        raise UsageError(f"the share for validation must be from 0 to below 1, not {fraction}", hint="0.1 takes 10%")
    if "val" in dataset.splits or fraction == 0:
        return dataset
    train = dataset["train"]
    strata = dataset.targets.strata(train.labels, len(dataset.classes))
    counts = np.bincount(strata, minlength=len(dataset.classes))
    room = int(np.maximum(counts - 1, 0).sum())
    size = min(round(len(train) * FRACTION), LARGEST) if fraction is None else round(len(train) * fraction)
    if fraction is None:
        size = max(size, min(int((counts > 1).sum()), LARGEST))
    size = min(max(size, 1), room)
    if not size:
        what = "cannot cut a validation split"
        hint = "add images, or train without validation: --val-fraction 0"
        raise DataError(what, where=dataset.source, why="every class has a single image", hint=hint)
    rng = np.random.default_rng(seed)
    taken = _shares(counts, size, rng)
    shuffled = rng.permutation(len(train))
    first_of_all = _whole(train, kept)
    if len(first_of_all):
        held = np.bincount(strata[first_of_all], minlength=len(counts))
        taken = np.minimum(np.maximum(taken, held), np.maximum(counts - 1, 0))
        shuffled = np.concatenate([first_of_all, shuffled[~np.isin(shuffled, first_of_all)]])
    # A stable sort by label keeps the shuffled order within each class: its first `taken` images go to val.
    by_class = shuffled[np.argsort(strata[shuffled], kind="stable")]
    rank = np.arange(len(train)) - np.repeat(np.cumsum(counts) - counts, counts)
    in_val = rank < np.repeat(taken, counts)
    first, second = np.sort(by_class[~in_val]), np.sort(by_class[in_val])
    if train.groups is not None:
        in_val = whole_groups(train.groups, strata, taken, shuffled, first_of_all)
        first, second = np.flatnonzero(~in_val), np.flatnonzero(in_val)
        if not len(second):
            raise DataError(
                "cannot cut a validation split",
                where=dataset.source,
                why="groups, of a column `group` or of near-duplicates, stay on one side, and each holds all images of "
                "a class, or far more than the share",
                hint=f"vitral data check {dataset.source} counts near-duplicates; give a split column, a larger "
                "--val-fraction, or train without validation: --val-fraction 0",
            )
    parts = {"train": train.select(first), "val": train.select(second)}
    return replace(dataset, splits=in_order({**dataset.splits, **parts}))


def _whole(train: Split, kept: Sequence[int]) -> np.ndarray:
    """Numbers of the kept images and of those in a group with one of them."""
    numbers = np.array([number for number in kept if number < len(train)], np.int64)
    return numbers if train.groups is None else np.flatnonzero(np.isin(train.groups, train.groups[numbers]))


def _shares(counts: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Distribute `size` images over the classes (K,): in proportion, by largest remainder.

    scikit-learn's stratified splits refuse classes of one image and splits smaller than the number of classes, both of
    which are common in small private data sets.
    """
    most = np.maximum(counts - 1, 0)
    least = np.minimum(most, 1) if size >= (most > 0).sum() else np.zeros_like(most)
    exact = size * counts / counts.sum()
    shares = np.clip(np.floor(exact).astype(np.int64), least, most)
    chance = rng.random(len(counts))  # decides between equal remainders
    while (rest := size - int(shares.sum())) != 0:
        step = 1 if rest > 0 else -1
        free = np.flatnonzero(shares < most if step > 0 else shares > least)
        order = free[np.lexsort((chance[free], step * (shares - exact)[free]))]
        shares[order[: abs(rest)]] += step
    return shares


def _nested(labels: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Numbers of a stratified share of the images, ascending: the first of one order for all shares."""
    order = rng.permutation(len(labels))
    order = order[np.argsort(labels[order], kind="stable")]  # shuffled within each class
    counts = np.bincount(labels)
    rank = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = np.where(rank == 0, -1.0, (rank + 0.5) / np.repeat(counts, counts))  # an image of every class comes first
    first = np.lexsort((rng.random(len(order)), place))[: max(1, round(share * len(order)))]
    return np.sort(order[first])


def subset(dataset: DataSet, train: float, val: float, seed: int = 0, *, stratified: bool = False) -> DataSet:
    """Select a random share of the train and of the val images, in their order; other splits do not change.

    Without a val split both are drawn from train and are disjoint: `subset(places365, 0.10, 0.05)` is the Places365
    write-up's 3,650 and 1,825 images. With `stratified` every class has the same share of train, at least one image
    if there are enough, and a smaller share is a part of every larger one of the same seed.
    """
    shares = {"train": train, "val": val}
    val_from_train = "val" not in dataset.splits
    if not (0 < train <= 1 and 0 <= val <= 1 and (not val_from_train or train + val <= 1)):
        raise UsageError(f"shares of {train} and {val} are not possible", hint="from 0 to 1, and together at most 1")
    if stratified:
        if val not in (0, 1):
            raise UsageError("a stratified share keeps the validation images", hint="leave out --val-share")
        groups = dataset.targets.strata(dataset["train"].labels, len(dataset.classes))
        chosen = _nested(groups, train, np.random.default_rng(seed))
        return replace(dataset, splits={**dataset.splits, "train": dataset["train"].select(chosen)})
    rng = np.random.default_rng(seed)
    parts: dict[str, Split] = {}
    if val_from_train:
        images = dataset["train"]
        order = rng.permutation(len(images))
        first, second = round(train * len(order)), round(val * len(order))
        parts = {"train": images.select(np.sort(order[:first]))}
        if second:
            chosen = order[first : first + second]
            if (own := images.groups) is not None:
                chosen = chosen[~np.isin(own[chosen], own[order[:first]])]
            parts["val"] = images.select(np.sort(chosen))
    else:
        for name, share in shares.items():
            images = dataset[name]
            order = rng.permutation(len(images))
            parts[name] = images.select(np.sort(order[: round(share * len(order))]))
    if not all(len(part) for part in parts.values()):
        raise UsageError("such a small share leaves no images", where=dataset.source, hint="take a larger share")
    return replace(dataset, splits=in_order({**dataset.splits, **parts}))
