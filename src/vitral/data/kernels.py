"""torchvision, imported when the first picture needs it: that takes as long as importing torch, and many commands, and
all that end in a message, read no picture.
"""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

_importing = threading.Lock()


@cache  # asked for every picture: later calls take no lock, which a process forked meanwhile would never get
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
