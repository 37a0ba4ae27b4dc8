"""Shards in an object store that is slow, busy, and cuts connections."""

from __future__ import annotations

import functools
import http.server
import multiprocessing
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import numpy as np
import objectstore
import pytest
import torch
import webdataset
from objectstore import BUCKET, FAULTS, Store
from PIL import Image

import vitral
from images import MakeImages
from running import TINY, as_json, same_bits, weights_of
from vitral.data import DataSet, Split, load
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.data.shards import order, remote, remote_store
from vitral.data.shards.cache import VARIABLE, ShardCache
from vitral.data.shards.index import Manifest
from vitral.data.shards.order import epoch_order, first_needs
from vitral.data.shards.reading import ShardFetch
from vitral.data.shards.remote import Remote, ShortBodyError, is_remote, retrying
from vitral.data.shards.writing import write_shards
from vitral.errors import DataError, ImageError, MissingExtraError, UsageError

COUNTS = {"train/cat": 14, "train/dog": 10, "val/cat": 2, "val/dog": 3}


pytestmark = pytest.mark.real
"""An object store is a server."""


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with pytest.MonkeyPatch.context() as patch, objectstore.running() as store:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_ENDPOINT_URL", store.url)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "1")  # retries are vitral's
        patch.setattr(remote, "PAUSE", 0.01)
        yield store


@pytest.fixture
def store(server: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Store:
    """The store, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    server.faults.clear()
    server.forget()
    return server


@pytest.fixture
def shards(make_images: MakeImages, tmp_path: Path) -> Path:
    """Six shards of train, of four records each, and two of val."""
    write_shards(load(make_images(COUNTS)), tmp_path / "shards", shard_bytes=12_288)
    return tmp_path / "shards"


@pytest.fixture
def url(store: Store, shards: Path, request: pytest.FixtureRequest) -> str:
    address = store.put(shards, request.node.name.replace("[", "-").replace("]", "").replace("_", "-"))
    store.forget()
    return address


def contents(split: Split) -> list[bytes]:
    return [bytes(split.fetch(i)) for i in range(len(split))]  # type: ignore[arg-type]


def relative(dataset: DataSet, split: str) -> list[str]:
    return [name.rpartition("/")[2] for name in dataset[split].names]


# ---------------------------------------------------------------- the same data


@pytest.mark.slow
def test_a_remote_set_is_the_local_one(url: str, shards: Path, store: Store) -> None:
    here, there = load(shards), load(url)
    assert (there.classes, list(there.splits), there.notes) == (here.classes, ["train", "val"], ())
    assert there["train"].names[0].startswith(f"{url}train-000000.tar:train/")
    assert store.shards() == [], "only the index is fetched"
    for split in here.splits:
        assert np.array_equal(here[split].labels, there[split].labels)
        assert relative(here, split) == relative(there, split)
        assert contents(here[split]) == contents(there[split])


def test_a_shard_is_read_in_part_a_few_times_and_then_fetched_once(url: str, shards: Path, store: Store) -> None:
    images = load(url)["train"]
    assert isinstance(images.fetch, ShardFetch)
    size = images.fetch.index.shards[0].bytes
    for _ in range(3):
        images.fetch(1)
    assert all(last - first < 1024 for _, first, last in store.gets[-3:])
    store.forget()
    for _ in range(9):
        for i in range(4):
            images.fetch(i)
    assert store.gets[-1] == ("train-000000.tar", 0, size - 1)
    assert len(store.gets) == 2, "one more record, then the shard"


@pytest.mark.slow
def test_a_pattern_and_a_wildcard(url: str, shards: Path) -> None:
    some = load(f"{url}train-{{000001..000002}}.tar")
    assert list(some.splits) == ["train"]
    assert len(some["train"]) == 8
    assert contents(some["train"]) == contents(load(f"{shards}/train-{{000001..000002}}.tar")["train"])
    assert load(f"{url}val-*.tar")["val"].labels.tolist() == load(shards)["val"].labels.tolist()
    with pytest.raises(DataError, match="not in the index"):
        load(f"{url}train-{{000001..000009}}.tar")


@pytest.mark.slow
def test_every_command_takes_an_address(
    url: str, shards: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for data, out in ((str(shards), "here"), (url, "there")):
        vitral.train(data, out=str(tmp_path / out), quiet=True, **{**TINY, "epochs": 1})
    assert same_bits(weights_of(tmp_path / "here"), weights_of(tmp_path / "there"))
    run = str(tmp_path / "there")
    assert as_json(capsys, "data", "check", url)["invalidates_results"] is False
    assert as_json(capsys, "evaluate", run)["accuracy"] == as_json(capsys, "evaluate", run, str(shards))["accuracy"]
    predicted = as_json(capsys, "predict", run, f"{url}val-*.tar")["predictions"]
    assert len(predicted) == 5


# ---------------------------------------------------------------- faults


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_that_pass_change_nothing(fault: str, url: str, shards: Path, store: Store) -> None:
    images = load(url)["train"]
    store.faults += [fault] * 4
    assert contents(images) == contents(load(shards)["train"])
    assert not store.faults


def test_faults_that_stay_are_reported(url: str, shards: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "ATTEMPTS", 3)
    images = load(url)["train"]
    images.image(0)
    store.faults += ["503"] * 3
    with pytest.raises(ImageError, match=r"train-000001\.tar.*\n.*\(after 3 attempts\)"):
        images.image(5)
    assert not store.faults


def test_a_missing_object_is_not_asked_for_twice(url: str, store: Store) -> None:
    with pytest.raises(DataError, match=r"cannot read the shards|no such"):
        load(f"s3://{BUCKET}/nothing-here/train-{{0..1}}.tar")
    assert max(Counter(name for name, _, _ in store.gets).values(), default=0) <= 1


def test_retries_pause_longer_and_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.25)
    pauses: list[float] = []
    answers = iter([ShortBodyError("half"), TimeoutError(), ConnectionResetError("cut"), b"whole"])

    def attempt() -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retrying(attempt, sleep=pauses.append) == b"whole"
    assert all(0.5 * full <= pause <= full for pause, full in zip(pauses, (0.25, 0.5, 1.0), strict=True))
    tries = []

    def refuse() -> None:
        tries.append(1)
        raise PermissionError("no")

    with pytest.raises(OSError, match="no"):
        retrying(refuse, sleep=pauses.append)
    assert len(tries) == 1


def overwrite(store: Store, url: str, name: str, data: bytes) -> None:
    import boto3

    client = boto3.client("s3", endpoint_url=store.url, region_name="us-east-1")
    client.put_object(Bucket=BUCKET, Key=f"{url.removeprefix(f's3://{BUCKET}/')}{name}", Body=data)


@pytest.mark.slow
def test_a_shard_with_other_bytes_is_named_counted_and_left_out(
    url: str, shards: Path, store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    size = (shards / "train-000002.tar").stat().st_size
    overwrite(store, url, "train-000002.tar", b"\0" * size)
    found = as_json(capsys, "data", "check", url, code=1)
    assert [one["name"].partition(":train/")[0] for one in found["unreadable"]] == [f"{url}train-000002.tar"] * 4
    with pytest.raises(DataError, match=r"\d unreadable images?\n.*\n.*train-000002"):
        vitral.train(url, out=str(tmp_path / "a"), quiet=True, **{**TINY, "epochs": 1})
    run = vitral.train(url, out=str(tmp_path / "b"), quiet=True, bad_images="skip", **{**TINY, "epochs": 1})
    assert "left out 4 unreadable images" in (run.folder / "config.json").read_text()


def test_an_object_of_another_size_is_in_the_notes(url: str, store: Store) -> None:
    overwrite(store, url, "train-000002.tar", b"short")
    assert load(url).notes == (
        "1 of 6 shards, with 4 images, are broken: train-000002.tar (5 bytes instead of 20,480)",
    )


@pytest.mark.slow
def test_wrong_bytes_in_the_cache_are_fetched_again(url: str, shards: Path, store: Store) -> None:
    images = load(url)["train"]
    expected = contents(images)
    for path in (ShardCache().folder).glob("*.tar"):
        path.write_bytes(b"\0" * path.stat().st_size)
    store.forget()
    assert contents(load(url)["train"]) == expected
    assert set(store.shards()) == {f"train-{n:06}.tar" for n in range(6)}


# ---------------------------------------------------------------- the cache


def test_the_cache_is_bounded_and_keeps_the_last_used(
    url: str, shards: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = (shards / "train-000000.tar").stat().st_size
    monkeypatch.setenv(VARIABLE, f"{2.5 * size}")
    monkeypatch.setattr(remote_store, "SPARSE_READS", 0)
    images, cache = load(url)["train"], ShardCache()
    expected = contents(load(shards)["train"])
    for i in range(len(images)):
        assert bytes(images.fetch(i)) == expected[i]  # type: ignore[arg-type]
        assert cache.bytes <= 2.5 * size
    assert len(cache) == 2
    store.forget()
    again = load(url)["train"]
    again.fetch(20)
    again.fetch(16)
    assert store.shards() == [], "the last two are still there"


def test_the_command_empties_the_cache(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote_store, "SPARSE_READS", 0)
    contents(load(url)["val"])
    size = as_json(capsys, "data", "cache")["shards"]["bytes"]
    assert size == ShardCache().bytes > 0
    assert as_json(capsys, "data", "cache", "--clear")["shards"]["bytes"] == size
    assert ShardCache().bytes == 0


def test_sizes_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text, count in (("20GB", 20 * 10**9), ("1.5 MiB", 3 << 19), ("4096", 4096), ("", None)):
        monkeypatch.setenv(VARIABLE, text)
        assert ShardCache(tmp_path).limit == count
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(UsageError, match="no size"):
        ShardCache(tmp_path)


@pytest.mark.slow
def test_processes_fetch_a_shard_once(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "SPARSE_READS", 0)
    images = load(url)["train"]
    store.forget()
    fork = multiprocessing.get_context("fork")
    readers = [fork.Process(target=images.fetch, args=(i,)) for i in range(3)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert [reader.exitcode for reader in readers] == [0, 0, 0]
    assert store.shards() == ["train-000000.tar"]


@pytest.mark.slow
def test_a_killed_fetch_continues_behind_its_bytes(
    url: str, shards: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "SPARSE_READS", 0)
    monkeypatch.setattr(remote_store, "BLOCK", 4096)
    images = load(url)["train"]
    store.forget()
    read = Remote.read

    def killed(self: Remote, url: str, start: int = 0, size: int | None = None) -> bytes:
        if start >= 8192:
            raise KeyboardInterrupt
        return read(self, url, start, size)

    with monkeypatch.context() as patch:
        patch.setattr(Remote, "read", killed)
        with pytest.raises(KeyboardInterrupt):
            images.fetch(0)
    assert images.image(0).shape == (8, 10, 3)
    assert [first for _, first, _ in store.gets] == [0, 4096, 8192, 12288, 16384]


# ---------------------------------------------------------------- order


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows of two shards of four images."""
    monkeypatch.setattr(order, "WINDOW", 8)


def batches_of(split: Split, **options: object) -> Batches:
    preprocessing = Preprocessing(image_size=(8, 8), channels=3, mean=(0.5,) * 3, std=(0.5,) * 3)
    settings = {"residency": "stream", "workers": 2, "check": False, **options}
    augmentation = Augmentation(crop="random-resized")
    return Batches(
        split,
        preprocessing,
        batch_size=4,
        device=torch.device("cpu"),
        augmentation=augmentation,
        **settings,  # type: ignore[arg-type]
    )


def forget_shards(batches: Batches, store: Store) -> None:
    """Close and remove all shards that measuring the rate has fetched."""
    assert isinstance(batches.split.fetch, ShardFetch)
    batches.split.fetch._handles._open.clear()
    ShardCache().clear()
    store.forget()


@pytest.mark.usefixtures("small_windows")
def test_an_epoch_permutes_shards_and_the_images_of_a_window(url: str, shards: Path) -> None:
    for data in (str(shards), url):
        split = load(data)["train"]
        orders = [epoch_order(split, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)]
        assert np.array_equal(orders[0], orders[1])
        assert not np.array_equal(orders[0], orders[2])
        for one in orders:
            assert sorted(one.tolist()) == list(range(24))
            windows = (one // 4).reshape(3, 8)  # numbers of the shards
            assert [len(set(window.tolist())) for window in windows] == [2, 2, 2]
            assert any(np.any(np.diff(window) < 0) for window in windows), "mixed within the window"
    picked = load(url)["train"].select(np.arange(23, 0, -2))
    assert sorted(epoch_order(picked, torch.Generator())) == list(range(12))


def test_a_small_set_is_permuted_as_any_other(shards: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    expected = torch.randperm(24, generator=torch.Generator().manual_seed(5)).numpy()
    assert np.array_equal(epoch_order(load(shards)["train"], generator), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("small_windows")
def test_a_streamed_epoch_fetches_each_shard_once(url: str, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_store, "SPARSE_READS", 0)
    batches = batches_of(load(url)["train"])
    forget_shards(batches, store)
    try:
        seen = np.concatenate([batch.indices for batch in batches.epoch(3)])
    finally:
        batches.close()
    assert sorted(seen.tolist()) == list(range(24))
    assert sorted(store.shards()) == [f"train-{n:06}.tar" for n in range(6)], store.gets


@pytest.mark.slow
@pytest.mark.usefixtures("small_windows")
def test_resuming_within_an_epoch_is_exact_and_fetches_only_the_rest(
    url: str, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_store, "SPARSE_READS", 0)
    whole = batches_of(load(url)["train"])
    expected = [(batch.indices.tolist(), batch.images) for batch in whole.epoch(1)]
    whole.close()
    rest = batches_of(load(url)["train"])
    forget_shards(rest, store)
    found = [(batch.indices.tolist(), batch.images) for batch in rest.epoch(1, start=4)]
    rest.close()
    assert [indices for indices, _ in found] == [indices for indices, _ in expected[4:]]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(found, expected[4:], strict=True))
    assert len(store.shards()) == len(set(store.shards())) == 2


@pytest.mark.usefixtures("small_windows")
def test_shards_are_needed_in_the_order_of_the_batches(url: str) -> None:
    split = load(url)["train"]
    one = epoch_order(split, torch.Generator().manual_seed(2))
    needs = first_needs(split, [one[i : i + 4] for i in range(0, 24, 4)])
    assert sorted(shard for _, shard in needs) == list(range(6))
    assert [batch for batch, _ in needs] == sorted(batch for batch, _ in needs)
    assert [batch // 2 for batch, _ in needs] == [0, 0, 1, 1, 2, 2]


@pytest.mark.usefixtures("small_windows")
def test_a_record_that_breaks_while_streaming_is_named(shards: Path) -> None:
    record = Manifest.read(shards).splits["train"].records[13]
    path = shards / "train-000003.tar"
    data = bytearray(path.read_bytes())
    data[int(record["offset"]) + 5] ^= 255
    path.write_bytes(data)
    split = load(shards)["train"]
    batches = batches_of(split)
    assert len(batches.unreadable) == 1, "the first images are decoded, to measure the rate"
    few = split.select(np.r_[np.arange(13), np.arange(14, 24), 13])
    batches.close()
    broken = batches_of(few, check=True)
    assert [index for index, _ in broken.unreadable] == [23]
    with pytest.raises(ImageError, match="not those that were written") as caught:
        list(broken.epoch(0))
    broken.close()
    assert caught.value.name == few.names[23]


# ---------------------------------------------------------------- other stores


class _Plain(http.server.SimpleHTTPRequestHandler):
    """A server that ignores ranges and lists nothing."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web(shards: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Plain, directory=str(shards)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_http(web: str, shards: Path, store: Store) -> None:
    expected = contents(load(shards)["train"])
    assert contents(load(f"{web}/")["train"]) == expected
    assert contents(load(f"{web}/train-{{000000..000005}}.tar")["train"]) == expected
    for path in shards.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    assert sorted(contents(load(f"{web}/train-{{000000..000005}}.tar")["train"])) == sorted(expected)
    with pytest.raises(DataError, match="has no listings"):
        load(f"{web}/")


class _Stated(_Plain):
    """A server that states what `files` says of each path, and is busy for the first requests of each."""

    files: ClassVar[dict[str, tuple[bytes, dict[str, str]]]]
    asked: ClassVar[Counter[str]]
    busy = 0

    def do_GET(self) -> None:
        data, headers = self.files.get(self.path, (b"", {}))
        self.asked[self.path] += 1
        status = 503 if self.asked[self.path] <= self.busy else 200 if data else 404
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data) if status == 200 else 0))
        self.end_headers()
        if self.command == "GET" and status == 200:
            self.wfile.write(data)

    do_HEAD = do_GET  # noqa: N815


@pytest.fixture
def stated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[str, type[_Stated]]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    handler = type("Handler", (_Stated,), {"files": {}, "asked": Counter()})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", handler
        server.shutdown()


def packed(folder: Path, *names: str) -> bytes:
    """A tar of two images of these classes, of the same size whatever their names."""
    with webdataset.TarWriter(str(folder / "t.tar"), encoder=False) as sink:
        for i, name in enumerate(names):
            Image.new("RGB", (8, 8), (i, 0, 0)).save(folder / "t.png")
            sink.write({"__key__": str(i), "png": (folder / "t.png").read_bytes(), "cls": name.encode()})
    return (folder / "t.tar").read_bytes()


@pytest.mark.parametrize("header", ["ETag", "Last-Modified", ""])
def test_a_file_that_was_replaced_by_one_of_equal_size(header: str, stated, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    url, handler = stated
    found = []
    for day, names in ((1, ("ant", "bee")), (2, ("cat", "dog"))):
        data = packed(tmp_path, *names)
        about = {"ETag": f'"{day}"', "Last-Modified": f"Thu, 0{day} Jan 2026 00:00:00 GMT"}
        handler.files["/train.tar"] = data, {header: about[header]} if header else {}
        dataset = load(f"{url}/train.tar")
        found.append(dataset.classes)
    if header:
        assert (found, dataset.notes) == ([("ant", "bee"), ("cat", "dog")], ())
    else:
        assert "a change that keeps the size is not noticed" in dataset.notes[0]


def test_a_busy_server_is_asked_again(stated, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """fsspec reports any failed request as a missing file."""
    url, handler = stated
    handler.files["/train.tar"] = packed(tmp_path, "ant", "bee"), {}
    handler.busy = 2
    assert load(f"{url}/train.tar").classes == ("ant", "bee")
    with pytest.raises(DataError, match="no such shards"):
        load(f"{url}/gone.tar")
    handler.busy = 1_000
    with pytest.raises(DataError, match=r"503.*after 8 attempts"):
        load(f"{url}/other.tar")


@pytest.mark.slow
def test_shards_without_an_index_are_fetched_once_to_make_one(url: str, shards: Path, store: Store) -> None:
    expected = contents(load(shards)["train"])
    for path in shards.iterdir():
        if path.suffix != ".tar":
            path.unlink()
    address = store.put(shards, "no-index")
    store.forget()
    dataset = load(address)
    assert sorted(contents(dataset["train"])) == sorted(expected)
    assert dataset.classes == ("cat", "dog")
    assert len(store.shards()) == 8
    store.forget()
    load(address)
    assert store.shards() == []


def test_addresses() -> None:
    assert all(map(is_remote, ("s3://a/b", "gs://a", "https://a/b.tar", "hf://datasets/a/b")))
    assert not any(map(is_remote, ("/a/b", "a/b", "s3:/a", "file.tar", "timm:name")))


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingExtraError, match=r"vitral\[remote\]"):
        load("gs://bucket/shards/")


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"cannot read the shards\n.*\n.*after 8 attempts"):
        load("http://127.0.0.1:9/shards/")
    assert os.listdir(tmp_path) == []
