"""Images with more than 8 bits: one scale for a set, and levels that travel with the weights."""

from __future__ import annotations

import dataclasses
import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from running import printed, train
from vitral.data import DataSet, Split, load
from vitral.data.images.decode import read_image
from vitral.data.images.depth import Depth, depth_of, leveled
from vitral.data.images.levels import to_uint8
from vitral.errors import DataError, ImageError, UsageError
from vitral.inference.inputs import expand, pixels_of
from vitral.weights.preprocessing_configs import differences


def saved(values: np.ndarray, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values).save(path)
    return path


def two_classes(folder: Path, levels: dict[str, int], suffix: str, kind: type[np.generic]) -> Path:
    """Twenty noisy images of each class around its level."""
    rng = np.random.default_rng(0)
    for label, level in levels.items():
        for number in range(20):
            noise = rng.uniform(-8, 8, (8, 8)) if kind is np.float32 else rng.integers(-8, 9, (8, 8))
            saved((level + noise).astype(kind), folder / label / f"{number}.{suffix}")
    return folder


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    """12-bit values in 16-bit files, of two classes that differ by less than half a gray of 65,535."""
    return two_classes(tmp_path / "scans", {"air": 1000, "bone": 1100}, "png", np.uint16)


@pytest.mark.parametrize(
    ("suffix", "dtype"), [("png", np.uint16), ("tif", np.uint16), ("pgm", np.uint16), ("tif", np.int32)]
)
def test_levels_are_those_of_the_container_or_stated(suffix, dtype, tmp_path):
    values = np.array([[0, 992, 1050, 1108, 60_000]], dtype)
    path = saved(values, tmp_path / f"one.{suffix}")
    assert read_image(path)[..., 0].tolist() == [[0, 4, 4, 4, 233]]
    assert read_image(path, levels=(0, 4095))[..., 0].tolist() == [[0, 62, 65, 69, 255]]
    assert read_image(path, levels=(992, 1108))[..., 0].tolist() == [[0, 0, 128, 255, 255]]
    assert read_image(values.astype(np.uint16), levels=(992, 1108))[..., 0].tolist() == [[0, 0, 128, 255, 255]]


def test_strips_of_a_large_image_have_its_levels(tmp_path, monkeypatch):
    values = np.arange(4000, dtype=np.uint16).reshape(80, 50)
    for name in ("one.png", "one.tif"):
        path = saved(values if name == "one.png" else values.astype(np.int32), tmp_path / name)
        whole = read_image(path, levels=(100, 3000))
        with monkeypatch.context() as patched:
            patched.setattr("vitral.data.images.pixels._STRIP", 1000)
            assert np.array_equal(read_image(path, levels=(100, 3000)), whole)


def test_values_that_state_no_range_are_read_with_stated_levels(tmp_path):
    path = saved(np.array([[0, 100, 200]], np.int32), tmp_path / "dark.tif")
    with pytest.raises(ImageError, match="add --levels"):
        read_image(path)
    assert read_image(path, levels=(0, 200))[..., 0].tolist() == [[0, 128, 255]]
    below = saved(np.array([[-1000, 0, 1000]], np.int32), tmp_path / "hounsfield.tif")
    assert read_image(below, levels=(-1000, 1000))[..., 0].tolist() == [[0, 128, 255]]


def test_eight_bits_are_left_alone_and_deep_colors_refused(tmp_path):
    path = saved(np.array([[0, 100, 200]], np.uint8), tmp_path / "eight.png")
    assert read_image(path, levels=(0, 4095))[..., 0].tolist() == [[0, 100, 200]]
    color = saved(np.zeros((1, 1, 3), np.uint8), tmp_path / "color.png")
    assert read_image(color, levels=(0, 4095)).shape == (1, 1, 3)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes((0, 1, 0, 2, 0, 3, 0))))
    for deep in (b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b""), b"P6 1 1 65535\n" + bytes((1, 0) * 3)):
        assert read_image(deep).shape == (1, 1, 3)
        with pytest.raises(ImageError, match="--levels is for gray images"):
            read_image(deep, levels=(0, 4095))


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def test_a_pgm_that_states_its_white_is_read_with_it(tmp_path):
    path = tmp_path / "a" / "scan.pgm"
    path.parent.mkdir()
    path.write_bytes(b"P5 3 1 4095\n" + struct.pack(">HHH", 0, 2048, 4095))
    assert read_image(path)[..., 0].tolist() == [[0, 128, 255]]
    assert read_image(path, levels=(0, 4095))[..., 0].tolist() == [[0, 128, 255]]
    assert read_image(path, levels=(2048, 4095))[..., 0].tolist() == [[0, 0, 255]]
    assert depth_of(load(tmp_path)["train"]) is None


def test_a_proposal_fits_the_values():
    def proposal(*values: int) -> tuple[int, int]:
        return Depth(np.array(values)).proposal

    assert proposal(*range(0, 1024, 8)) == (0, 1023)
    assert proposal(*range(0, 4000, 30)) == (0, 4095)
    assert proposal(*range(0, 16_000, 30)) == (0, 16_383)
    assert proposal(*range(0, 60_000, 30)) == (0, 65_535)
    assert proposal(*range(992, 1108)) == (992, 1107), "the whole range would leave few grays"
    assert proposal(*range(-1000, 1001)) == (-1000, 1000)


def test_check_and_plan_report_the_levels_in_use(scans, tmp_path, capsys):
    assert depth_of(load(scans)["train"]).range == (992, 1108)
    found = printed(capsys, "data", "check", str(scans), code=1)[0]  # noise: the same after scaling
    assert "--levels 992 1108 keeps" in " ".join(found.split())
    with pytest.raises(DataError, match="8 bits keep 1 gray") as caught:
        train(scans, tmp_path / "run")
    assert "--levels 992 1108 keeps 34" in str(caught.value)


def test_levels_travel_with_the_weights(scans, tmp_path, capsys):
    run = train(scans, tmp_path / "run", levels=(992, 1108), epochs=12, val_fraction=0.3)
    assert run.result["val_accuracy"] == 1
    assert "values 992 to 1,108 of 992 to 1,108 are 34 grays" in (run.folder / "config.json").read_text()
    predictor = vitral.load(run.folder)
    assert predictor.preprocessing.levels == (992, 1108)
    for label in ("air", "bone"):
        assert predictor(scans / label / "0.png").label == label
        assert predictor(Image.open(scans / label / "0.png")).label == label
        assert predictor(np.asarray(Image.open(scans / label / "0.png"))).label == label
    assert vitral.evaluate(run.folder, str(scans), split="train").accuracy == 1
    shown = printed(capsys, "explain", str(run.folder), str(scans / "air/0.png"), "--out", str(tmp_path / "map.png"))
    assert "air" in shown[0] + shown[1]
    again = train(scans, tmp_path / "again", init=str(run.folder), epochs=1)
    assert vitral.load(again.folder).preprocessing.levels == (992, 1108)


@pytest.fixture
def floats(tmp_path: Path) -> Path:
    """Floats of 0 to 255 of which one image is nearly black, so that it alone would be read as 0 to 1."""
    folder = two_classes(tmp_path / "floats", {"dark": 40, "light": 200}, "tif", np.float32)
    saved(np.random.default_rng(1).uniform(0, 1, (8, 8)).astype(np.float32), folder / "dark" / "night.tif")
    return folder


def test_floats_of_a_set_have_one_range(floats, tmp_path, capsys):
    night = floats / "dark" / "night.tif"
    assert read_image(night).max() > 200, "alone it has the range 0 to 1"
    assert leveled(load(floats))["train"].levels == (0, 255)
    found = printed(capsys, "data", "check", str(floats))[0]
    assert "0 is black, 255 white, for all images" in " ".join(found.split())
    run = train(floats, tmp_path / "run", epochs=8, val_fraction=0.3)
    config = json.loads((run.folder / "config.json").read_text())
    assert config["run"]["levels"] == [0, 255]
    assert "0 is black, 255 white, for all images" in json.dumps(config)
    predictor = vitral.load(run.folder)
    assert predictor.prepare(night).max() <= 1
    assert predictor(night).label == "dark"
    assert predictor(floats / "light" / "3.tif").label == "light"
    assert vitral.evaluate(run.folder, str(floats), split="train").accuracy == 1


def test_weights_without_levels_are_evaluated_with_one_range(floats, tmp_path, capsys):
    colors = tmp_path / "colors"
    for label, level in (("dark", 40), ("light", 200)):
        for number in range(20):
            saved(np.full((8, 8), level + number % 5, np.uint8), colors / label / f"{number}.png")
    run = train(colors, tmp_path / "run", epochs=8)
    assert vitral.load(run.folder).preprocessing.levels is None
    assert vitral.evaluate(run.folder, str(floats)).accuracy == 1
    neighbors = printed(capsys, "evaluate", str(run.folder), str(floats), "--knn", "3", "--cache", str(tmp_path / "c"))
    assert "100" in neighbors[0]


def test_values_that_do_not_belong_to_the_levels_of_floats_are_refused(tmp_path):
    bright = saved(np.array([[0, 100, 200]], np.float32), tmp_path / "bright.tif")
    with pytest.raises(ImageError, match="values from 0 to 200 in a set of 0 to 1"):
        read_image(bright, levels=(0, 1))
    assert read_image(bright, levels=(100, 300))[..., 0].tolist() == [[0, 0, 128]]
    fractions = saved(np.array([[0, 0.5, 1]], np.float32), tmp_path / "fractions.tif")
    with pytest.raises(ImageError, match="keep the values as they were stored"):
        read_image(fractions, levels=(0, 4095))
    assert read_image(fractions, levels=(-1, 1))[..., 0].tolist() == [[128, 191, 255]]
    deep = np.array([[0, 32768, 65535]], np.uint16)
    assert read_image(deep, levels=(0, 1))[..., 0].tolist() == [[0, 128, 255]], "levels of floats are not of integers"
    assert read_image(saved(deep, tmp_path / "deep.png"), levels=(0, 1))[..., 0].tolist() == [[0, 128, 255]]
    with pytest.raises(ImageError, match="values from 0 to 65535 in a set of 0 to 255"):
        read_image(deep, levels=(0, 255))


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_an_array_that_is_dark_or_of_the_other_range_is_refused(kind):
    values = np.array([[0, 0.5, 1]], np.float32)

    def grays(scale: float, levels: tuple[int, int] | None) -> list[int]:
        image = values * scale if kind == "array" else torch.from_numpy(values * scale)[None]
        return pixels_of(image, channels=1, levels=levels)[..., 0].tolist()[0]

    assert grays(1, None) == grays(1, (0, 1)) == [0, 128, 255]
    assert grays(200, None) == grays(200, (0, 255)) == [0, 100, 200]
    assert grays(0, (0, 255)) == [0, 0, 0]
    for scale, levels in ((1, (0, 255)), (200, (0, 1))):
        with pytest.raises(ImageError, match=r"trained on floats of 0 to .*: pass uint8"):
            grays(scale, levels)
    with pytest.raises(ImageError, match="not surely"):
        grays(20, (0, 255))


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_a_batch_has_one_scale(kind):
    batch = np.zeros((2, 1, 2, 3), np.float32)
    batch[0], batch[1] = 200, 1  # which alone would be white
    dark = batch.copy()
    dark[0] = 20
    given = {"array": lambda batch: batch.transpose(0, 2, 3, 1), "tensor": torch.from_numpy}[kind]
    assert [int(pixels_of(item.image, channels=1).max()) for item in expand(given(batch))] == [200, 1]
    for item in expand(given(dark)):
        with pytest.raises(ImageError, match="floats from 1 to 20, which are not surely"):
            pixels_of(item.image, channels=1)


@pytest.mark.parametrize(
    ("high", "kind", "message", "hint"),
    [
        (1200.0, np.float32, "not surely 0 to 1 or 0 to 255", "--levels 0 1200"),
        (1.1, np.float32, "not surely 0 to 1 or 0 to 255", "--levels 0 1"),
        (2.6, np.float32, "not surely 0 to 1 or 0 to 255", "before standardization"),
        (4000, np.uint16, "a set has one scale", "--levels BLACK WHITE"),
    ],
)
def test_a_set_of_floats_without_a_sure_range_is_refused(high, kind, message, hint, tmp_path, capsys):
    for label in "ab":
        for number in range(4):
            values = np.linspace(0, high, 64).reshape(8, 8).astype(kind)
            if number or kind is np.float32:
                saved(values, tmp_path / "set" / label / f"{number}.tif")
            else:
                saved((values / high).astype(np.float32), tmp_path / "set" / label / "0.tif")
    with pytest.raises(DataError, match=message) as caught:
        train(tmp_path / "set", tmp_path / "run")
    assert hint in str(caught.value)
    assert message in " ".join(printed(capsys, "data", "check", str(tmp_path / "set"), code=1)[0].split())


@pytest.mark.parametrize("brightest", [65_535, 65_470, 65_300, 40_000, 8_000, 4_095])
def test_grays_of_16_bits_are_counted_up_to_the_brightest(brightest, tmp_path):
    for label in "ab":
        for number in range(4):
            values = np.linspace(number + (label == "b") / 2, brightest, 64).reshape(8, 8)
            saved(values.astype(np.uint16), tmp_path / "set" / label / f"{number}.png")
    depth = depth_of(load(tmp_path / "set")["train"])
    if brightest == 4_095:
        with pytest.raises(DataError, match="8 bits keep 17 grays"):
            depth.check(None, "set")
    else:
        depth.check(None, "set")


@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8"])
def test_integers_at_the_limits_of_their_type(kind):
    limits = np.iinfo(kind)
    values = np.array([[limits.min, 0, limits.max]], kind)
    white = min(limits.max, 2**31 - 1)
    if values.itemsize > 1:
        assert to_uint8(values, (0, white)).tolist() == [[0, 0, 255]]
    if kind in ("u1", "u2"):
        assert to_uint8(values).tolist() == [[0, 0, 255]]
    else:
        with pytest.raises(ValueError, match="integers from"):
            to_uint8(values)


@pytest.mark.parametrize(("high", "kind"), [(1200, np.float32), (200, np.int32)])
def test_values_without_a_sure_range_are_trained_on_with_stated_levels(high, kind, tmp_path):
    for label in "ab":
        for number in range(4):
            values = np.linspace(number + (label == "b") / 2, high, 64).reshape(8, 8)
            saved(values.astype(kind), tmp_path / "set" / label / f"{number}.tif")
    run = train(tmp_path / "set", tmp_path / "run", levels=(0, high), epochs=1)
    assert vitral.load(run.folder).preprocessing.levels == (0, high)
    assert vitral.evaluate(run.folder, str(tmp_path / "set")).images == 8


def test_other_levels_than_those_of_training_are_warned_of():
    trained = vitral.Preprocessing((8, 8), levels=(0, 4095))
    (found,) = differences(trained, vitral.Preprocessing((8, 8)))
    assert found == "levels of 16 bits: trained with 0 to 4,095, used with 0 to 65,535"
    assert vitral.Preprocessing.from_json(trained.to_json()) == trained


def test_levels_of_floats_are_no_other_preprocessing_than_none():
    plain = vitral.Preprocessing((8, 8))
    assert differences(plain, dataclasses.replace(plain, levels=(0, 255))) == []
    assert len(differences(dataclasses.replace(plain, levels=(0, 1)), dataclasses.replace(plain, levels=(0, 255)))) == 1


@pytest.fixture
def ambiguous(tmp_path: Path) -> Path:
    """32-bit integers that state no range, of two classes."""
    for label, level in (("dark", 40), ("light", 160)):
        for number in range(8):
            saved(np.full((8, 8), level + number, np.int32), tmp_path / "ambiguous" / label / f"{number}.tif")
    return tmp_path / "ambiguous"


def test_every_command_that_asks_for_levels_takes_them(ambiguous, tmp_path, capsys):
    run = str(train(ambiguous, tmp_path / "run", levels=(0, 200), epochs=8).folder)
    levels = ("--levels", "0", "200")
    plain = str(tmp_path / "plain")
    assert "others are stated" not in printed(capsys, "convert", run, f"{plain}-200", *levels)[0]
    assert (
        "trained with 0 to 200, used with 0 to 255" in printed(capsys, "convert", run, plain, "--levels", "0", "255")[0]
    )
    assert vitral.load(plain).preprocessing.levels == (0, 255)
    image = str(ambiguous / "light" / "3.tif")
    with pytest.warns(UserWarning, match="trained with 0 to 255, used with 0 to 200"):
        assert vitral.load(plain, levels=(0, 200)).prepare(image).max() == round(163 / 200 * 255)
    assert "light" in printed(capsys, "predict", plain, image, *levels)[0]
    assert "100" in printed(capsys, "evaluate", plain, str(ambiguous), *levels)[0]
    assert "light" in "".join(printed(capsys, "explain", plain, image, "--out", str(tmp_path / "map.png"), *levels))
    assert "add --levels" in printed(capsys, "data", "check", str(ambiguous), code=1)[0].replace("\n", " ")
    assert "of 0 to 200 are" in " ".join(printed(capsys, "data", "check", str(ambiguous), *levels)[0].split())


@pytest.mark.parametrize("levels", [(5, 5), (9, 2), (0, 1.5), (0,), 4095, (0, 2**31)])
def test_levels_that_are_none_are_refused(levels):
    with pytest.raises(UsageError, match="black below white"):
        vitral.Preprocessing((8, 8), levels=levels)
    with pytest.raises(UsageError, match="black below white"):
        leveled(DataSet("none", (), {"train": Split([], np.zeros(0, np.int64), lambda _: b"")}, "none"), levels)


def test_the_plan_shows_levels_as_a_range(scans, tmp_path):
    run = train(scans, tmp_path / "run", levels=(992, 1108), epochs=1)
    plan = json.loads((run.folder / "config.json").read_text())["plan"]
    assert "992 to 1,108" in json.dumps(plan)
    assert "992×1108" not in json.dumps(plan, ensure_ascii=False)
