"""A `.tar`, `.zip` or `.tar.gz` of anything that a folder may contain, read in place."""

from __future__ import annotations

import os
from pathlib import Path

from vitral.data.archives import ARCHIVES, open_files
from vitral.data.dataset import DataSet
from vitral.data.sources.layout import read_layout
from vitral.data.targets import ANY, Labeling


def accepts(data: str) -> bool:
    """True for a file with an archive's extension."""
    return data.lower().endswith(ARCHIVES) and os.path.isfile(data)


def load(data: str, *, root: Path, download: bool, wanted: Labeling = ANY) -> DataSet:
    """Load the archive's images by its layout."""
    return read_layout(open_files(data), stem(data), wanted)


def stem(path: str) -> str:
    """Name without folder and extension: "sets/cifar10.tar.gz" -> "cifar10"."""
    name = os.path.basename(path)
    extension = max((end for end in ARCHIVES if name.lower().endswith(end)), key=len)
    return name[: -len(extension)] or "data"
