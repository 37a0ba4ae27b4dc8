"""A folder of class folders, of IDX files, or of pictures with a table."""

from __future__ import annotations

import os
from pathlib import Path

from vitral.data.dataset import DataSet
from vitral.data.files import Folder
from vitral.data.sources.layout import read_layout


def accepts(data: str) -> bool:
    """Whether this is a folder."""
    return os.path.isdir(data)


def load(data: str, *, root: Path, download: bool) -> DataSet:
    """The folder's pictures by whichever layout it has."""
    name = os.path.basename(os.path.abspath(data)) or "data"
    return read_layout(Folder(data), name)
