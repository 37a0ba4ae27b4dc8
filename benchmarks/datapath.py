"""The data path of an image, from a file to the training step, on one thread.

*Steps*: encoded JPEG photographs in memory to uint8 pixels of 224×224, as in "From JPEG to pixels of one size"; then
the steps that replace decoding in a later epoch, from the cache's file: read a batch of that size, or read larger
images and crop them at random. *Path*: one epoch of batches of 64, cropped at random and mirrored, by `Batches` with
each residency, without worker processes, and by torch's `DataLoader` with Pillow and torchvision's usual transforms;
seconds of opening are separate. *Augmentation*: operations on batches of 64, by `Augmentation` and, image by image as
in a `DataLoader`, by torchvision; both mix in batches, and the process keeps freed memory, as in training. *Entries*:
cost of the cache for each image of 96×96 in large sets; the images of the set are repeated. Medians of three rounds of
the same size. Files were just written, so they are read from the system's cache while memory lasts. *Streamed* is the
additional memory of an epoch that decodes the same images again.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import InterpolationMode

from benchmarks.decode import SIZE, WAYS
from benchmarks.results import Options, Table
from vitral.bench.harness import Sample, alternate, ratio, timed
from vitral.bench.memory import growth
from vitral.data import Split, load
from vitral.data.augmentation import Augmentation
from vitral.data.dataset import Numbered
from vitral.data.loader import Batches, Residency
from vitral.data.pixel_cache import Entry, PixelCache, pixels_key
from vitral.data.preprocessing import Preprocessing
from vitral.device import seeded
from vitral.system import keep_freed_memory

SET = "imagenet-samples.tar"
BATCH = 64
SMALL = 96
"""Side in pixels of the images in large entries: 100,000 of them take 2.6 GiB."""
COUNTS = (1_000, 10_000, 100_000)
DISK_LIMIT = 4 << 30
"""Largest size of an entry, in bytes."""

CPU = torch.device("cpu")
_preprocessing = Preprocessing(SIZE)
_augmentation = Augmentation(crop="random-resized", flip=True)


class Encoded:
    """Source of encoded images in memory, repeated."""

    def __init__(self, files: list[bytes]):
        self.files = files

    def __call__(self, i: int) -> bytes:
        return self.files[i % len(self.files)]

    def identity(self, i: int) -> str:
        return f"{i % len(self.files)} of {len(self.files)}"


def run(options: Options) -> list[Table]:
    """Make a table for each of steps, path, entries and augmentation."""
    files = _noise() if options.quick else _photographs(options)
    if not files:
        return []
    images = Split([f"{i}.jpg" for i in range(len(files))], np.zeros(len(files), np.int64), Encoded(files))
    rounds = 1 if options.quick else 7
    counts = (30, 60) if options.quick else COUNTS
    with _one_thread(), tempfile.TemporaryDirectory() as home, _user_cache(home):
        tables = [_steps(images, rounds), _path(images, rounds), _entries(images, counts, Path(home))]
        keep_freed_memory()  # last: it affects the whole process and would hide the memory of an epoch
        return [*tables, _augmented(images, rounds, options.quick)]


def _steps(images: Split, rounds: int) -> Table:
    files = [cast(bytes, images.raw(i)) for i in range(len(images))]
    fixed = _built(images, None)
    room = _built(images, _augmentation)
    order = np.arange(len(images))

    def read() -> None:
        for first in range(0, len(order), BATCH):
            fixed.gather(order[first : first + BATCH])

    def crop() -> None:
        for i in order:
            with seeded(0, 0, int(i)):
                _augmentation.geometry(room[int(i)].permute(1, 2, 0), _preprocessing)

    steps: dict[str, Callable[[], object]] = {f"decode, {way}": _each(do, files) for way, do in WAYS.items()}
    steps["read from the cache"] = read
    steps["read from the cache and crop"] = crop
    found = alternate(steps, rounds=rounds)
    ours = found["decode, vitral"]
    return _table("Steps: images a second, one thread", found, len(images), ours, "rate : vitral's decoding")


def _path(images: Split, rounds: int) -> Table:
    PixelCache().clear()  # the steps left an entry, and opening shall make it
    opened: dict[str, Batches] = {}
    seconds: dict[str, float] = {}
    for name in ("memory", "cache", "stream"):
        seconds[name] = timed(lambda name=name: opened.update({name: _batches(images, _augmentation, name)}))
    epochs: dict[str, Callable[[], object]] = {name: _epoch(found) for name, found in opened.items()}
    loader = _usual(images)
    epochs["DataLoader"] = lambda: [None for _ in loader]
    found = alternate(epochs, rounds=rounds)
    count = len(opened["memory"]) * opened["memory"].batch_size  # an incomplete batch is left out
    caption = "Path: images a second of an epoch, one thread"
    table = _table(caption, found, count, found["DataLoader"], "rate : DataLoader's")
    rows = [{**row, "opening": seconds.get(row["way"])} for row in table.rows]
    return Table(table.caption, {**table.columns, "opening": "opening, s|.2f"}, rows, "path")


def _augmented(split: Split, rounds: int, quick: bool) -> Table:
    side = 32 if quick else SIZE[0]
    pixels = Preprocessing((side, side), 3)
    batch = torch.stack([pixels.geometry(split.image(i % len(split), 3)) for i in range(4 if quick else BATCH)])
    floats, labels = pixels.standardize(batch), torch.arange(len(batch)) % 10

    def ours(**options: Any) -> Callable[[], object]:
        found = Augmentation(**options)
        if options.keys() & {"erase", "mixup", "cutmix"}:
            return lambda: found.standardized(floats, labels, 10)
        return lambda: found.pixels(batch)

    def each(transform: Callable[[Tensor], Tensor], images: Tensor) -> Callable[[], object]:
        return lambda: torch.stack([transform(image) for image in images])

    pairs: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "mirror": (ours(flip=True), each(v2.RandomHorizontalFlip(), batch)),
        "affine": (ours(augment="affine"), each(v2.RandomAffine(10, scale=(0.9, 1.1), interpolation=BILINEAR), batch)),
        "TrivialAugment": (ours(augment="trivialaugment"), each(v2.TrivialAugmentWide(), batch)),
        "RandAugment": (ours(augment="randaugment"), each(v2.RandAugment(2, 10), batch)),
        "erasing": (ours(erase=0.5), each(v2.RandomErasing(0.5), floats)),
        "mixup": (ours(mixup=0.2), lambda: v2.MixUp(alpha=0.2, num_classes=10)(floats, labels)),
    }
    programs = {f"{what}, {who}": do for what, both in pairs.items() for who, do in zip(_WHO, both, strict=True)}
    found = alternate(programs, rounds=rounds)
    rows = []
    for what in pairs:
        own, theirs = (found[f"{what}, {who}"] for who in _WHO)
        rates = {"own": len(batch) / own.median, "theirs": len(batch) / theirs.median}
        rows.append({"what": what, "n": own.n, **rates, "ratio": ratio(theirs, own)})
    columns = {
        "what": "what", "n": "n|d", "own": "vitral, images/s|,.0f", "theirs": "torchvision, images/s|,.0f",
        "ratio": "times as fast|.2f",
    }  # fmt: skip
    return Table(f"Augmentation: {side}×{side} pixels, one thread", columns, rows, "augmentation")


_WHO = ("vitral", "torchvision")
BILINEAR = InterpolationMode.BILINEAR


def _entries(images: Split, counts: tuple[int, ...], home: Path) -> Table:
    pixels = Preprocessing((SMALL, SMALL))
    made = [pixels.geometry(images.image(i, 3)).contiguous() for i in range(len(images))]
    files = Encoded([_jpeg(image.permute(1, 2, 0).numpy()) for image in made])
    rows = []
    for count in counts:
        size = count * made[0].nbytes
        if size > min(DISK_LIMIT, shutil.disk_usage(home).free // 2):
            print(f"left out: {count:,} entries, for want of room")
            continue
        repeated = Split(Numbered("images", count), np.zeros(count, np.int64), files)
        rows.append(_row_of_entries(repeated, made, PixelCache(home), pixels))
    columns = {
        "images": "images|,d", "size": "MiB|,.0f", "key": "key, µs an image|.2f",
        "write": "write, µs an image|.1f", "open": "open, ms|.2f", "read": "read, µs an image|.1f",
        "streamed": "streamed, MiB held|.0f",
    }  # fmt: skip
    return Table(f"Entries: the cache's cost, {SMALL}×{SMALL} pixels", columns, rows, "entries")


def _row_of_entries(images: Split, made: list[Tensor], cache: PixelCache, pixels: Preprocessing) -> dict[str, Any]:
    """Key, write, open and read one entry in random order, three times, removing it each time; then measure one epoch
    of the same images without a cache.
    """
    count, found = len(images), {}
    key = pixels_key(images, {})

    def write() -> None:
        with cache.build(key, count, "repeated") as builder:
            for i in range(count):
                builder.add(made[i % len(made)])
            assert builder.finish() is not None, builder.failure

    def read() -> None:
        order = np.random.default_rng(0).permutation(count)
        entry = cast(Entry, found["entry"])
        for first in range(0, count, BATCH):
            entry.gather(order[first : first + BATCH])

    def stream() -> None:
        batches = Batches(images, pixels, batch_size=BATCH, device=CPU, residency="stream", workers=0)
        for _ in batches.epoch():
            pass

    taken: dict[str, list[float]] = {"key": [], "write": [], "open": [], "read": []}
    for _ in range(3):
        taken["key"].append(timed(lambda: pixels_key(images, {})))
        taken["write"].append(timed(write))
        taken["open"].append(timed(lambda: found.update(entry=cache.find(key, count))))
        taken["read"].append(timed(read))
        found.clear()
        cache.clear()
    micro = 1e6 / count
    scale = {"key": micro, "write": micro, "open": 1e3, "read": micro}
    held = growth(stream, "cpu")
    return {
        "images": count, "size": count * made[0].nbytes / 2**20,
        **{name: statistics.median(seconds) * scale[name] for name, seconds in taken.items()},
        "streamed": None if held is None else held / 2**20,
    }  # fmt: skip


def _table(caption: str, found: dict[str, Sample], count: int, against: Sample, heading: str) -> Table:
    rows = [
        {
            "way": way, "n": sample.n, "median": count / sample.median, "least": count / max(sample.seconds),
            "greatest": count / min(sample.seconds), "ratio": ratio(against, sample),
        }
        for way, sample in found.items()
    ]  # fmt: skip
    columns = {
        "way": "by", "n": "n|d", "median": "images/s|,.0f", "least": "least|,.0f", "greatest": "greatest|,.0f",
        "ratio": f"{heading}|.2f",
    }  # fmt: skip
    return Table(caption, columns, rows, caption.partition(":")[0].lower())


def _each(do: Callable[[bytes], object], files: list[bytes]) -> Callable[[], object]:
    def every_file() -> None:
        for file in files:
            do(file)

    return every_file


def _built(images: Split, augmentation: Augmentation | None) -> Entry:
    """Build the entry of these images in the current user cache."""
    _batches(images, augmentation, "cache")
    newest = PixelCache().entries()[0]
    return cast(Entry, PixelCache().find(newest.key, len(images)))


def _batches(images: Split, augmentation: Augmentation | None, residency: str) -> Batches:
    return Batches(
        images, _preprocessing, batch_size=BATCH, device=CPU, augmentation=augmentation, workers=0,
        residency=cast(Residency, residency),
    )  # fmt: skip


def _epoch(batches: Batches) -> Callable[[], None]:
    def every_batch() -> None:
        for batch in batches.epoch():
            _augmentation.pixels(batch.images)

    return every_batch


class _Opened(Dataset[Tensor]):
    """Images opened as by torchvision's `ImageFolder`, with the usual training transforms."""

    def __init__(self, images: Split):
        self.images = images
        self.transform = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()])

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, i: int) -> Tensor:
        image = Image.open(io.BytesIO(cast(bytes, self.images.raw(i)))).convert("RGB")
        return cast(Tensor, self.transform(image))


def _usual(images: Split) -> DataLoader[Tensor]:
    return DataLoader(_Opened(images), BATCH, shuffle=True, drop_last=len(images) > BATCH)


def _photographs(options: Options) -> list[bytes]:
    """Load the JPEG files of the set that all decoders can read: color and gray."""
    if (path := options.data(SET)) is None:
        return []
    images = load(str(path))["train"]
    files = [cast(bytes, images.raw(i)) for i in range(len(images))]
    return [file for file in files if file.startswith(b"\xff\xd8\xff") and _mode(file) in ("RGB", "L")]


def _mode(file: bytes) -> str:
    with contextlib.suppress(OSError):
        return Image.open(io.BytesIO(file)).mode
    return ""


def _noise(count: int = 3) -> list[bytes]:
    return [_jpeg(np.random.default_rng(seed).integers(0, 256, (60, 80, 3), dtype=np.uint8)) for seed in range(count)]


def _jpeg(pixels: np.ndarray) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "JPEG")
    return file.getvalue()


@contextlib.contextmanager
def _user_cache(home: str) -> Iterator[None]:
    """Move the user's cache to `home` within the context."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = home
    try:
        yield
    finally:
        del os.environ["XDG_CACHE_HOME"]
        if before is not None:
            os.environ["XDG_CACHE_HOME"] = before


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread within an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
