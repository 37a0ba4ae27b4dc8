"""A `.tar`, `.zip` or `.tar.gz` of anything that a folder may hold, read as it lies."""

from __future__ import annotations

import os
from pathlib import Path

from vitral.data.dataset import DataSet
from vitral.data.files import ARCHIVES, open_files
from vitral.data.sources.layout import read_layout


def accepts(data: str) -> bool:
    """Whether this is a file with an archive's extension."""
    return data.lower().endswith(ARCHIVES) and os.path.isfile(data)


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """The archive's pictures by whichever layout it has."""
    return read_layout(open_files(data), stem(data))


def stem(path: str) -> str:
    """ "sets/cifar10.tar.gz" -> "cifar10"."""
    name = os.path.basename(path)
    extension = max((end for end in ARCHIVES if name.lower().endswith(end)), key=len)
    return name[: -len(extension)] or "data"
