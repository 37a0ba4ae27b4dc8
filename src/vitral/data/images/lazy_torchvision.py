"""Lazy import of torchvision: it takes as long as importing torch, and many commands read few images or none.

Without it, Pillow and torch decode and preprocess images to the same pixels.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

_importing = threading.Lock()


@cache  # later calls take no lock, on which a process forked during the import would hang
def torchvision() -> Any:
    """Import the package, with its decoders and its transforms.

    Images are decoded in many threads. Two threads that import different parts of a package deadlock, and Python then
    gives one of them a half-initialized module: so the import happens only here, under a lock.
    """
    with _importing:
        import torchvision
        import torchvision.io
        import torchvision.transforms.v2

    return torchvision


def preload(images: int) -> None:
    """Import torchvision if decoding this many images may save as much time as the import takes: some 3 s, against
    nearly a millisecond per photograph (docs/log/start-up.md).
    """
    if images >= _MANY:
        torchvision()


_MANY = 3000


def loaded() -> bool:
    """True if `torchvision` has been called and has returned."""
    return torchvision.cache_info().currsize > 0
