"""Find the images that two splits share, wherever their data are and however a path to them is typed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from vitral.data.dataset import UNREADABLE, Split, relative_names
from vitral.data.spellings import nfc
from vitral.errors import ImageError


def same_images(one: Split, other: Split, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield the numbers, in `one` and in `other`, of the images that are in both, in the order of `one`.

    Images are the same if class folder and file name are, and they are one file or have equal bytes: in a part of the
    data, at the end of a link, in a copy or in shards. At most `most` images, evenly spread, are compared.
    """
    there = defaultdict[str, list[int]](list)
    for number, name in enumerate(_short_names(other)):
        there[name].append(number)
    named = [(number, there[name]) for number, name in enumerate(_short_names(one)) if name in there]
    for number, candidates in named[:: -(-len(named) // most) or 1] if most else named:
        found = next((place for place in candidates if _is_same(one, number, other, place)), None)
        if found is not None:
            yield number, found


def _short_names(images: Split) -> list[str]:
    """Names without the folders above the class, composed: a copy may have decomposed ones."""
    return [nfc("/".join(name.split("/")[-2:])) for name in relative_names(images.names)]


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
