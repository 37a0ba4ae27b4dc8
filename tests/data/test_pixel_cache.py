"""The pixel cache: decoded once, the same bits, complete entries only."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import pickle
import re
import resource
import shutil
import signal
import struct
import tarfile
import tracemalloc
import weakref
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from images import MakeImages, noise
from running import in_child
from vitral.cli.main import main
from vitral.data import Split, dataset, loader
from vitral.data import load as load_data
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.data.pixel_cache import Entry, PixelCache, pixels_key, title_of
from vitral.data.prepared import Images
from vitral.workflows.tables.features import content

SIZE = (8, 12)
PREPROCESSING = Preprocessing(SIZE)
CROPS = ("none", "random-resized")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the entries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home/vitral/pixels"


@dataclass(frozen=True)
class Drawn:
    """Fetch of noise in a few sizes, some much larger than the network's; it calls `before` first."""

    before: Callable[[int], object] = id

    def __call__(self, i: int) -> np.ndarray:
        self.before(i)
        return noise(i, (9 + 14 * (i % 3), 10 + 11 * (i % 4)))


class Known(Drawn):
    """The same with a cheap `identity`."""

    def identity(self, i: int) -> str:
        return str(i)


def split(count: int = 23, fetch: Any = None) -> Split:
    return Split([f"drawn/{i}.png" for i in range(count)], np.arange(count) % 3, fetch or Known())


def batches(images: Split, crop: str | None = "none", **options: Any) -> Batches:
    augmentation = Augmentation(crop=crop) if crop else None  # type: ignore[arg-type]
    given = {"batch_size": 4, "device": torch.device("cpu"), "workers": 0, "seed": 3, **options}
    return Batches(images, PREPROCESSING, augmentation=augmentation, **given)


def pixels(found: Batches, epochs: int = 2) -> torch.Tensor:
    return torch.cat([batch.images for epoch in range(epochs) for batch in found.epoch(epoch)])


# ---------------------------------------------------------------- the same bits, decoded once


def _tar(folder: Path, mode: str = "w", ending: str = ".tar") -> Path:
    with tarfile.open(folder.with_name(f"packed{ending}"), mode) as tar:
        tar.add(folder, arcname=folder.name)
        return Path(str(tar.name))


def _zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder.with_name("packed.zip"), "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted(folder.rglob("*.png")):
            packed.write(path, path.relative_to(folder.parent))
        return Path(str(packed.filename))


def _csv(folder: Path) -> Path:
    rows = [f"{path},{path.parent.name}" for path in sorted(folder.rglob("*.png"))]
    table = folder.with_name("table.csv")
    table.write_text("\n".join(["file,label", *rows]))
    return table


def _idx(folder: Path) -> Path:
    target = folder.with_name("idx")
    target.mkdir()
    images = np.stack([noise(i, (9, 11), 1) for i in range(12)])
    for what, array in (("images-idx3", images), ("labels-idx1", np.arange(12, dtype=np.uint8) % 2)):
        header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
        with gzip.open(target / f"train-{what}-ubyte.gz", "wb") as file:
            file.write(header + array.tobytes())
    return target


SOURCES: dict[str, Callable[[Path], object]] = {
    "folder": lambda folder: folder,
    "tar": _tar,
    "tar.gz": lambda folder: _tar(folder, "w:gz", ".tar.gz"),
    "zip": _zip,
    "csv": _csv,
    "idx": _idx,
    "digits": lambda _: "digits",
    "planted": lambda _: "planted",
}


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("kind", SOURCES)
def test_bits_do_not_depend_on_residency(make_images: MakeImages, kind, crop):
    source = SOURCES[kind](make_images({"cat": 9, "dog": 7}, size=(40, 30)))
    images = load_data(str(source))["train"]
    images = images.select(np.arange(len(images))[::-1][:40])  # as a split that was cut has them
    found = [batches(images, crop, residency=kind) for kind in ("memory", "stream", "cache", "cache", "auto", "stream")]
    assert "written to the cache" in found[2].residency
    assert "read from the cache" in found[3].residency
    wanted = pixels(found[0])
    assert wanted.any()
    assert all(torch.equal(wanted, pixels(one)) for one in found[1:])


@pytest.mark.parametrize("crop", [*CROPS, None])
def test_workers_prepare_cached_images_the_same_way(crop):
    wanted = pixels(batches(split(), crop, residency="memory"))
    for _ in range(2):
        found = batches(split(), crop, residency="cache", workers=2)
        assert torch.equal(pixels(found), wanted)
        assert torch.equal(torch.cat([b.images for b in found.epoch(1, start=2)]), wanted[len(wanted) // 2 + 8 :])
        found.close()


@pytest.mark.parametrize("crop", CROPS)
def test_nothing_is_decoded_twice(make_images: MakeImages, monkeypatch, crop):
    images = load_data(str(make_images({"cat": 9, "dog": 7})))["train"]
    calls: list[str] = []
    read = dataset.read_image
    monkeypatch.setattr(dataset, "read_image", lambda *a, **k: calls.append(k["name"]) or read(*a, **k))
    found = batches(images, crop, residency="cache")
    opened = len(calls)
    assert set(calls) == set(images.names)
    assert opened == len(images) * (1 if crop == "none" else 2)  # the second is the sample that tells the size
    first = pixels(found)
    assert len(calls) == opened
    counts: list[int] = []
    again = batches(images, crop, residency="cache", progress=counts.append)
    assert torch.equal(pixels(again), first)
    assert torch.equal(pixels(batches(load_data(images.names[0].rsplit("/", 2)[0])["train"], crop)), first)
    assert len(calls) == opened + (len(images) if crop == "none" else 0)  # `auto` keeps what fits in memory
    assert sum(counts) == len(images)
    assert not again.unreadable


def test_auto_takes_memory_then_the_cache_then_streams(monkeypatch):
    assert "on the cpu" in batches(split(), residency="auto").residency
    monkeypatch.setattr(loader, "memory_bytes", lambda: 1000)
    free = 23 * 3 * SIZE[0] * SIZE[1] * 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
    streamed = batches(split(), residency="auto")
    assert "streamed by 0 workers: no room for the cache" in streamed.residency
    with monkeypatch.context() as gpu:  # it has room for all, but they are put together in memory
        gpu.setattr(loader, "total_bytes", lambda device: 10**12)
        assert "streamed by 0 workers" in batches(split(), residency="auto").residency
    assert re.search(r"; all cores decode [\d,]+ images/s$", streamed.residency)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free + 2))
    cached = batches(split(), residency="auto")
    assert "written to the cache" in cached.residency
    assert torch.equal(pixels(cached), pixels(streamed))


# ---------------------------------------------------------------- the key


def key(images: Split, preprocessing: Preprocessing = PREPROCESSING, crop: str = "none") -> str:
    return pixels_key(images, Images(images, preprocessing, Augmentation(crop=crop)).settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("pack", [None, _tar, _zip], ids=["folder", "tar", "zip"])
def test_the_key_depends_on_the_content(make_images: MakeImages, pack):
    folder = make_images({"cat": 3, "dog": 3})
    where = pack(folder) if pack else folder

    def now() -> str:
        return key(load_data(str(where))["train"])

    first = now()
    assert now() == first
    touched = where if pack else folder / "cat/1.png"
    state = touched.stat()
    os.utime(touched, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert now() != first
    with open(touched, "ab") as file:
        file.write(b"\0")
    os.utime(touched, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert now() != first


def _versions(make_images: MakeImages) -> tuple[Path, Path]:
    """Two folders of files with the same names, sizes and times, and other pixels."""
    first, second = (make_images({"cat": 3, "dog": 3}, name=name, extension=".bmp") for name in ("v1", "v2"))
    for one in second.rglob("*.bmp"):
        Image.fromarray(255 - np.asarray(Image.open(one))).save(one)
    for file in [*first.rglob("*.bmp"), *second.rglob("*.bmp")]:
        os.utime(file, ns=(0, 10**18))
    return first, second


def _turn_the_link(data: Path, other: Path) -> None:
    data.unlink()
    data.symlink_to(other)


def _swap_the_folders(data: Path, other: Path) -> None:
    folder = data.resolve()
    folder.rename(folder.with_name("away"))
    other.rename(folder)


def _write_in_place(data: Path, other: Path) -> None:
    for file in other.rglob("*.bmp"):
        target = data / file.relative_to(other)
        target.write_bytes(file.read_bytes())
        os.utime(target, ns=(0, 10**18))


@pytest.mark.parametrize("replace_by", [_turn_the_link, _swap_the_folders, _write_in_place])
def test_other_images_with_the_same_names_sizes_and_times(make_images: MakeImages, tmp_path, replace_by):
    first, second = _versions(make_images)
    data = tmp_path / "data"
    data.symlink_to(first)
    images = load_data(str(data))["train"]
    stale, before = pixels(batches(images, residency="cache")), content(images)
    replace_by(data, second)
    now = load_data(str(data))["train"]
    assert not torch.equal(pixels(batches(now, residency="cache")), stale)
    assert content(now) != before, "the key of kept features"


def test_another_archive_with_the_same_name_size_and_time(make_images: MakeImages):
    found, sizes = [], set()
    for folder in _versions(make_images):
        packed = _tar(folder)
        os.utime(packed, ns=(0, 10**18))
        sizes.add(packed.stat().st_size)
        found.append(pixels(batches(load_data(str(packed))["train"], residency="cache")))
    assert len(sizes) == 1
    assert not torch.equal(*found)


def test_the_key_depends_on_bytes_without_an_identity(make_images: MakeImages):
    folder = make_images({"cat": 3, "dog": 3})
    packed = load_data(str(_tar(folder, "w:gz", ".tar.gz")))["train"]
    arrays = [np.stack([noise(i) for i in range(4)]) for _ in range(2)]
    arrays[1][2, 0, 0, 0] ^= 1
    keys = [key(Split(list("abcd"), np.zeros(4, np.int64), dataset.Pixels(array))) for array in arrays]
    keys += [key(packed), key(packed.select([1, 0, 2, 3, 4, 5])), key(packed.select([0, 1, 2, 3, 4]))]
    assert len(set(keys)) == 5
    assert key(load_data(str(folder.with_name("packed.tar.gz")))["train"]) == keys[2]


def test_the_key_depends_on_preprocessing_and_nothing_else():
    start = PREPROCESSING
    others = [
        replace(start, image_size=(8, 13)),
        replace(start, channels=1, mean=(0.5,), std=(0.5,)),
        replace(start, resize="crop"),
        replace(start, resize="crop", crop_fraction=0.5),
        replace(start, interpolation="bicubic"),
        replace(start, antialias=False),
        replace(start, resize="letterbox"),
        replace(start, resize="letterbox", mean=(0.1, 0.5, 0.5)),
        replace(start, resize_size=(9, 13)),
        replace(start, resize_size=(9, 13), center="floor"),
    ]
    assert len({key(split(), one) for one in [start, *others]}) == 11
    assert key(split(), start, "random-resized") not in {key(split(), one) for one in [start, *others]}
    assert key(split(), replace(start, mean=(0.1,) * 3, std=(0.2,) * 3)) == key(split(), start)
    assert key(split(), start, "shift") == key(split(), start)
    relabeled = Split(split().names, np.zeros(23, np.int64), Known())
    assert key(relabeled) == key(split())


def test_a_changed_file_is_decoded_again(make_images: MakeImages):
    folder = make_images({"cat": 5, "dog": 5})
    stale = pixels(batches(load_data(str(folder))["train"], residency="cache"))
    shutil.copy(folder / "dog/0.png", folder / "cat/0.png")
    fresh = batches(load_data(str(folder))["train"], residency="cache")
    assert "written to" in fresh.residency
    assert not torch.equal(pixels(fresh), stale)
    assert torch.equal(pixels(fresh), pixels(batches(load_data(str(folder))["train"], residency="memory")))


# ---------------------------------------------------------------- complete entries only


def kill(i: int) -> None:
    if i == 17:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.real
def test_a_killed_builder_leaves_no_entry(home, monkeypatch):
    monkeypatch.setattr(loader, "_WINDOW", 4)
    assert in_child(lambda: batches(split(fetch=Known(kill)), residency="cache") and 0) == -signal.SIGKILL
    assert {path.suffix for path in home.iterdir()} == {".part", ".lock"}
    assert PixelCache().entries() == []
    whole = batches(split(), residency="cache")
    assert "written to" in whole.residency
    assert [len(path.name) for path in home.iterdir()] == [40]
    assert torch.equal(pixels(whole), pixels(batches(split(), residency="memory")))


def test_ctrl_c_while_building_leaves_nothing(home, monkeypatch):
    monkeypatch.setattr(loader, "_WINDOW", 4)

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        batches(split(), residency="cache", progress=interrupt)
    assert list(home.iterdir()) == []


def test_two_concurrent_builders_agree(home):
    cache, known = PixelCache(), key(split())
    images = [torch.from_numpy(noise(i)) for i in range(3)]
    with cache.build(known, 3, "a") as first, cache.build(known, 3, "b") as second:
        for one in images:
            first.add(one)
            second.add(one)
        done = first.finish()
        assert done is not None
        other = second.finish()
    assert (first.failure, second.failure) == (None, None)
    assert other is not None
    assert other.path == done.path
    assert [info.title for info in cache.entries()] == ["a"]
    assert torch.equal(other.gather(np.array([2, 0])), torch.stack([images[2], images[0]]))
    assert [path.name for path in home.iterdir()] == [known]


def test_an_unfinished_entry_is_not_kept(home):
    with PixelCache().build("0" * 40, 2, "a") as builder:
        builder.add(torch.zeros(3, 2, 2, dtype=torch.uint8))
        with pytest.raises(ValueError, match="1 of 2"):
            builder.finish()
    assert list(home.iterdir()) == []


@pytest.mark.parametrize("crop", CROPS)
def test_a_full_disk_streams_and_is_reported(home, crop):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, limits[1]))  # the system refuses to write on, here with EFBIG
    try:
        found = batches(split(), crop, residency="cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert found.residency == f"streamed by 0 workers: the cache cannot be written: {os.strerror(errno.EFBIG)}"
    assert list(home.iterdir()) == []
    assert torch.equal(pixels(found), pixels(batches(split(), crop, residency="memory")))
    assert "written to" in batches(split(), crop, residency="cache").residency


def test_a_full_disk_at_the_last_moment(home, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = batches(split(), residency="cache")
    assert os.strerror(errno.ENOSPC) in found.residency
    assert list(home.iterdir()) == []


def test_a_cache_that_cannot_be_made_streams(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "no room for the cache" in batches(split(), residency="cache").residency
    with PixelCache().build("0" * 40, 1, "a") as builder:
        builder.add(torch.zeros(1, 2, 2, dtype=torch.uint8))
        assert builder.finish() is None
    assert "cannot be written" in str(builder.failure)


@pytest.mark.parametrize("name", ["pixels.bin", "index.npy", "entry.json"])
@pytest.mark.parametrize("how", ["cut", "gone", "empty", "longer"])
def test_a_damaged_entry_is_rebuilt(home, name, how):
    wanted = pixels(batches(split(), residency="cache"))
    (path,) = home.glob(f"*/{name}")
    content = path.read_bytes()
    path.unlink()
    if how != "gone":
        path.write_bytes({"cut": content[:-5], "empty": b"", "longer": content + b"x"}[how])
    key, cache = path.parent.name, PixelCache()
    assert cache.find(key, len(split())) is None
    assert cache.damage.startswith(f"{path} was damaged")
    again = batches(split(), residency="cache")
    assert "written to" in again.residency
    assert f"{path} was damaged" in again.residency
    assert torch.equal(pixels(again), wanted)
    assert len(list(home.iterdir())) == 1
    assert cache.find(key, len(split())) is not None
    assert not cache.damage


@pytest.mark.parametrize("residency", ["cache", "stream"])
def test_unreadable_images_are_collected_and_make_no_entry(home, residency):
    def gone(i: int) -> None:
        if i == 5:
            raise OSError("gone")

    found = batches(split(fetch=Known(gone)), residency=residency)
    assert [(index, error.name, error.why) for index, error in found.unreadable] == [(5, "drawn/5.png", "gone")]
    assert PixelCache().entries() == []
    assert not home.exists() or list(home.iterdir()) == []


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("crop", CROPS)
@pytest.mark.parametrize("residency", [pytest.param("stream", marks=pytest.mark.slow), "cache"])
def test_memory_does_not_grow_with_the_number_of_images(monkeypatch, residency, crop):
    """Neither the memory of numpy and Python, nor the number of live images."""
    monkeypatch.setattr(loader, "_WINDOW", 8)
    numbers, made = itertools.count(), weakref.WeakValueDictionary[int, torch.Tensor]()

    def watched(original: Callable[[Images, int], torch.Tensor]) -> Callable[[Images, int], torch.Tensor]:
        def make(self: Images, index: int) -> torch.Tensor:
            made[next(numbers)] = image = original(self, index)
            return image

        return make

    for name in ("decode", "kept"):
        monkeypatch.setattr(Images, name, watched(getattr(Images, name)))
    most, peaks = {}, {}
    for count in (50, 100, 400):  # the first is a warm-up
        seen: list[int] = []
        tracemalloc.start()
        found = batches(split(count), crop, residency=residency, progress=lambda _, s=seen: s.append(len(made)))
        for _ in itertools.chain(found.epoch(0), found.epoch(1)):
            seen.append(len(made))  # noqa: PERF401 - a list of them would be kept
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        most[count] = max(seen)
    image = 3 * 20 * 25  # bytes, about
    assert most[400] <= 24  # a window, where `kept` is what `decode` made
    assert peaks[400] - peaks[100] < 300 * image / 4


def test_an_entry_is_pickled_without_its_pixels():
    batches(split(200), residency="cache")
    (info,) = PixelCache().entries()
    entry = PixelCache().find(info.key, 200)
    assert entry is not None
    packed = pickle.dumps(entry)
    assert len(packed) < 500
    assert torch.equal(pickle.loads(packed)[7], entry[7])  # noqa: S301 - our own
    assert PixelCache().find(info.key, 199) is None


def test_batches_of_the_cache_are_copies():
    found = batches(split(), residency="cache")
    for batch in found.epoch():
        batch.images.zero_()
    assert pixels(found).any()


# ---------------------------------------------------------------- user interface


def test_entries_are_listed_and_cleared(home):
    kept = batches(split(), residency="cache")
    batches(split(5), None, residency="cache")
    older, newer = (PixelCache().find(key(split(n)), n) for n in (23, 5))
    assert older is not None
    assert newer is not None
    os.utime(older.path / "entry.json", (1e9, 1e9))
    listed = PixelCache().entries()
    assert [(one.title, one.images, one.nbytes) for one in listed] == [
        ("drawn", 5, 5 * 3 * 96),
        ("drawn", 23, 23 * 3 * 96),
    ]
    assert listed[1].last_used == 1e9
    assert PixelCache().find(older.path.name, 23) is not None
    assert PixelCache().entries()[0].key == older.path.name, "using it counts"
    (home / "notes.txt").write_text("not ours")
    wanted = pixels(kept)
    PixelCache().clear()
    assert [path.name for path in home.iterdir()] == ["notes.txt"]
    assert torch.equal(pixels(kept), wanted), "who reads it goes on"
    PixelCache(home / "nowhere").clear()


@pytest.mark.parametrize(
    ("first", "last", "title"),
    [
        ("photos/train/cat/1.jpg", "photos/train/dog/9.jpg", "photos/train"),
        ("photos/cat/1.jpg", "photos/cat/1.jpg", "photos/cat"),
        ("a.tar:train/cat/1.jpg", "a.tar:val/1.jpg", "a.tar"),
        ("mnist/train[0]", "mnist/train[59999]", "mnist/train"),
        ("1.png", "2.png", "1.png"),
    ],
)
def test_an_entry_is_named_after_its_images(first, last, title):
    assert title_of([first, "between", last]) == title


def test_an_entry_holds_images_of_many_sizes():
    given = [torch.from_numpy(noise(i, (3 + i, 5 + 2 * i))).permute(2, 0, 1) for i in range(4)]
    with PixelCache().build("0" * 40, 4, "a") as builder:
        for one in given:
            builder.add(one)
        entry = builder.finish()
    assert isinstance(entry, Entry)
    assert all(torch.equal(entry[i], given[i]) for i in range(4))


def test_the_command_lists_and_clears(home, capsys):
    def output(*words: str) -> Any:
        assert main(["data", "cache", *words]) == 0
        return capsys.readouterr().out

    assert "the cache is empty" in output()
    batches(split(), residency="cache")
    assert re.search(r"drawn +23 +0\.0 +\d{4}-\d\d-\d\d \d\d:\d\d", output())
    listed = json.loads(output("--format", "json"))
    assert (listed["folder"], listed["bytes"], listed["cleared"]) == (str(home), 23 * 288, False)
    assert [(one["title"], one["images"], one["nbytes"]) for one in listed["entries"]] == [("drawn", 23, 23 * 288)]
    assert json.loads(output("--clear", "--format", "json"))["cleared"]
    assert list(home.iterdir()) == []
    assert "the cache is empty" in output()
