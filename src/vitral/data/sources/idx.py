"""IDX files, the layout of MNIST: `train-images-idx3-ubyte`, `t10k-labels-idx1-ubyte` …, gzip-compressed or not.

Format: yann.lecun.com/exdb/mnist. Two zero bytes, the type (8 = unsigned byte), the number of dimensions, each
dimension as a big-endian 32-bit integer, then the values.
"""

from __future__ import annotations

import gzip
import io
import math
import posixpath
import re
import struct
import zlib

import numpy as np

from vitral.data.dataset import SPLIT_NAMES, DataSet, Numbered, Pixels, Split, in_order
from vitral.data.files import Files
from vitral.data.targets.classes import index_labels
from vitral.errors import DataError

IDX_LIMIT = 4 << 30
"""Largest IDX file, in bytes after decompression; it is held in memory."""

_NAME = re.compile(r"(?P<set>.*?)(?P<split>[a-z0-9]+)[-_.](?P<what>images|labels)[-_.]idx[134][-_.]ubyte(\.gz)?", re.I)
_SPLITS = {**SPLIT_NAMES, "t10k": "test"}


def read(files: Files, name: str) -> DataSet | None:
    """Read the images of IDX files; None if there are none."""
    paths_of: dict[str, dict[str, str]] = {}
    sets = set()
    for path in sorted(files.paths, key=len, reverse=True):  # "x.gz" before "x": the decompressed file counts
        match = _NAME.fullmatch(posixpath.basename(path))
        if match and match["split"].lower() in _SPLITS:
            paths_of.setdefault(_SPLITS[match["split"].lower()], {})[match["what"].lower()] = path
            sets.add((posixpath.dirname(path), match["set"]))
    if not paths_of:
        return None
    if len(sets) > 1:
        raise DataError("more than one IDX set", where=files.where, why="the choice is ambiguous", hint="keep one")
    arrays = {split: _read_split(files, split, paths) for split, paths in paths_of.items()}
    texts = {split: [str(label) for label in labels] for split, (_, labels) in arrays.items()}
    classes, labels = index_labels(texts, files.where)
    splits = {
        split: Split(Numbered(f"{name}/{split}", len(images)), labels[split], Pixels(images))
        for split, (images, _) in arrays.items()
    }
    return DataSet(name, classes, in_order(splits), files.where)


def _read_split(files: Files, split: str, paths: dict[str, str]) -> tuple[np.ndarray, list[int]]:
    """Read images uint8 (n, H, W) or (n, H, W, C), and their n labels."""
    for what in ("images", "labels"):
        if what not in paths:
            raise DataError(
                f"no IDX file with the {what} of the {split} split",
                where=files.where,
                hint=f"put {split}-{what}-idx{'3' if what == 'images' else '1'}-ubyte.gz next to the other",
            )
    images, labels = _read_idx(files, paths["images"], (3, 4)), _read_idx(files, paths["labels"], (1,))
    if len(images) != len(labels):
        raise DataError(
            f"{len(images):,} images but {len(labels):,} labels in the {split} split",
            where=files.prefix + paths["labels"],
            why="the two files do not belong together, or one is damaged",
        )
    return images, labels.tolist()


def _read_idx(files: Files, path: str, dimensions: tuple[int, ...]) -> np.ndarray:
    """Read the array of one file and check its size against the header."""
    where = files.prefix + path

    def damaged(why: str) -> DataError:
        return DataError("not a valid IDX file", where=where, why=why, hint="download it again")

    try:
        packed = files.read(path, IDX_LIMIT)
        with gzip.open(io.BytesIO(packed)) if path.endswith(".gz") else io.BytesIO(packed) as stream:
            zeros, kind, axes = struct.unpack(">HBB", stream.read(4).ljust(4, b"\xff"))
            if zeros or kind != 8 or axes not in dimensions:
                raise damaged("it does not start with the magic number of IDX bytes with the right dimensions")
            shape = struct.unpack(f">{axes}I", stream.read(4 * axes).ljust(4 * axes, b"\0"))
            size = math.prod(shape)
            if not 0 < size <= IDX_LIMIT:
                raise damaged(f"its header states {' × '.join(map(str, shape))}")
            data = stream.read(size + 1)  # one byte more, to detect a file that is too long
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise damaged(str(error)) from error
    if len(data) != size:
        more = "more" if len(data) > size else f"{len(data):,}"
        raise damaged(f"its header states {size:,} bytes, but there are {more}")
    return np.frombuffer(data, np.uint8).reshape(shape)
