"""Patterns of shards: `train-{000000..000009}.tar`, `{train,val}-*.tar`, as shells and webdataset expand them."""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator

from vitral.errors import UsageError
from vitral.wording import natural

_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_MOST = 100_000


def is_pattern(text: str) -> bool:
    """True if braces or a wildcard are to be expanded."""
    return bool(re.search(r"\{[^{}]*(,|\.\.)[^{}]*\}", text)) or is_glob(text)


def is_glob(text: str) -> bool:
    """True for a wildcard: `*`, `?` or `[…]`."""
    return bool(re.search(r"[*?]|\[[^\]]+\]", text))


def matching(word: str) -> list[str]:
    """Paths that match a wildcard, in natural order. A path that is there is itself, and so is the folder of a pattern:
    "[x]/*.tar" is in the folder "[x]" if there is one.
    """
    if not is_glob(word) or os.path.lexists(word):
        return [word]
    folder, name = os.path.split(word)
    folder = glob.escape(folder) if os.path.isdir(folder) else folder
    return sorted(glob.glob(os.path.join(folder, name)), key=natural)


def braces(text: str) -> list[str]:
    """Expand braces, from left to right; `UsageError` for more than `_MOST` words."""
    words = list(itertools.islice(_expand(text), _MOST + 1))
    if len(words) > _MOST:
        raise UsageError(f"more than {_MOST:,} shards", where=text)
    return words


def _expand(text: str) -> Iterator[str]:
    found = re.search(r"\{([^{}]*(?:,|\.\.)[^{}]*)\}", text)
    if not found:
        yield text
        return
    for middle in _choices(found[1]):
        for rest in _expand(text[found.end() :]):
            yield text[: found.start()] + middle + rest


def _choices(inside: str) -> Iterator[str]:
    """The words of one pair of braces; a range is padded like its first or last number."""
    if not (found := _RANGE.fullmatch(inside)):
        yield from inside.split(",")
        return
    first, last = found.groups()
    width = max(len(n) for n in (first, last)) if any(n.startswith("0") and len(n) > 1 for n in (first, last)) else 0
    step = 1 if int(first) <= int(last) else -1
    yield from (f"{n:0{width}}" for n in range(int(first), int(last) + step, step))
