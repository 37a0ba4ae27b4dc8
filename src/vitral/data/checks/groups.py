"""Groups of images that a cut keeps on one side: those of a table's `group` column, and near-duplicates.

near_sets(split) -> ((3, 17), …)         equal images and near-duplicates of a split, found once and cached
joined(split, sets) -> Split             the split with these in one group each
whole_groups(groups, …) -> mask          a cut by whole groups, with about the same share of every class
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from vitral import bounded
from vitral.atomic import write_text
from vitral.containers import cores
from vitral.data.checks.near import LEAST_SIDE, SIDE, near_pairs, thumbnail
from vitral.data.dataset import DataSet, Split
from vitral.errors import ImageError
from vitral.folders import cache_folder

FEW = 3000
"""Images up to which a plan searches near-duplicates: some seconds for photographs (docs/decisions/0021)."""
_FORMAT = 2  # of the cached sets and of the search


Sets = tuple[tuple[int, ...], ...]
"""Sets of images, by number."""


def near_sets(split: Split) -> Sets:
    """Sets of near-duplicates; of small images those of equal files, of a large split those that a table repeats.

    None in shards and in bare pixels.
    """
    if len(split) < 2 or split.shard_numbers() is not None or not isinstance(_first(split), bytes):
        return ()
    if len(split) > FEW:
        return _equal(split.names)
    hashed = hashlib.blake2b(f"{_FORMAT} {split.levels or ''}".encode(), digest_size=20)
    for index in range(len(split)):
        hashed.update(f"{split.identity(index)}\0".encode(errors="surrogateescape"))
    cached = cache_folder("near") / f"{hashed.hexdigest()}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return tuple(tuple(map(int, one)) for one in bounded.read(cached)["sets"])
    found = _search(split)
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_text(cached, json.dumps({"sets": found}))
    return found


def _first(split: Split) -> bytes | np.ndarray | None:
    with contextlib.suppress(ImageError):
        return split.raw(0)
    return b""  # an unreadable file


def _search(split: Split) -> Sets:
    with ThreadPoolExecutor(cores()) as pool:
        seen = list(pool.map(lambda index: _seen(split, index), range(len(split))))
    sides = [side for side, _ in seen if side]
    if not sides or np.median(sides) < LEAST_SIDE:
        return _equal([_content(split, index) for index in range(len(split))])
    pairs = near_pairs(np.stack([small for _, small in seen]))
    return _sets(_connected(len(split), [(one.first, one.second) for one in pairs]))


def _equal(keys: Sequence[str]) -> Sets:
    """Sets of images with the same key."""
    numbers: dict[str, int] = {}
    return _sets(np.fromiter((numbers.setdefault(key, len(numbers)) for key in keys), np.int64, len(keys)))


def _content(split: Split, index: int) -> str:
    """Hash of an image's file; of an unreadable one its number."""
    with contextlib.suppress(ImageError):
        if isinstance(raw := split.raw(index), bytes):
            return hashlib.blake2b(raw, digest_size=20).hexdigest()
    return str(index)


def _seen(split: Split, index: int) -> tuple[int, np.ndarray]:
    """Shorter side and thumbnail of an image; 0 and a flat one for an unreadable image."""
    try:
        pixels = split.image(index, at_least=(2 * SIDE, 2 * SIDE))
    except ImageError:
        return 0, np.zeros(SIDE * SIDE + 2, np.uint8)
    return min(pixels.shape[:2]), thumbnail(pixels)


def with_near(dataset: DataSet, sets: Sets) -> DataSet:
    """Return the data with these sets of train images in one group each."""
    if not sets:
        return dataset
    return replace(dataset, splits={**dataset.splits, "train": joined(dataset["train"], sets)})


def joined(split: Split, sets: Sequence[Sequence[int]]) -> Split:
    """Return the split with the images of each set in one group, together with the groups that it has."""
    links = [(one[0], other) for one in sets for other in one[1:] if max(one[0], other) < len(split)]
    if split.groups is not None:
        _, first, place = np.unique(split.groups, return_index=True, return_inverse=True)
        links += list(enumerate(first[place].tolist()))
    return replace(split, groups=_connected(len(split), links)) if links else split


def count_groups(split: Split) -> int:
    """Number of groups of several images."""
    return 0 if split.groups is None else int((np.unique(split.groups, return_counts=True)[1] > 1).sum())


def whole_groups(groups: np.ndarray, strata: np.ndarray, taken: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Choose whole groups, in this order of the images, until about `taken` (K,) images of each class are chosen.

    Returns a mask (n,). A group is chosen if it brings the counts nearer to `taken`, and if every class keeps an image
    that is not chosen; if there is none, the smallest, unless it has over a third of all images. If each image is its
    own group, these are the first `taken` of each class.
    """
    missing, left = taken.astype(np.int64), np.bincount(strata, minlength=len(taken))
    chosen = np.zeros(len(groups), bool)
    _, first = np.unique(groups[order], return_index=True)
    by_group = order[np.argsort(groups[order], kind="stable")]
    starts = np.searchsorted(groups[by_group], np.unique(groups))
    members = np.split(by_group, starts[1:])
    for number in np.argsort(first, kind="stable"):
        counts = np.bincount(strata[members[number]], minlength=len(taken))
        nearer = np.square(missing).sum() > np.square(missing - counts).sum()
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
