"""A `.tar`, `.zip` or `.tar.gz` of anything that a folder may contain, read in place."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from vitral.data.archives import ARCHIVES, Tar, open_files
from vitral.data.dataset import DataSet
from vitral.data.files import is_image
from vitral.data.sources.layout import read_layout
from vitral.data.sources.shards import of_pattern
from vitral.data.targets import ANY, Labeling


def accepts(data: str) -> bool:
    """True for a file with an archive's extension."""
    return data.lower().endswith(ARCHIVES) and os.path.isfile(data)


def load(data: str, *, root: Path, download: bool, wanted: Labeling = ANY) -> DataSet:
    """Load the archive's images by its layout; a tar of images with a .cls beside each is a single shard."""
    files = open_files(data)
    if isinstance(files, Tar) and _is_shard(files.paths):
        return of_pattern(data)
    return read_layout(files, stem(data), wanted)


def _is_shard(paths: Sequence[str]) -> bool:
    """True if most images have their class in a file of their name beside them."""
    keys = {path.removesuffix(".cls") for path in paths if path.endswith(".cls")}
    images = [path for path in paths if is_image(path)]
    return bool(keys) and 2 * sum(path.rpartition(".")[0] in keys for path in images) > len(images)


def stem(path: str) -> str:
    """Name without folder and extension: "sets/cifar10.tar.gz" -> "cifar10"."""
    name = os.path.basename(path)
    extension = max((end for end in ARCHIVES if name.lower().endswith(end)), key=len)
    return name[: -len(extension)] or "data"
