"""Groups of images that belong together: those of a table's `group` column, rows of one file, copies, near-duplicates.

A cut keeps a group on one side, and an interval counts it instead of its images (`vitral.evaluation.intervals`).

near_sets(split) -> ((3, 17), …)         equal images and near-duplicates of a split, found once and cached
with_copies(split) -> Split              the split with rows of one file and equal files in one group each
joined(split, sets) -> Split             the split with these in one group each
whole_groups(groups, …) -> mask          a cut by whole groups, with about the same share of every class
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np

from vitral import bounded
from vitral.atomic import write_text
from vitral.containers import cores
from vitral.data.checks.near import LEAST_SIDE, SIDE, near_pairs, thumbnail
from vitral.data.dataset import DataSet, Split
from vitral.data.images.decode import DECODING
from vitral.data.same import contents
from vitral.errors import ImageError
from vitral.folders import cache_folder

FEW = 3000
"""Images up to which a plan searches near-duplicates: some seconds for photographs (docs/decisions/0021)."""
_FORMAT = 3  # of the cached sets and of the search


Sets = tuple[tuple[int, ...], ...]
"""Sets of images, by number."""


def near_sets(split: Split) -> Sets:
    """Sets of near-duplicates; of small images and bare pixels those of equal ones, of a large split those that a table
    repeats.

    None in shards.
    """
    if len(split) < 2 or split.shard_numbers() is not None:
        return ()
    if len(split) > FEW or not isinstance(_first(split), bytes):
        return _copies(split)
    hashed = hashlib.blake2b(f"{_FORMAT} {DECODING} {split.levels or ''}".encode(), digest_size=20)
    for index in range(len(split)):
        hashed.update(f"{split.identity(index)}\0".encode(errors="surrogateescape"))
    cached = cache_folder("near") / f"{hashed.hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return read_sets(bounded.read(cached)["sets"])
    found = _search(split)
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_text(cached, json.dumps({"sets": found}))
    return found


def read_sets(plain: Iterable[Iterable[Any]]) -> Sets:
    """Read sets from JSON; `ValueError` or `TypeError` for anything else."""
    return tuple(tuple(map(int, one)) for one in plain)


def _first(split: Split) -> bytes | np.ndarray | None:
    with contextlib.suppress(ImageError):
        return split.raw(0)
    return b""  # an unreadable file


def _search(split: Split) -> Sets:
    with ThreadPoolExecutor(cores()) as pool:
        seen = list(pool.map(lambda index: _seen(split, index), range(len(split))))
    sides, copies = [side for side, _ in seen if side], _copies(split)
    if not sides or np.median(sides) < LEAST_SIDE:
        return copies
    pairs = near_pairs(np.stack([small for _, small in seen]))
    return _sets(_connected(len(split), [*((one.first, one.second) for one in pairs), *_links(copies)]))


def with_copies(split: Split) -> Split:
    """Return the split with the rows of one file, and the equal images of a small split, in one group each."""
    return joined(split, _copies(split))


def _copies(split: Split) -> Sets:
    """Sets of images of one name; of up to `FEW` images that are not in shards, those of the same content."""
    if len(split) > FEW or split.shard_numbers() is not None:
        return _equal(split.names)
    digests = contents(split, range(len(split)))
    return _equal([digest or name for digest, name in zip(digests, split.names, strict=True)])


def _equal(keys: Sequence[str]) -> Sets:
    """Sets of images with the same key."""
    numbers: dict[str, int] = {}
    return _sets(np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(keys)))


def _seen(split: Split, index: int) -> tuple[int, np.ndarray]:
    """Shorter side and thumbnail of an image; 0 and a flat one for an unreadable image."""
    try:
        pixels = split.image(index, at_least=(2 * SIDE, 2 * SIDE))
    except ImageError:
        return 0, np.zeros(SIDE * SIDE + 2, np.uint8)
    return min(pixels.shape[:2]), thumbnail(pixels)


def with_near(dataset: DataSet, near: Mapping[str, Sets]) -> DataSet:
    """Return the data with these sets of images of the named splits in one group each; other splits are left out."""
    found = {name: joined(dataset[name], sets) for name, sets in near.items() if name in dataset.splits}
    return replace(dataset, splits={**dataset.splits, **found})


def near_held_out(dataset: DataSet) -> dict[str, Sets]:
    """Near-duplicates within the data's own validation and test splits, of splits that have some."""
    return {name: sets for name in ("val", "test") if name in dataset.splits and (sets := near_sets(dataset[name]))}


def joined(split: Split, sets: Sequence[Sequence[int]]) -> Split:
    """Return the split with the images of each set in one group, together with the groups that it has."""
    links = [(first, other) for first, other in _links(sets) if max(first, other) < len(split)]
    if not links:
        return split
    return replace(split, groups=common_groups([split.groups, _connected(len(split), links)]))


def common_groups(several: Sequence[np.ndarray | None]) -> np.ndarray | None:
    """Return groups (n,) in which images are together that are together in any of these; None if none has groups."""
    known = [one for one in several if one is not None]
    links = list[tuple[int, int]]()
    for groups in known:
        _, first, place = np.unique(groups, return_index=True, return_inverse=True)
        links += enumerate(first[place].tolist())
    return _connected(len(known[0]), links) if known else None


def _links(sets: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return [(one[0], other) for one in sets for other in one[1:]]


def groups_of_several(split: Split) -> int:
    """Number of groups of several images."""
    return 0 if split.groups is None else int((np.unique(split.groups, return_counts=True)[1] > 1).sum())


def whole_groups(
    groups: np.ndarray, strata: np.ndarray, taken: np.ndarray, order: np.ndarray, kept: np.ndarray | None = None
) -> np.ndarray:
    """Choose whole groups, in this order of the images, until about `taken` (K,) images of each class are chosen.

    Returns a mask (n,). A group is chosen if it brings the counts nearer to `taken`, and if every class keeps an image
    that is not chosen; if there is none, the smallest, unless it has over a third of all images. If each image is its
    own group, these are the first `taken` of each class. Groups of images that are `kept`, by number, come first, and
    are chosen whenever every class keeps an image.
    """
    held = np.zeros(len(groups), bool) if kept is None else np.isin(np.arange(len(groups)), kept)
    missing, left = taken.astype(np.int64), np.bincount(strata, minlength=len(taken))
    chosen = np.zeros(len(groups), bool)
    _, first = np.unique(groups[order], return_index=True)
    by_group = order[np.argsort(groups[order], kind="stable")]
    starts = np.searchsorted(groups[by_group], np.unique(groups))
    members = np.split(by_group, starts[1:])
    for number in np.argsort(first, kind="stable"):
        counts = np.bincount(strata[members[number]], minlength=len(taken))
        nearer = np.square(missing).sum() > np.square(missing - counts).sum() or held[members[number]].any()
        if nearer and (left - counts)[counts > 0].min() > 0:
            chosen[members[number]] = True
            missing, left = missing - counts, left - counts
    if not chosen.any():
        smallest = min(members, key=len)
        counts = np.bincount(strata[smallest], minlength=len(taken))
        chosen[smallest] = 3 * len(smallest) <= len(groups) and (left - counts)[counts > 0].min() > 0
    return chosen


def folds_of(strata: np.ndarray, groups: np.ndarray | None, folds: int, seed: int = 0) -> np.ndarray:
    """Fold of each image, (n,), with about the same share of every class; the images of a group are in one."""
    order = np.random.default_rng(seed).permutation(len(strata))
    groups = np.arange(len(strata)) if groups is None else groups
    names, first = np.unique(groups[order], return_index=True)
    ranks = np.lexsort((first, strata[order[first]]))  # groups by the class of their first image, at random within it
    fold = np.empty(len(names), np.int64)
    fold[ranks] = np.arange(len(names)) % folds
    return fold[np.searchsorted(names, groups)]


def _connected(count: int, links: Sequence[tuple[int, int]]) -> np.ndarray:
    """Number of the group of each image, (count,) int64: linked images share one, all others have their own."""
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    ends = np.array(links, np.int64).reshape(-1, 2).T
    graph = coo_array((np.ones(ends.shape[1], bool), (ends[0], ends[1])), shape=(count, count))
    return np.asarray(connected_components(graph, directed=False)[1], np.int64)


def _sets(groups: np.ndarray) -> Sets:
    """Sets of more than one image."""
    several = np.flatnonzero(np.bincount(groups)[groups] > 1)
    order = several[np.argsort(groups[several], kind="stable")]
    parts = np.split(order, np.flatnonzero(np.diff(groups[order])) + 1) if len(order) else []
    return tuple(sorted(tuple(part.tolist()) for part in parts))
