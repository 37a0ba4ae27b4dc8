"""JPEGs decoded by the device: the CPU's decoder takes the place of nvJPEG, so that pixels are equal but for rounding.

tests/test_gpu.py measures nvJPEG itself.
"""

from __future__ import annotations

import io
import json
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import vitral
from vitral.data import Split
from vitral.data.gpu_decoding import EncodedImages, GpuDecoder, resized_crops
from vitral.data.images.augmentation import Augmentation
from vitral.data.images.jpeg_header import PlainJpeg
from vitral.data.images.lazy_torchvision import torchvision
from vitral.data.images.preprocessing import Preprocessing
from vitral.data.loader import Batches
from vitral.errors import ImageError

CPU = torch.device("cpu")
CROP = Augmentation(crop="random-resized")
DECODED: list[int] = []


def photograph(number: int, kind: str = "JPEG", size: tuple[int, int] = (30, 41), **options) -> bytes:
    small = np.random.default_rng(number).integers(0, 256, (4, 5, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize(size[::-1], Image.Resampling.BICUBIC).save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return photograph(4, exif=exif.tobytes())


def all_kinds() -> list[bytes]:
    """Plain JPEGs among files that the GPU must leave alone: EXIF, RGB, gray, PNG, and one to be decoded smaller."""
    plain = [photograph(k, size=(25 + k, 33)) for k in range(8)]
    others = [
        turned(),
        photograph(9, "PNG"),
        photograph(10, size=(90, 120)),
        photograph(11, keep_rgb=True, subsampling=0),
    ]
    file = io.BytesIO()
    Image.open(io.BytesIO(photograph(12))).convert("L").save(file, "JPEG")
    return [*plain[:5], *others, file.getvalue(), *plain[5:]]


@pytest.fixture
def a_device_that_decodes(monkeypatch):
    """Let the CPU serve as the device, and keep count of what it decodes."""
    torchvision()
    DECODED.clear()

    def decode(self, files):
        DECODED.append(len(files))
        return [torch.ops.image.decode_jpeg(file, 3) for file in files]

    monkeypatch.setattr(GpuDecoder, "serves", staticmethod(lambda images, device: True))
    monkeypatch.setattr(GpuDecoder, "_by_nvjpeg", decode)
    monkeypatch.setattr(GpuDecoder, "rate", lambda self, images: 1e9)


def batches(files: list[bytes], **options) -> Batches:
    split = Split([f"{i}.jpg" for i in range(len(files))], np.arange(len(files)) % 3, files.__getitem__)
    given = {"batch_size": 4, "device": CPU, "workers": 0, "augmentation": CROP, "seed": 5, **options}
    return Batches(split, Preprocessing((16, 20)), **given)


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.uint8
    difference = (ours.int() - theirs.int()).abs()
    assert difference.max() <= 1
    assert difference.double().mean() < 0.2


@pytest.mark.parametrize("size", [(16, 20), (224, 224), (7, 90)])
def test_crops_are_resized_as_by_torch(size):
    generator = np.random.default_rng(0)
    images = [torch.from_numpy(generator.integers(0, 256, (3, 30 + k, 200), np.uint8)) for k in range(9)]
    boxes = [(k, 3 * k, int(generator.integers(1, 29)), int(generator.integers(1, 170))) for k in range(9)]
    found = resized_crops(images, boxes, size)
    for one, image, (top, left, height, width) in zip(found, images, boxes, strict=True):
        crop = image[None, :, top : top + height, left : left + width].double()
        wanted = F.interpolate(crop, size, mode="bilinear", antialias=True)[0]
        assert (one.double() - wanted).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("workers", [0, 2])
def test_crops_are_those_of_the_cpu(workers, a_device_that_decodes):
    files = all_kinds()
    there, here = batches(files, workers=workers), batches(files, residency="memory")
    assert there.residency.startswith("JPEGs decoded on the GPU in every epoch: 1,000,000,000 images/s, all cores ")
    assert here.residency.endswith("of decoded pixels in memory")
    for epoch, start in ((0, 0), (1, 1)):
        for ours, theirs in zip(there.epoch(epoch, start), here.epoch(epoch, start), strict=True):
            assert np.array_equal(ours.indices, theirs.indices)
            assert torch.equal(ours.labels, theirs.labels)
            assert_close(ours.images, theirs.images)
    there.close()


def test_only_plain_files_are_decoded_there(a_device_that_decodes):
    found = batches(all_kinds(), batch_size=12)
    DECODED.clear()
    for _ in range(3):
        assert len([*found.epoch(0)]) == 1
    assert sum(DECODED) in range(3 * 7, 3 * 8 + 1), "eight of thirteen are; a batch of twelve leaves one out"


def test_a_file_that_the_device_cannot_decode_is_decoded_by_the_cpu(a_device_that_decodes, monkeypatch):
    def decode(self, files):
        raise RuntimeError("nvjpegDecode failed: NVJPEG_STATUS_JPEG_NOT_SUPPORTED")

    monkeypatch.setattr(GpuDecoder, "_by_nvjpeg", decode)
    files = all_kinds()
    for ours, theirs in zip(batches(files).epoch(), batches(files, residency="memory").epoch(), strict=True):
        assert_close(ours.images, theirs.images)


def test_a_file_damaged_later_is_named(a_device_that_decodes):
    files = [photograph(k) for k in range(8)]
    found = batches(files)
    files[2] = files[2][:300]
    with pytest.raises(ImageError, match=r"2\.jpg"):
        [*found.epoch()]


def test_unreadable_files_are_collected_before_training(a_device_that_decodes):
    files = all_kinds()
    files[2], files[9] = files[2][:300], b"\xff\xd8\xffnot a photograph"
    assert [index for index, _ in batches(files).unreadable] == [2, 9]


def test_a_library_without_nvjpeg_leaves_decoding_to_the_cpu(a_device_that_decodes, monkeypatch):
    def rate(self, images):
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support")

    monkeypatch.setattr(GpuDecoder, "rate", rate)
    assert batches(all_kinds()).residency.endswith("of decoded pixels in memory")
    assert "streamed by" in batches(all_kinds(), residency="stream").residency


def test_the_slower_one_is_not_taken(a_device_that_decodes, monkeypatch):
    monkeypatch.setattr(GpuDecoder, "rate", lambda self, images: 0.5)
    assert batches(all_kinds()).residency.endswith("of decoded pixels in memory")


def test_a_narrow_lead_over_processes_is_not_taken(a_device_that_decodes, monkeypatch):
    monkeypatch.setattr(Batches, "_check", lambda self, images, progress: 0.9e9)
    found = batches(all_kinds())
    assert found.residency == "streamed by 0 workers; all cores decode 900,000,000 images/s"
    assert found.decoding_rate == 0.9e9


@pytest.mark.parametrize(("rate", "waited", "given_up"), [(100, 0.9, True), (100, 0.3, False), (9e8, 0.9, False)])
def test_a_decoder_that_steps_wait_for_is_given_up(rate, waited, given_up, a_device_that_decodes, monkeypatch):
    monkeypatch.setattr(Batches, "_check", lambda self, images, progress: 5000.0)
    files = all_kinds()
    found, here = batches(files), batches(files, residency="memory")
    [*found.epoch(0)]
    assert found.reconsider(rate, waited) == given_up
    assert found.residency == (
        "streamed by 0 workers; all cores decode 5,000 images/s; beside the steps a GPU decoded 100"
        if given_up
        else "JPEGs decoded on the GPU in every epoch: 1,000,000,000 images/s, all cores 5,000"
    )
    DECODED.clear()
    for ours, theirs in zip(found.epoch(1), here.epoch(1), strict=True):
        assert_close(ours.images, theirs.images)
        assert torch.equal(ours.images, theirs.images) or not given_up
    assert bool(DECODED) != given_up
    assert not (given_up and found.reconsider(rate, waited)), "said once"


def test_a_run_goes_on_with_the_cpu_where_its_steps_starve(a_device_that_decodes, monkeypatch, tmp_path, capsys):
    (tmp_path / "photographs" / "a").mkdir(parents=True)
    (tmp_path / "photographs" / "b").mkdir()
    for number in range(24):
        (tmp_path / "photographs" / "ab"[number % 2] / f"{number}.jpg").write_bytes(photograph(number))
    fast = GpuDecoder.__call__

    def slow(self, batch):
        time.sleep(0.5)
        return fast(self, batch)

    monkeypatch.setattr(GpuDecoder, "__call__", slow)
    options: dict[str, Any] = {"model": "Micro/8", "image_size": 16, "epochs": 2, "batch_size": 6, "init": "none"}
    data, out = str(tmp_path / "photographs"), str(tmp_path / "run")
    vitral.train(data, residency="stream", workers=0, crop="random-resized", out=out, **options)
    first, second = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines())
    assert first["residency"].startswith("streamed by 0 workers; all cores decode ")
    assert "residency" not in second
    assert second["waited"] < first["waited"]
    assert f"training images: {first['residency']}" in capsys.readouterr().err


def test_the_trial_measures_jpegs(a_device_that_decodes, monkeypatch):
    monkeypatch.undo()

    def rate(files: list[bytes]) -> float:
        split = Split([str(i) for i in range(len(files))], np.zeros(len(files), np.int64), files.__getitem__)
        images = EncodedImages(split, Preprocessing((16, 20)), CROP)
        return GpuDecoder(CPU, images.preprocessing, lambda all: [torch.ops.image.decode_jpeg(f, 3) for f in all]).rate(
            images
        )

    assert rate([photograph(k) for k in range(6)]) > 0
    assert rate([photograph(k, "PNG") for k in range(6)]) == 0


def test_who_is_served():
    def served(device: str, **options) -> bool:
        crop = options.pop("crop", "random-resized")
        images = EncodedImages(
            Split(["a"], np.zeros(1, np.int64), lambda i: b""),
            Preprocessing((16, 20), **options),
            Augmentation(crop=crop),
        )
        return GpuDecoder.serves(images, torch.device(device))

    gray = {"channels": 1, "mean": (0.5,), "std": (0.5,)}
    assert served("cuda")
    assert not any([served("cpu"), served("cuda", crop="none"), served("cuda", interpolation="bicubic")])
    assert not served("cuda", **gray)


def test_colors_that_only_the_header_explains():
    """Files whose three components are RGB, by their names or by Adobe's segment."""
    assert PlainJpeg.of(photograph(0)) == ("RGB", 30, 41, True)
    kept = photograph(0, keep_rgb=True, subsampling=0)
    assert PlainJpeg.of(kept) == ("RGB", 30, 41, False)
    plain = photograph(0)
    adobe = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"
    assert PlainJpeg.of(plain[:2] + adobe + plain[2:]) == ("RGB", 30, 41, False)


def test_many_cores_check_by_processes(monkeypatch):
    monkeypatch.setattr("vitral.data.loader.cores", lambda: 16)
    monkeypatch.setattr("vitral.data.loader._WINDOW", 16)
    files = [photograph(k % 7) for k in range(150)]
    files[3], files[140] = b"", files[140][:200]
    done: list[int] = []
    found = batches(files, residency="stream", workers=2, progress=done.append)
    assert [index for index, _ in found.unreadable] == [3, 140]
    assert "empty file" in str(found.unreadable[0][1])
    assert sum(done) == 150
    assert found.decoding_rate > 0
