"""Every file of examples/ runs on tiny data, with the results that it states."""

from __future__ import annotations

import importlib.util
import io
import math
import sqlite3
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import noise
from running import TINY, printed
from vitral.demo import IMAGES
from vitral.errors import DataError, ImageError, UsageError

FOLDER = Path(__file__).resolve().parents[1] / "examples"


def example(name: str) -> ModuleType:
    """Import an example by its file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, spec.name, module)  # dataclasses look there
        spec.loader.exec_module(module)
    __import__("sys").modules[spec.name] = module  # pickle does, too
    return module


def test_every_example_is_listed_and_run() -> None:
    page = (FOLDER.parent / "docs" / "examples.md").read_text("utf-8")
    tests = Path(__file__).read_text("utf-8")
    with_ray = (FOLDER.parent / "tests/serving/test_ray.py").read_text("utf-8")
    for file in FOLDER.glob("*.py"):
        assert f"(../examples/{file.name})" in page, file.name
        assert f'example("{file.stem}")' in tests or f"from {file.stem} import" in with_ray, file.name


def test_a_custom_loss(tmp_path: Path) -> None:
    focal = example("custom_loss")
    options = {"model": "mu/4", "image_size": 16, "epochs": 3, "lr": 3e-3, "warmup": 1.0, "device": "cpu"}
    run = focal.main("digits", str(tmp_path / "focal"), quiet=True, **options)
    assert run.result["val_accuracy"] > 0.3 > 0.1  # ten classes
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    certain = 1 / (1 + math.exp(-2))
    losses = [-((1 - p) ** 2) * math.log(p) for p in (certain, 1 - certain)]
    torch.testing.assert_close(focal.focal(logits, torch.tensor([0, 0])), torch.tensor(losses))


def test_a_custom_data_set(tmp_path: Path) -> None:
    database = str(tmp_path / "images.db")
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE images (file BLOB, label TEXT)")
        for number in range(12):
            file = io.BytesIO()
            Image.fromarray(noise(number)).save(file, "PNG")
            row = (file.getvalue(), "even" if number % 2 == 0 else "odd")
            connection.execute("INSERT INTO images VALUES (?, ?)", row)
    example("custom_data").main(database, str(tmp_path / "shards"))
    dataset = vitral.load_data(str(tmp_path / "shards"))
    assert dataset.classes == ("even", "odd")
    assert vitral.load_data(example("custom_data").Database(database)).classes == ("even", "odd")
    images = {np.asarray(dataset["train"].image(i)).tobytes() for i in range(12)}
    assert images == {noise(number).tobytes() for number in range(12)}


def scans(folder: Path, low: int, high: int, extension: str = ".png") -> Path:
    """Write 16-bit images of two classes, whose values are around `low` or `high`."""
    rng = np.random.default_rng(0)
    for label, level in (("air", low), ("bone", high)):
        (folder / label).mkdir(parents=True)
        for number in range(10):
            values = (level + rng.integers(0, 40, (8, 8))).astype(np.uint16)
            Image.fromarray(values).save(folder / label / f"{number}{extension}")
    return folder


@pytest.mark.parametrize("extension", [".png", ".tif"])
def test_gray_images_of_16_bits(tmp_path: Path, extension: str) -> None:
    """The classes differ by less than one of 256 grays of the whole range, and by a third of a window."""
    medical, folder = example("medical"), scans(tmp_path / "scans", 1064, 1204, extension)
    run = medical.main(str(folder), str(tmp_path / "run"), quiet=True, **{**TINY, "epochs": 12, "val_fraction": 0.3})
    assert run.result["val_accuracy"] == 1.0
    assert vitral.load(run.folder).preprocessing.channels == 3
    values = np.array([[0, 824, 1064, 1264, 4000]], np.uint16)
    assert medical.windowed(values)[0, :, 1].tolist() == [0, 0, 128, 255, 255]
    with pytest.raises(ValueError, match="not 16 bits"):
        medical.read(IMAGES / "cat.png")


def test_16_bits_are_never_scaled_to_nothing_in_silence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="8 bits keep 2 grays") as caught:
        vitral.train(str(scans(tmp_path / "scans", 800, 1200)), out=str(tmp_path / "run"), quiet=True, **TINY)
    assert "--levels 0 4095 keeps" in str(caught.value) or "--levels 800 1239 keeps" in str(caught.value)
    assert "examples/medical.py" in str(caught.value)
    wide = scans(tmp_path / "wide", 9_000, 60_000)
    run = vitral.train(str(wide), out=str(tmp_path / "run"), quiet=True, **TINY)
    plan = (run.folder / "config.json").read_text()
    assert "16 bits are scaled to 8: values 9,0" in plan


def test_satellite_images_of_8_channels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The classes differ in the least bits of the eighth band, which 8 bits would drop."""
    rng = np.random.default_rng(0)
    for label, level in (("field", 30_000), ("wood", 30_100)):
        (tmp_path / "fields" / label).mkdir(parents=True)
        for number in range(20):
            bands = rng.integers(0, 65_536, (8, 8, 8)).astype(np.uint16)
            bands[7] = level + rng.integers(0, 50, (8, 8))
            np.save(tmp_path / "fields" / label / f"{number}.npy", bands)
    out = tmp_path / "fields.safetensors"
    assert example("satellite").main(str(tmp_path / "fields"), str(out), epochs=12) == 1.0
    predictor = vitral.load(out)
    assert (predictor.preprocessing.channels, predictor.classes) == (8, ("field", "wood"))
    for channels in (3, 8):
        with pytest.raises(UsageError, match="8 channels"):
            predictor(np.zeros((8, 8, channels), np.uint8))
    _, error = printed(capsys, "predict", str(out), str(IMAGES / "cat.png"), code=2)
    assert "8 channels" in error
    _, error = printed(capsys, "evaluate", str(out), "digits", "--split", "train", code=2)
    assert error.count("\n") <= 5
    with pytest.raises(ImageError, match="with C from 1 to 4"):
        vitral.load("demo")(np.zeros((8, 8, 8), np.uint8))


def test_a_web_service(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("starlette", reason="needs vitral[serve]")
    from starlette.testclient import TestClient

    web_service = example("web_service")
    headers = {"Content-Type": "image/png"}
    with TestClient(web_service.build(), base_url="http://localhost") as client:
        for name in ("cat", "ship"):
            answer = client.post("/flap", content=(IMAGES / f"{name}.png").read_bytes(), headers=headers).json()
            assert answer["seen"][0][0] == name
            assert answer["open"] == [name == "cat"]
        assert client.post("/flap", content=b"no image", headers=headers).status_code == 422
        assert client.get("/flap").status_code == 405
        assert client.get("/healthz").json() == {"status": "ok"}
