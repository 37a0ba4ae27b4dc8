"""One shard: records into a tar in the layout of WebDataset, and rows for the index."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import xxhash
from PIL import Image

from vitral.data.dataset import Split
from vitral.data.images.decode import probe, read_image
from vitral.data.shards.index import RECORD, Shard

SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp", "TIFF": "tif", "PPM": "ppm"}
_SMALL = (32, 32)
"""Height and width large enough to detect a JPEG that cannot be decoded."""


@dataclass(frozen=True)
class Record:
    """An image as it is packed."""

    name: str
    label: int
    data: bytes
    suffix: str


def read_record(split: Split, index: int, name: str) -> Record:
    """Read an image and check that it decodes; encoded files stay as they are, pixels become PNG.

    Raises `ImageError` for an unreadable one.
    """
    raw = split.raw(index)
    data = raw if isinstance(raw, bytes) else _png(raw)
    read_image(data, name=split.names[index], at_least=_SMALL)
    return Record(name, int(split.labels[index]), data, SUFFIXES[probe(data).format])


def _png(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(2) if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels).save(file, "PNG")
    return file.getvalue()


class ShardWriter:
    """Writer of one tar. Equal records give equal bytes: no time, owner or mode of a file is kept."""

    def __init__(self, path: Path, classes: tuple[str, ...]):
        self.classes = classes
        self._rows: list[tuple[int, int, int, int, int]] = []
        self._names = bytearray()
        self._file = _Hashing(open(path, "wb"))  # noqa: SIM115 - `close` and `finish` close it
        self._tar = tarfile.TarFile(fileobj=self._file, mode="w", format=tarfile.USTAR_FORMAT)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._file.size

    def add(self, record: Record, key: str) -> None:
        """Append a record under a key, which is the start of its files' names."""
        self._add(f"{key}.cls", str(record.label).encode())
        about = {"name": record.name, "class": self.classes[record.label]}
        self._add(f"{key}.json", json.dumps(about).encode())
        offset = self._add(f"{key}.{record.suffix}", record.data)
        self._names += record.name.encode("utf-8", "surrogateescape")
        digest = xxhash.xxh3_64_intdigest(record.data)
        self._rows.append((offset, len(record.data), record.label, len(self._names), digest))

    def add_unlabeled(self, key: str) -> None:
        """Append a file without content for an image that has no class: whoever reads the tar counts it as left out."""
        self._add(f"{key}.{SUFFIXES['JPEG']}", b"")

    def _add(self, name: str, data: bytes) -> int:
        """Append a file and return the offset of its first byte."""
        info = tarfile.TarInfo(name)
        info.size = len(data)
        offset = self._file.size + tarfile.BLOCKSIZE  # a plain header is one block
        self._tar.addfile(info, io.BytesIO(data))
        return offset

    def finish(self, name: str) -> tuple[Shard, np.ndarray, np.ndarray]:
        """Complete the tar; return its entry under this name, its rows and its names (uint8)."""
        self._tar.close()
        self.close()
        shard = Shard(name, len(self._rows), self._file.size, self._file.hash.hexdigest())
        return shard, np.array(self._rows, RECORD), np.frombuffer(bytes(self._names), np.uint8)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class _Hashing:
    """A file that is hashed as it is written."""

    def __init__(self, file: IO[bytes]):
        self._file, self.size = file, 0
        self.hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        self.hash.update(data)
        self.size += len(data)
        return self._file.write(data)

    def tell(self) -> int:
        return self.size

    def close(self) -> None:
        self._file.close()
