"""torchvision, imported where it pays: that takes as long as importing torch, and many commands read no picture or few.

Reading and preparing a picture goes without it, by Pillow and torch, to the same pixels.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

_importing = threading.Lock()


@cache  # asked for often: later calls take no lock, which a process forked meanwhile would never get
def torchvision() -> Any:
    """The package, with its decoders and its transforms.

    Pictures are decoded in many threads. Two that import different parts of a package wait for each other, and Python
    then gives one of them half a module: so there is one place that imports, and one thread at a time.
    """
    with _importing:
        import torchvision
        import torchvision.io
        import torchvision.transforms.v2

    return torchvision


def expect(pictures: int) -> None:
    """Load the faster decoder where so many are to be decoded that it may save as much time as it takes to import: some
    3 s, for nearly a millisecond of each photograph (docs/log.md, benchmarks/decode.py).
    """
    if pictures >= _MANY:
        torchvision()


_MANY = 3000


def loaded() -> bool:
    """Whether `torchvision` has been called, and has come to its end."""
    return torchvision.cache_info().currsize > 0
