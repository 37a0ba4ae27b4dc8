"""Write a data set as shards. A killed command continues at the shard that it was writing.

The order of the records is f(seed, split), so that each shard holds images of all classes and every attempt cuts the
same shards. While a folder is incomplete, `.unfinished` in it has the settings and the rows of the finished shards.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitral import bounded
from vitral.atomic import replacing, write_text
from vitral.containers import cores
from vitral.data.checks.fingerprint import digest
from vitral.data.dataset import DataSet, relative_names
from vitral.data.images.lazy_torchvision import preload
from vitral.data.shards.index import MANIFEST, RECORD, Index, Manifest, Shard, digest_of
from vitral.data.shards.packing import Record, ShardWriter, read_record
from vitral.errors import SKIP_HINT, DataError, ImageError, UsageError
from vitral.thread_pool import pool
from vitral.wording import some

SHARD_BYTES = 256 << 20
"""Default size of a shard: large enough for object stores, small enough to shuffle and to fetch again."""
_UNFINISHED = ".unfinished"
_AHEAD = 64  # records read ahead of the writer
_MOST_SHARDS = 50_000  # the manifest is read within the limits of `vitral.bounded`

Progress = Callable[[int], None]
"""Called with the number of images just read."""


@dataclass(frozen=True)
class Written:
    """A complete folder of shards."""

    folder: Path
    splits: dict[str, tuple[int, int, int]]
    """Split → shards, images, bytes."""
    kept: int
    """Shards of an interrupted command that were kept."""
    left_out: tuple[str, ...]
    """Names of unreadable images that were left out."""

    def to_json(self) -> dict[str, object]:
        """Return plain data."""
        splits = {
            split: dict(zip(("shards", "images", "bytes"), row, strict=True)) for split, row in self.splits.items()
        }
        return {"out": str(self.folder), "splits": splits, "kept": self.kept, "left_out": list(self.left_out)}


def write_shards(
    dataset: DataSet,
    out: str | Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    seed: int = 0,
    skip: bool = False,
    progress: Progress = lambda done: None,
) -> Written:
    """Write every split of a data set as shards of about `shard_bytes` into the new folder `out`.

    Each image is decoded once, to check it; unreadable ones raise a `DataError`, or are left out with `skip`. Raises
    `UsageError` if `out` has other files, and `WriteError` if the system refuses to write; finished shards are kept.
    """
    folder = Path(out)
    settings = {
        "shard_bytes": shard_bytes,
        "seed": seed,
        "classes": list(dataset.classes),
        "images": {name: digest(split, dataset.classes) for name, split in dataset.splits.items()},
    }
    _open(folder, settings)
    preload(sum(map(len, dataset.splits.values())))
    writers = {}
    for number, (split, images) in enumerate(dataset.splits.items()):
        order = np.random.default_rng((seed, number)).permutation(len(images))
        writers[split] = _SplitWriter(folder, split, dataset, shard_bytes, order, skip, progress)
    indices = {split: writer.write() for split, writer in writers.items()}
    Manifest(dataset.name, dataset.classes, indices).save(folder)
    shutil.rmtree(folder / _UNFINISHED)
    splits = {s: (len(one.shards), len(one), sum(shard.bytes for shard in one.shards)) for s, one in indices.items()}
    left_out = (*dataset.left_out, *(name for writer in writers.values() for name in writer.left_out))
    return Written(folder, splits, sum(writer.kept for writer in writers.values()), left_out)


def _open(folder: Path, settings: Mapping[str, object]) -> None:
    """Create the folder, or continue in one with the same settings."""
    about = folder / _UNFINISHED / "settings.json"
    typed = shlex.quote(str(folder))
    if (folder / MANIFEST).exists():
        raise UsageError(
            "the folder already has shards", where=folder, hint=f"choose another folder with --out, or rm -r {typed}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        try:
            same = bounded.read(about) == settings
        except (OSError, ValueError):
            raise UsageError("the folder is not empty", where=folder, hint="choose another folder with --out") from None
        if not same:
            why = "its first shards are of other images, or of another --seed or --shard-mb"
            raise UsageError("an unfinished folder of other shards", where=folder, why=why, hint=f"rm -r {typed}")
        return
    about.parent.mkdir(parents=True, exist_ok=True)
    write_text(about, json.dumps(settings))


class _SplitWriter:
    """Writer of the shards of one split."""

    def __init__(
        self,
        folder: Path,
        split: str,
        dataset: DataSet,
        shard_bytes: int,
        order: np.ndarray,
        skip: bool,
        progress: Progress,
    ):
        self.folder, self.split, self.classes = folder, split, dataset.classes
        self.images, self.source = dataset.splits[split], dataset.source
        self.shard_bytes, self.order, self.skip, self.progress = shard_bytes, order, skip, progress
        self.names = relative_names(self.images.names)
        self.left_out: list[str] = []
        self.kept = 0

    def write(self) -> Index:
        """Write the missing shards and return the index of all."""
        parts = list(self._finished())
        self.kept = len(parts)
        start, records = sum(part.taken for part in parts), sum(part.shard.records for part in parts)
        self.left_out += [name for part in parts for name in part.left_out]
        self.progress(start)
        images = self._images(start)
        while start < len(self.order):
            if len(parts) == _MOST_SHARDS:
                raise UsageError(f"more than {_MOST_SHARDS:,} shards", hint="larger shards: --shard-mb")
            part = self._shard(len(parts), images, records)
            if part.shard.records:
                parts.append(part)
            else:  # only unreadable images were left
                (self.folder / part.shard.name).unlink()
            start, records = start + part.taken, records + part.shard.records
        if not records:
            raise DataError(f"no readable image in the {self.split} split", where=self.source, why=some(self.left_out))
        return _joined(parts)

    def _shard(self, number: int, images: Iterator[tuple[str, Record | ImageError]], first: int) -> _Part:
        """Write the next shard, whose first record is number `first` of the split."""
        name = f"{self.split}-{number:06}.tar"
        taken, left_out = 0, list[str]()
        with replacing(self.folder / name) as temporary:
            writer = ShardWriter(temporary, self.classes)
            try:
                for shown_name, image in images:
                    taken += 1
                    self.progress(1)
                    if isinstance(image, ImageError):
                        left_out.append(self._refused(shown_name, image))
                    else:
                        writer.add(image, f"{first + len(writer):09}")
                    if writer.size >= self.shard_bytes:
                        break
                shard, rows, names = writer.finish(name)
            finally:
                writer.close()
        self.left_out += left_out
        part = _Part(shard, rows, names, taken, tuple(left_out))
        part.save(self._part(number))
        return part

    def _refused(self, name: str, error: ImageError) -> str:
        if not self.skip:
            raise DataError(
                "unreadable image", where=name, why=error.why, hint=f"{SKIP_HINT}; then the same command continues"
            ) from error
        return name

    def _images(self, start: int) -> Iterator[tuple[str, Record | ImageError]]:
        """Read the images from the `start`-th of the order on in threads, some ahead of the writer."""

        def attempt(index: int) -> tuple[str, Record | ImageError]:
            try:
                return self.images.names[index], read_record(self.images, index, self.names[index])
            except ImageError as error:
                return error.name, error

        with pool(cores()) as threads:
            rest = iter(self.order[start:].tolist())
            waiting = [threads.submit(attempt, index) for index in itertools.islice(rest, _AHEAD)]
            while waiting:
                yield waiting.pop(0).result()
                waiting += [threads.submit(attempt, index) for index in itertools.islice(rest, 1)]

    def _finished(self) -> Iterator[_Part]:
        """Read the shards of an interrupted command, up to the first that is missing or damaged."""
        for number in itertools.count():
            part = _Part.read(self._part(number))
            if part is None or not _has_size(self.folder / part.shard.name, part.shard.bytes):
                return
            yield part

    def _part(self, number: int) -> Path:
        return self.folder / _UNFINISHED / f"{self.split}-{number:06}.npz"


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and os.path.getsize(path) == size


@dataclass(frozen=True, eq=False)
class _Part:
    """A finished shard with its rows."""

    shard: Shard
    rows: np.ndarray
    names: np.ndarray
    taken: int
    """Images of the order that it used, unreadable ones included."""
    left_out: tuple[str, ...]

    def save(self, path: Path) -> None:
        shard = self.shard
        about = json.dumps([shard.name, shard.records, shard.bytes, shard.sha256, self.taken, self.left_out])
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.savez(file, rows=self.rows, names=self.names, about=np.frombuffer(about.encode(), np.uint8))

    @classmethod
    def read(cls, path: Path) -> _Part | None:
        """Read a part; None if it is missing or damaged."""
        try:
            with np.load(path, allow_pickle=False) as arrays:
                *shard, taken, left_out = bounded.parse(arrays["about"].tobytes())
                return cls(Shard(*shard), arrays["rows"], arrays["names"], int(taken), tuple(left_out))
        except (OSError, ValueError, KeyError, TypeError, EOFError):
            return None


def _joined(parts: Sequence[_Part]) -> Index:
    """Join the rows of all shards; names are numbered on."""
    ends = np.cumsum([0, *(len(part.names) for part in parts)])
    records = np.empty(sum(len(part.rows) for part in parts), RECORD)
    start = 0
    for part, before in zip(parts, ends[:-1].tolist(), strict=True):
        rows = records[start : start + len(part.rows)]
        rows[:] = part.rows
        rows["name"] += np.uint64(before)
        start += len(part.rows)
    names = np.concatenate([part.names for part in parts])
    return Index(tuple(part.shard for part in parts), records, names, digest_of(records, names))
