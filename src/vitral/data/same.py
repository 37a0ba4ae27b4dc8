"""Find images again, wherever they are and whatever they are called.

identities(split) -> [Identity(…), …]        what identifies each image
find(identities, split) -> {0: 17, 1: 4}     their places in a split
same_images(one, other) -> (0, 3), (1, 4)    the images that two splits share
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import xxhash

from vitral.containers import cores
from vitral.data.dataset import UNREADABLE, Split, relative_names
from vitral.data.spellings import nfc
from vitral.errors import ImageError


class Identity(NamedTuple):
    """Name, size and digest of an image, by which it is found again."""

    name: str
    """Relative to the data."""
    size: int
    """Bytes of its file, or of its pixels if there is no file; -1 for an unreadable image."""
    digest: str
    """XXH3-128 of these bytes; empty for an unreadable image."""


def identities(split: Split, numbers: Sequence[int] | None = None) -> list[Identity]:
    """Return what identifies the images of a split, by default all; each is read."""
    names = relative_names(split.names)
    chosen = range(len(split)) if numbers is None else numbers
    digests = contents(split, chosen)
    return [Identity(names[i], split.size(i), digest) for i, digest in zip(chosen, digests, strict=True)]


def contents(split: Split, numbers: Iterable[int]) -> list[str]:
    """Return the digest of the file or pixels of each of these images, and "" for an unreadable one."""

    def content(number: int) -> str:
        with suppress(ImageError):
            raw = split.raw(number)
            shape, data = ("", raw) if isinstance(raw, bytes) else (f"{raw.shape} ", np.ascontiguousarray(raw).data)
            return shape + str(xxhash.xxh3_128_hexdigest(data))
        return ""

    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(content, numbers))


def find(wanted: Sequence[Identity], split: Split) -> dict[int, int]:
    """Return the places in `split` of the images that are there, by their numbers in `wanted`.

    An image of the same class folder and name is looked at first. The others are looked for by size and digest, so
    that they are found after a move or a new name. Of equal images each is found once.
    """
    found: dict[int, int] = {}
    there = _places(split)
    named = [(n, place) for n, one in enumerate(wanted) if one.digest for place in there.get(short_name(one.name), ())]
    taken = set[int]()
    for (number, place), digest in zip(named, contents(split, [place for _, place in named]), strict=True):
        if digest == wanted[number].digest and number not in found and place not in taken:
            found[number] = place
            taken.add(place)
    missing = defaultdict[str, list[int]](list)
    for number, one in enumerate(wanted):
        if one.digest and number not in found:
            missing[one.digest].append(number)
    sizes = {wanted[numbers[0]].size for numbers in missing.values()}
    rest = [place for place in range(len(split) if sizes else 0) if place not in taken and split.size(place) in sizes]
    for place, digest in zip(rest, contents(split, rest), strict=True):
        if numbers := missing.get(digest):
            found[numbers.pop(0)] = place
    return found


def same_images(one: Split, other: Split, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the numbers, in `one` and in `other`, of the images that are in both, in the order of `one`.

    Images are the same if they are one file or have equal bytes: in a part of the data, at the end of a link, in a
    copy, in shards, or after a move to another class. With `most`, at most so many images, evenly spread, are compared,
    and only with those of the same class folder and name.
    """
    there = _places(other)
    names = list(map(short_name, relative_names(one.names)))
    named = [(number, there[name]) for number, name in enumerate(names) if name in there]
    found: dict[int, int] = {}
    for number, candidates in named[:: -(-len(named) // most) or 1] if most else named:
        place = next((place for place in candidates if _is_same(one, number, other, place)), None)
        if place is not None:
            found[number] = place
    if not most and len(found) < min(len(one), len(other)):
        found |= _renamed(one, other, found)
    yield from sorted(found.items())


def _renamed(one: Split, other: Split, found: dict[int, int]) -> dict[int, int]:
    """Find images under other names among those that are not `found`."""
    taken = set(found.values())
    rest = [place for place in range(len(other)) if place not in taken]
    sizes = {other.size(place) for place in rest}
    lost = [number for number in range(len(one)) if number not in found and one.size(number) in sizes]
    again = find(identities(one, lost), other.select(rest)) if lost else {}
    return {lost[number]: rest[place] for number, place in again.items()}


def _places(split: Split) -> dict[str, list[int]]:
    """Class folder and name → numbers of the images."""
    there = defaultdict[str, list[int]](list)
    for number, name in enumerate(relative_names(split.names)):
        there[short_name(name)].append(number)
    return there


def short_name(name: str) -> str:
    """Return a name without the folders above the class, composed: a copy may have decomposed ones."""
    return nfc("/".join(name.split("/")[-2:]))


def _is_same(one: Split, number: int, other: Split, place: int) -> bool:
    identity = one.identity(number)
    if identity == other.identity(place):
        return identity != UNREADABLE
    try:
        first, second = one.raw(number), other.raw(place)
    except ImageError:
        return False
    if isinstance(first, bytes) or isinstance(second, bytes):
        return type(first) is type(second) and first == second
    return np.array_equal(first, second)
