"""Every flipped bit, missing or extra byte is detected: the error names the file and the remedy."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shlex
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

import vitral
from running import TINY, as_words, in_child, mostly_slow, same_bits, train, weights_of
from vitral.cli.main import main
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.data.pixel_cache import Entry, EntryInfo, PixelCache
from vitral.digest import check, digest, sealed, with_digest, without_digest
from vitral.errors import DataError, Interrupted, RunError, VitralError, WeightsError
from vitral.export import export_model
from vitral.inference.engines.int8_ranges import Calibration, read_ranges, write_ranges
from vitral.training.run_folder import RunFolder
from vitral.weights import files, native
from vitral.weights.files import read_tensors
from vitral.workflows.running import execute, saving
from vitral.workflows.tables.features import FeatureCache
from vitral.workflows.verify import Verification
from vitral.workflows.verify import verify as vitral_verify

FLIPS = 120


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """A finished run of few images, including the files of a stopped one."""
    data = tmp_path_factory.mktemp("data")
    random_pixels = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (data / name).mkdir()
        for i in range(10):
            Image.fromarray(random_pixels.integers(0, 256, (10, 12, 3), dtype=np.uint8)).save(data / name / f"{i}.png")
    out = tmp_path_factory.mktemp("runs") / "run"
    train(data, out)
    shutil.copy(RunFolder(out).last, RunFolder(out).previous)
    return out


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> RunFolder:
    """A copy to damage."""
    return RunFolder(shutil.copytree(whole, tmp_path / "run"))


def flipped(content: bytes, places: list[int]) -> Iterator[tuple[int, bytes]]:
    """Yield the content with one bit flipped, for each bit offset."""
    for place in places:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        yield place, bytes(damaged)


def places_of(content: bytes, seed: int = 0) -> list[int]:
    """Return random bit offsets; for safetensors also in the header length, header, padding and every tensor."""
    chance = random.Random(seed)
    places = [chance.randrange(8 * len(content)) for _ in range(FLIPS)]
    if content[8:9] == b"{":
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__")
        begin = 8 + length
        places += list(range(64)) + [chance.randrange(64, 8 * begin) for _ in range(FLIPS)]
        places += [8 * begin - 1 - bit for bit in range(16)]
        places += [8 * (begin + one["data_offsets"][0]) + chance.randrange(32) for one in header.values()]
        at = content.rindex(b"vitral_digest", 0, begin)
        places += [8 * at + bit for bit in range(0, 8 * 64, 5)]
    return places


def is_found(file: Path, read: Callable[[], object]) -> None:
    """Check that reading fails with a `VitralError` that names the file, in at most five lines."""
    with pytest.raises(VitralError) as caught:
        read()
    assert file.name in str(caught.value)
    assert "try: " in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


READERS: dict[str, Callable[[RunFolder], object]] = {
    "model.safetensors": lambda run: vitral.load(run.path, device="cpu", precision="fp32", engine="plain"),
    "checkpoints/last.safetensors": lambda run: read_tensors(run.last),
    "config.json": lambda run: run.read_plan(),
    "result.json": lambda run: run.read_result(),
    "metrics.jsonl": lambda run: run.read_history(),
    "manifest.json": lambda run: run.read_plan(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_flipped_bit_is_detected_when_the_file_is_read(run: RunFolder, name: str):
    file = run.path / name
    content = file.read_bytes()
    READERS[name](run)
    for _, damaged in flipped(content, places_of(content)):
        file.write_bytes(damaged)
        is_found(file, lambda: READERS[name](run))
    for damaged in (
        content[:-1],
        content[: len(content) // 2],
        content[:9],
        b"",
        content + b"\0",
        content + b" " * 400,
    ):
        file.write_bytes(damaged)
        is_found(file, lambda: READERS[name](run))
    file.write_bytes(content)
    READERS[name](run)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*READERS, "report.html", "checkpoints/previous.safetensors"])
def test_verify_finds_it_too(run: RunFolder, name: str, capsys: pytest.CaptureFixture[str]):
    file = run.path / name
    content = file.read_bytes() if file.is_file() else b""
    if not content:  # the tests write no page
        content = with_digest(b"<html>", "\n<!-- ", " -->\n")
        file.write_bytes(content)
    assert not vitral.verify(run.path).damaged
    for _, damaged in flipped(content, places_of(content)[:: 1 if len(content) < 3000 else 4]):
        file.write_bytes(damaged)
        found = vitral.verify(run.path)
        assert [Path(one.file) for one in found.damaged] == [file]
        assert found.damaged[0].hint
    assert main(["verify", str(run.path), "--format", "json"]) == 1
    reported = capsys.readouterr()
    assert not json.loads(reported.out)["whole"]
    assert f"{file} is damaged" in reported.err.replace("error: ", "")
    file.write_bytes(content)
    assert main(["verify", str(run.path)]) == 0
    assert main(["verify", str(run.path / "nothing")]) == 2


def test_a_whole_run_is_whole_after_it_moved(run: RunFolder, tmp_path: Path):
    states = {Path(one.file).name: one.state for one in vitral.verify(run.path).files}
    assert set(states.values()) == {"whole"}
    assert {"manifest.json", "config.json", "model.safetensors", "last.safetensors"} <= set(states)


def test_older_and_foreign_files_still_load(run: RunFolder, tmp_path: Path):
    weights = weights_of(run.path)
    header = read_tensors(run.weights)[1]
    del header["finite"]
    save_file(weights, run.weights, metadata={"vitral": json.dumps(header)})
    state, reported = read_tensors(run.last)
    save_file(state, run.last, metadata={"vitral": json.dumps(reported)})
    run.manifest.path.unlink()
    found = vitral.verify(run.path)
    assert not found.damaged
    assert {one.state for one in found.files} == {"whole", "without digest"}
    assert same_bits(dict(native.read(run.weights).state), weights)
    assert run.read_plan().run.epochs == 3
    assert len(run.read_history()) == 3
    save_file(weights, tmp_path / "plain.safetensors")
    assert vitral.verify(tmp_path / "plain.safetensors").files[0].state == "without digest"


def test_exported_weights_have_a_digest_and_are_deterministic(run: RunFolder, tmp_path: Path):
    for name in ("a", "b"):
        files.write_plain(tmp_path / name, weights_of(run.path), {"z": "ü", "license": "mit"})
    content = (tmp_path / "a").read_bytes()
    assert content == (tmp_path / "b").read_bytes()
    assert check(content)
    target = tmp_path / "plain.safetensors"
    for _, damaged in flipped(content, places_of(content)):
        target.write_bytes(damaged)
        assert vitral.verify(target).damaged


def test_a_change_by_hand_can_be_accepted(run: RunFolder, capsys: pytest.CaptureFixture[str]):
    config = run.config.read_text("utf-8")
    run.config.write_text(config.replace('"epochs": 3', '"epochs": 4'), "utf-8")
    with pytest.raises(RunError, match="changed by hand, or damaged") as caught:
        run.read_plan()
    command = str(caught.value).rpartition("on purpose, ")[2].strip()
    assert main(shlex.split(command)[1:]) == 0
    assert run.read_plan().run.epochs == 4
    run.config.write_text("{", "utf-8")
    assert main(shlex.split(command)[1:]) == 2
    assert "is not JSON" in capsys.readouterr().err


def test_a_damaged_checkpoint_suggests_the_previous_one(photos, tmp_path, monkeypatch):
    whole = train(photos, tmp_path / "whole")
    monkeypatch.setattr(saving, "SAVING_SHARE", 1e9)  # after every epoch, however quick
    out = RunFolder(tmp_path / "cut")
    _stop_in_epoch(monkeypatch, 3, lambda: train(photos, out.path))
    content = out.last.read_bytes()
    out.last.write_bytes(bytes([*content[:-9], content[-9] ^ 4, *content[-8:]]))
    with pytest.raises(RunError, match=r"last\.safetensors") as caught:
        vitral.train(out=str(out.path), resume=True, quiet=True)
    reported = str(caught.value)
    assert "previous checkpoint (epoch 3, batch 0)" in reported
    assert len(reported.splitlines()) <= 5
    command = reported.partition("batch 0): ")[2].partition(";")[0]
    move, again = command.split(" && ")
    shutil.move(*shlex.split(move)[1:])
    monkeypatch.undo()
    assert main([*shlex.split(again)[1:], "--quiet"]) == 0
    assert same_bits(weights_of(whole.folder), weights_of(out.path))
    assert not out.previous.exists()
    assert not vitral.verify(out.path).damaged


def test_without_another_checkpoint_the_best_weights_are_suggested(photos, tmp_path, monkeypatch):
    out = RunFolder(tmp_path / "cut")
    _stop_in_epoch(monkeypatch, 2, lambda: train(photos, out.path))
    for file in (out.last, out.previous):
        if file.is_file():
            file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(RunError, match=f"train from its best weights: vitral train .* --init {out.path}"):
        vitral.train(out=str(out.path), resume=True, quiet=True)


def _stop_in_epoch(monkeypatch: pytest.MonkeyPatch, epoch: int, work: Callable[[], object]) -> None:
    """Interrupt `work` with Ctrl-C after the first batch of an epoch."""
    original = execute.ConsoleListener.on_epoch_start

    def started(self: Any, number: int, *about: Any) -> None:
        original(self, number, *about)
        if number == epoch - 1:
            os.kill(os.getpid(), 2)

    with monkeypatch.context() as patch:
        patch.setattr(execute.ConsoleListener, "on_epoch_start", started)
        with pytest.raises(Interrupted):
            work()


@pytest.mark.real
@pytest.mark.parametrize("death", mostly_slow(range(20), 7))
def test_killed_between_any_two_writes(photos, tmp_path, monkeypatch, whole_weights, death):
    """Kill before or after any file is replaced: nothing is reported as damaged; the resumed run is bit-identical."""
    out = RunFolder(tmp_path / "cut")
    count = iter(range(10**6))
    original = os.replace

    def replace(*about: Any, **more: Any) -> None:
        number = next(count)
        if number == death:
            os._exit(9)
        original(*about, **more)

    def work() -> int:
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(saving, "SAVING_SHARE", 1e9)
        train(photos, out.path)
        return 0

    code = in_child(work)
    assert code in (0, 9)
    monkeypatch.undo()
    if not out.is_run():
        assert not out.exists()
        train(photos, out.path)
    assert not vitral.verify(out.path).damaged
    train(photos, out.path, resume=True)
    assert same_bits(whole_weights, weights_of(out.path))
    assert not vitral.verify(out.path).damaged


@pytest.fixture
def whole_weights(photos: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    return weights_of(train(photos, tmp_path / "whole").folder)


# ---------------------------------------------------------------- next to the weights, and in the caches


def test_ranges(tmp_path: Path):
    network = torch.nn.Sequential(torch.nn.Linear(4, 4))
    file = tmp_path / "model.int8.json"
    write_ranges(file, network, Calibration({"0": (-1.0, 2.0)}), measured_on="images")
    content = file.read_bytes()
    assert read_ranges(file, network, "x").ranges == {"0": (-1.0, 2.0)}
    for _, damaged in flipped(content, list(range(0, 8 * len(content), 3))):
        file.write_bytes(damaged)
        is_found(file, lambda: read_ranges(file, network, "x"))
    data = json.loads(content)
    del data["vitral_digest"]
    file.write_text(json.dumps(data))
    assert read_ranges(file, network, "x").ranges


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, photos: Path) -> Callable[..., Batches]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    images = vitral.load_data(str(photos))["train"]

    def batches(workers: int = 0, crop: Any = "none") -> Batches:
        return Batches(
            images,
            Preprocessing((8, 12)),
            batch_size=4,
            device=torch.device("cpu"),
            residency="cache",
            workers=workers,
            augmentation=Augmentation(crop=crop),
        )

    return batches


@pytest.mark.slow
@pytest.mark.parametrize(("crop", "workers"), [("none", 0), ("random-resized", 0), ("random-resized", 2)])
def test_pixels(cached: Callable[..., Batches], crop: str, workers: int):
    batches = cached(crop=crop)
    list(batches.epoch())
    (path,) = PixelCache().paths()
    file = path / "pixels.bin"
    content = file.read_bytes()
    for _, damaged in flipped(content, places_of(content)[: 3 if workers else FLIPS]):
        file.write_bytes(damaged)
        found = cached(workers, crop)
        with pytest.raises(DataError, match=r"pixels\.bin") as caught:
            list(found.epoch())
        found.close()
        assert "vitral data cache --clear" in str(caught.value)
        assert "Traceback" not in str(caught.value)
        assert [Path(one.file) for one in vitral.verify().damaged] == [file]
    file.write_bytes(content)
    assert main(["verify"]) == 0


@pytest.mark.parametrize("name", ["index.npy", "entry.json"])
@pytest.mark.parametrize("split", ["train", "val"])
def test_training_reports_which_split_is_decoded_again(
    split: str, name: str, make_images, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    photos = make_images({"cat": 8, "dog": 8})
    words = ["train", str(photos), *as_words({**TINY, "residency": "cache", "epochs": 1, "val_fraction": 0.25})]
    assert main([*words, "--out", str(tmp_path / "first")]) == 0
    assert "damaged" not in capsys.readouterr().err
    (path,) = (one for one in PixelCache().paths() if EntryInfo.read(one).images == {"train": 12, "val": 4}[split])
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    assert main([*words, "--out", str(tmp_path / "second")]) == 0
    reported = capsys.readouterr().err
    assert f"{path / name} was damaged, so images are decoded again" in reported
    (line,) = (line for line in reported.splitlines() if "damaged" in line)
    assert line.startswith({"train": "training images: ", "val": "val images: "}[split])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["index.npy", "entry.json"])
def test_files_next_to_the_pixels(cached: Callable[..., Batches], name: str):
    wanted = torch.cat([one.images for one in cached().epoch()])
    (path,) = PixelCache().paths()
    content = (path / name).read_bytes()
    for _, damaged in flipped(content, places_of(content)):
        (path / name).write_bytes(damaged)
        assert [Path(one.file) for one in vitral.verify().damaged] == [path / name]
        again = cached()
        assert f"{path / name} was damaged, so images are decoded again" in again.residency
        assert torch.equal(torch.cat([one.images for one in again.epoch()]), wanted)
    Entry(path).verify()


def test_features(tmp_path: Path):
    cache = FeatureCache(tmp_path)
    values = torch.randn(5, 3)
    cache.write("k", values)
    found = cache.read("k", 5)
    assert found is not None
    assert torch.equal(found, values)
    content = cache.path("k").read_bytes()
    for _, damaged in flipped(content, places_of(content)):
        cache.path("k").write_bytes(damaged)
        cache.failure = None
        assert cache.read("k", 5) is None
        assert cache.failure == f"{cache.path('k')} was damaged, so features are computed again"
    old = {"key": "k", "digest": hashlib.sha256(values.numpy().data).hexdigest()}
    save_file({"features": values}, cache.path("k"), metadata={"vitral": json.dumps(old)})
    assert cache.read("k", 5) is not None


def test_bytes_of_any_kind():
    content = b"\x7fELF" + bytes(range(256))
    carried = with_digest(content)
    assert check(carried)
    assert without_digest(carried) == content
    assert not check(content)
    assert without_digest(content) == content
    for _, damaged in flipped(carried, list(range(8 * len(carried)))):
        with pytest.raises(ValueError, match="digest"):
            check(damaged)
    assert digest(b"") == "xxh3-128:99aa06d3014798d86001c324468d497f"  # of XXH3-128 with seed 0, by its authors
    with pytest.raises(ValueError, match="there is no"):
        sealed(b"{}")


def test_a_verification_is_plain_data(run: RunFolder):
    found = vitral.verify(run.path)
    assert isinstance(found, Verification)
    assert json.loads(json.dumps(found.to_json()))["of"] == str(run.path)
    with pytest.raises(WeightsError, match="no such run or weights"):
        vitral.verify(run.path / "gone.safetensors")


@pytest.mark.parametrize("name", ["config.json", "result.json", "metrics.jsonl", "model.safetensors"])
def test_a_file_that_is_gone_is_damage(run, name):
    (run.path / name).unlink()
    (damaged,) = vitral_verify(run.path).damaged
    assert damaged.file == str(run.path / name)
    assert damaged.why == "it is missing"
    assert damaged.hint


def test_the_files_of_an_export_are_checked(tmp_path: Path):
    exported = export_model("demo", "torch", out=tmp_path / "there").folder
    assert {one.state for one in vitral_verify(exported).files} == {"whole"}
    assert {Path(one.file).name for one in vitral_verify(exported).files} == {
        "export.json",
        "model.pt2",
        "preprocessing.json",
    }
    with open(exported / "model.pt2", "r+b") as file:
        file.seek(5_000)
        byte = file.read(1)
        file.seek(5_000)
        file.write(bytes([byte[0] ^ 1]))
    (exported / "preprocessing.json").unlink()
    found = {Path(one.file).name: one for one in vitral_verify(exported).files}
    assert found["model.pt2"].state == found["preprocessing.json"].state == "damaged"
    assert found["preprocessing.json"].why == "it is missing"
    assert "vitral export" in found["model.pt2"].hint


def test_the_exports_of_a_run_are_checked_with_it(trained: vitral.TrainedRun, tmp_path: Path):
    folder = Path(shutil.copytree(trained.folder, tmp_path / "run"))
    export_model(folder, "torch")
    names = {str(Path(one.file).relative_to(folder)) for one in vitral_verify(folder).files}
    assert {"export/torch/export.json", "export/torch/model.pt2"} <= names
    assert not vitral_verify(folder).damaged
