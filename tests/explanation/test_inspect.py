"""`vitral inspect`: figures of every kind of network, the page, the command, and errors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import VARIANTS, network, random_images

import vitral
from images import MakeImages
from vitral.cli.main import main
from vitral.data.images.preprocessing import Preprocessing
from vitral.explanation.inspect.drawing import as_colors, tiled
from vitral.explanation.inspect.panels import NAMES, inspect_network, worked_example
from vitral.inference.predictor import Predictor
from vitral.model import BiT, BiTConfig
from vitral.training.run_folder import RunFolder
from vitral.weights import native
from vitral.weights.native import Weights
from vitral.workflows.inspection import folder_for, inspect, render

KINDS = ("oblong", "map-with-prefix", "none", "distilled-with-registers", "root-with-patches")
BIT = BiTConfig(image_size=32, layers=(1,), classes=2)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert main(["inspect", *words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return out, err


# ---------------------------------------------------------------- drawings


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_network_is_drawn(name):
    config = VARIANTS[name]
    found = inspect_network(network(config).float(), random_images(config, 4).float(), name=name, source="4 images")
    names = [panel.name for panel in found.panels()]
    assert names == [one for one in NAMES if one != "positions" or config.position != "none"]
    page = render(found, "vitral inspect x")
    assert page.count("<svg") == len(names)
    assert "NaN" not in json.dumps(found.to_json(), allow_nan=False)
    assert all(len(line) > 20 for line in found.summary())


def test_files_of_an_inspection(tmp_path):
    config = VARIANTS["paper"]
    model = network(config).float()
    written = inspect_network(model, random_images(config, 4).float()).save_drawings(tmp_path / "a")
    assert {path.name for path in written} == {f"{name}{end}" for name in NAMES for end in (".png", ".svg")}
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert min(image.size) > 40
                assert np.asarray(image).std() > 1
        else:
            assert path.read_text("utf-8").lstrip().startswith("<?xml")
    bytes_before = (tmp_path / "a/filters.png").read_bytes()
    inspect_network(model).save_drawings(tmp_path / "a")  # now without images: what was drawn from some goes
    assert {path.stem for path in (tmp_path / "a").iterdir()} == {"filters", "kernels", "positions"}
    assert (tmp_path / "a/filters.png").read_bytes() == bytes_before


def test_tiles_and_colors():
    canvas, size, gap = tiled(np.ones((5, 4, 2, 3)), 3)
    assert (size, gap) == ((16, 8), 1)
    assert canvas.shape == (33, 26, 4)
    assert canvas[..., 3].sum() == 5 * 16 * 8
    tiles = tiled(np.ones((6, 16, 16, 3)), 3)
    assert tiles.middles(0).tolist() == [7.5, 25.5]
    colors = as_colors(np.array([[[[0.0, 2.0, -4.0]]]]))
    assert colors.shape == (1, 1, 3, 3)
    assert colors[0, 0, :, 0].tolist() == [0.5, 0.75, 0.0]
    assert as_colors(np.ones((2, 5, 3, 3))).shape == as_colors(np.ones((2, 2, 3, 3))).shape == (2, 3, 3, 3)


def test_the_example_is_right():
    example = worked_example()
    assert example.weights.sum() == pytest.approx(1)
    assert example.pixels[1, 1] == pytest.approx(16 * 2**0.5)
    assert example.distance == pytest.approx(0.2 * 16 * 2 + 0.1 * 16 * 2**0.5 + 0.1 * 32 * 2**0.5)


# ---------------------------------------------------------------- the command


def test_a_run_needs_no_other_option(capsys, trained, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained.folder, run)
    out, err = told(capsys, str(run))
    assert "distance" in out
    assert "8 val images" in out
    assert f"Page     {run}/inspect/inspect.html" in err
    page = (run / "inspect/inspect.html").read_text("utf-8")
    for part in ("Attention distance", "Worked example", "13.2", "8 val images", f"vitral inspect {run}"):
        assert part in page
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # loads nothing
    assert "<script" not in page
    assert page.count('class="here"') == 3  # the query of the example, framed
    found = json.loads((run / "inspect/inspect.json").read_text("utf-8"))
    assert np.shape(found["attention"]["distance"]) == (2, 2)
    assert found["attention"]["images"] == 8
    assert {path.stem for path in (run / "inspect").iterdir()} == {*NAMES, "inspect"}
    out, _ = told(capsys, str(run), "--format", "json", "--split", "test", "--images", "5", "--layers", "-1")
    found = json.loads(out)
    assert found["images"].startswith("5 test images")
    assert found["attention"]["layers"] == [1]


@pytest.mark.slow
def test_weights_and_names_without_images(capsys, trained, make_images: MakeImages):
    weights = str(trained.folder / "model.safetensors")
    _, err = told(capsys, weights, "--out", "o")
    assert "only figures of the weights" in err
    assert "--data DATA" in err
    assert {path.stem for path in Path("o").iterdir()} == {"filters", "kernels", "positions", "inspect"}
    photos = make_images({"cat": 3, "dog": 3})
    Path(photos, "cat/1.png").write_bytes(b"no image")
    out, err = told(capsys, weights, "--data", "photos", "--out", "o")
    assert "5 train images of photos" in out
    assert "left out 1 unreadable image: photos/cat/1.png" in err
    assert "cat/1.png" in err
    _, err = told(capsys, "mnist-7562")
    assert "random weights" in err
    assert Path("inspect/mnist-7562/inspect.html").is_file()
    assert folder_for("timm:vit_small/x y") == Path("inspect/timm-vit_small-x-y")


def test_a_run_without_its_images_shows_the_rest(capsys, trained):
    shutil.copytree(trained.folder, "run")
    written = json.loads(Path("run/config.json").read_text("utf-8"))
    written["run"]["data"] = "gone/sky"
    RunFolder("run").write(Path("run/config.json"), json.dumps(written))
    _, err = told(capsys, "run")
    assert "the run's own images cannot be loaded" in err
    assert Path("run/inspect/filters.png").is_file()
    assert not Path("run/inspect/distance.png").exists()


def test_in_python():
    config = VARIANTS["paper"]
    model = network(config).float()
    found = vitral.inspect(model, random_images(config, 6).float(), images=5, prefix="keep")
    assert found.attention is not None
    assert (found.attention.images, found.attention.prefix) == (5, "keep")
    half = Predictor(network(config).float(), Preprocessing((12, 12)), tuple("abcde"))
    half.model.bfloat16()
    assert inspect(half, random_images(config, 4).float()).likeness is not None
    few = vitral.inspect(model, random_images(config, 2).float())
    assert few.likeness is None
    assert "that needs 4 images" in few.notes[0]
    alone = vitral.inspect(model)
    assert alone.attention is None
    assert "pass data=TENSOR" in alone.notes[0]
    with pytest.raises(vitral.VitralError, match="no images"):
        vitral.inspect(model, random_images(config, 4)[:0])
    with pytest.raises(vitral.VitralError, match="not finite"):
        vitral.inspect(model, torch.full((4, 3, 12, 12), torch.nan))
    with pytest.raises(vitral.VitralError, match="preprocessing of a bare module"):
        vitral.inspect(model, "photos")
    with pytest.raises(vitral.VitralError, match="ResNet"):
        vitral.inspect(BiT(BIT))


BAD = {
    "no such file": (["gone.safetensors"], ("no such run, file or model: gone.safetensors", "timm:NAME")),
    "no such run": (["runs/gone"], ("runs/gone",)),
    "a folder that is no run": (["photos"], ("not a run folder",)),
    "layers": (["RUN", "--layers", "0", "7"], ("there is no layer 7", "the network has 2", "--layers 0 … 1")),
    "layer that is no number": (["RUN", "--layers", "last"], ("--layers",)),
    "no images": (["RUN", "--images", "0"], ("at least 1, not 0", "--images 128")),
    "no components": (["RUN", "--components", "0"], ("0 components",)),
    "no data": (["RUN", "--data", "gone/x"], ("gone/x",)),
    "no such split": (["RUN", "--split", "dev"], ("dev", "test")),
    "nothing readable": (["RUN", "--data", "bad"], ("no readable image", "bad/")),
    "empty folder": (["RUN", "--data", "empty"], ("empty",)),
    "a ResNet by name": (["BiT-R50x1"], ("ResNet", "BiT-R50x1", "try: vitral")),
    "a ResNet's file": (["bit.safetensors"], ("ResNet", "bit.safetensors", "try: vitral")),
    "unknown prefix": (["RUN", "--prefix", "fold"], ("--prefix",)),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name, capsys, trained, make_images: MakeImages):
    words, parts = BAD[name]
    make_images({"cat": 1, "dog": 1})
    for path in make_images({"cat": 1, "dog": 1}, name="bad").rglob("*.png"):
        path.write_bytes(b"no image")
    Path("empty").mkdir()
    if "bit.safetensors" in words:
        native.save(
            Path("bit.safetensors"), Weights(BIT, BiT(BIT).state_dict(), Preprocessing((32, 32)), ("a", "b"), {})
        )
    before = sorted(Path().rglob("*"))
    out, err = told(capsys, *(word.replace("RUN", str(trained.folder)) for word in words), code=2)
    assert out == ""
    error = err[err.index("error: ") :]
    assert len(error.splitlines()) <= 5
    assert "bug in vitral" not in error
    for part in parts:
        assert part in error
    assert sorted(Path().rglob("*")) == before
    assert not (trained.folder / "inspect").exists()
