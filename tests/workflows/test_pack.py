"""Runs of `--pack`: images of their own sizes in training, validation, prediction and evaluation; refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from images import noise
from running import check_resumed, printed, train
from vitral.data.images.canvas import from_canvases, on_canvas
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import UsageError
from vitral.weights import native

SIZES = [(8, 10), (16, 9), (12, 12), (4, 16), (30, 20), (5, 5)]
PACKED: dict[str, Any] = {"pack": True, "image_size": 16, "pack_min_size": 8, "pack_drop": (0.5, 0.0)}


@pytest.fixture(scope="module")
def oblong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes, dark and bright, in images of six sizes."""
    root = tmp_path_factory.mktemp("oblong")
    for number in range(24):
        folder = root / ("dark", "bright")[number % 2]
        folder.mkdir(exist_ok=True)
        pixels = noise(number, SIZES[number % len(SIZES)]) // 2 + 127 * (number % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return root


@pytest.fixture(scope="module")
def packed_run(oblong: Path, tmp_path_factory: pytest.TempPathFactory) -> vitral.TrainedRun:
    return train(oblong, tmp_path_factory.mktemp("runs") / "packed", **PACKED, lr=2e-2, flip=True, erase=0.3)


def test_own_sizes_keep_the_aspect_in_whole_patches():
    own = Preprocessing((16, 16), resize="native", multiple=(4, 4))
    assert [own.own_size(*size) for size in SIZES] == [(8, 8), (16, 8), (12, 12), (4, 16), (16, 12), (4, 4)]
    assert own.own_size(1, 400) == (4, 16)
    pixels = noise(0, (8, 12))  # already whole patches: unchanged
    canvas = own.geometry(pixels)
    assert canvas.shape == (3, 17, 16)
    assert torch.equal(from_canvases(canvas[None])[0], torch.from_numpy(pixels).permute(2, 0, 1))
    large = torch.ones(1, 300, 700, dtype=torch.uint8)
    assert from_canvases(on_canvas(large, (400, 700))[None])[0].shape == (1, 300, 700)
    assert Preprocessing.from_json(json.loads(json.dumps(own.to_json()))) == own


def test_a_packed_run_learns_and_its_figures_are_reproduced(packed_run, oblong):
    assert packed_run.result["val_accuracy"] == 1.0
    evaluated = vitral.evaluate(packed_run.folder)
    assert evaluated.accuracy == packed_run.result["val_accuracy"]
    own = native.read(packed_run.folder / "model.safetensors").preprocessing
    assert (own.resize, own.multiple, own.image_size) == ("native", (4, 4), (16, 16))


def test_predictions_are_those_of_the_network_on_each_image_alone(packed_run, oblong):
    predictor = vitral.load(packed_run.folder, precision="fp32")
    files = sorted(oblong.rglob("*.png"))
    together = np.stack([one.probabilities for one in predictor(files)])
    predictor.model.any_size = True
    for file, row in zip(files, together, strict=True):
        image = predictor.preprocessing.own_sizes(predictor.prepare(file)[None])[0]
        with torch.inference_mode():
            alone = predictor.model(image[None]).softmax(1)[0].numpy()
        np.testing.assert_allclose(row, alone, atol=1e-5)


@pytest.mark.slow
def test_stopped_and_resumed_is_bit_identical(oblong, tmp_path, monkeypatch):
    options = {**PACKED, "dropout": 0.1, "ema": 0.9, "augment": "affine", "residency": "stream", "workers": 0}
    check_resumed(oblong, tmp_path, monkeypatch, **options)


def test_a_packed_run_is_continued_packed_and_at_another_size(packed_run, oblong, tmp_path):
    again = train(oblong, tmp_path / "again", init=str(packed_run.folder), epochs=1, **_not_given())
    plan = json.loads((again.folder / "config.json").read_text())
    assert plan["run"]["pack"] is True
    assert plan["run"]["resize"] == "native"
    with pytest.warns(UserWarning, match="not trained for this patch size"):
        larger = vitral.load(packed_run.folder, image_size=32, patch_size=8)
    assert (larger.preprocessing.image_size, larger.preprocessing.multiple) == ((32, 32), (8, 8))
    assert len(larger([noise(0, (40, 20)), noise(1, (8, 8))])) == 2


def _not_given() -> dict[str, Any]:
    """Options of `TINY` that initial weights determine."""
    return dict.fromkeys(("model", "dim", "depth", "heads", "mlp_dim", "image_size", "drop_path"))


@pytest.mark.report
def test_report_and_commands(oblong, packed_run, tmp_path, capsys):
    run = train(oblong, tmp_path / "run", **PACKED, epochs=1, minutes=None)
    assert "images keep their aspect ratio" in (run.folder / "report.html").read_text()
    out, _ = printed(capsys, "predict", str(run.folder), str(oblong / "dark"), "--format", "json")
    assert len(json.loads(out)["predictions"]) == 12


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"crop": "random-resized"}, "--crop"),
        ({"mixup": 0.2}, "--mixup"),
        ({"resize": "crop"}, "--resize"),
        ({"compile": True}, "--compile"),
        ({"model": "C+mu/4"}, r"C\+mu/4"),
        ({"model": "BiT-R50x1"}, "BiT"),
        ({"pack": False, "pack_drop": (0.1, 0.0)}, "--pack-drop requires --pack"),
    ],
)
def test_refused_options(oblong, tmp_path, options, named):
    shape = {} if "model" in options else {"dim": 8, "depth": 1, "heads": 2, "mlp_dim": 8, "model": "mu/4"}
    with pytest.raises(UsageError, match=named):
        vitral.train(str(oblong), out=str(tmp_path / "run"), quiet=True, **{**shape, "pack": True, **options})


def test_lines_of_text_are_not_packed(tmp_path):
    for number in range(8):
        Image.fromarray(noise(number, (8, 16))).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("ab"[number % 2])
    with pytest.raises(UsageError, match="--recipe text does not support --pack"):
        vitral.train(str(tmp_path), task="text", pack=True, out=str(tmp_path / "run"), quiet=True)


def test_commands_that_do_not_support_it_say_so(packed_run, oblong, tmp_path, capsys):
    run, image = str(packed_run.folder), str(oblong / "dark" / "0.png")
    for words in (
        ("explain", run, image, "--out", str(tmp_path / "maps")),
        ("export", run, str(oblong), "--to", "torch", "--out", str(tmp_path / "export")),
        ("serve", run, "--port", "0"),
        ("embed", run, image, "--out", str(tmp_path / "features.npz")),
        ("replay", run, "--step", "1"),
        ("predict", run, image, "--engine", "packed"),
        ("evaluate", run, "--tta", "mirror"),
    ):
        _, err = printed(capsys, *words, code=2)
        assert "--pack" in err, (words, err)
        assert "Traceback" not in err


def test_only_commands_that_support_it_are_proposed(oblong, tmp_path, capsys):
    words = ["--pack", "--image-size", "16", "--pack-min-size", "8", "--model", "mu/4", "--epochs", "1"]
    _, err = printed(capsys, "train", str(oblong), *words, "--out", str(tmp_path / "run"))
    proposed = [line.split()[1] for line in err.partition("Next:")[2].splitlines() if line.strip()]
    assert proposed == ["predict", "evaluate", "data"]


def test_a_recipe_takes_plain_patches(oblong, tmp_path):
    from vitral.workflows.planning.plan import plan_run

    job = plan_run({"data": str(oblong), "pack": True, "out": str(tmp_path / "run")})
    assert not job.run.model.startswith("C+")
    assert (job.run.crop, job.run.resize, job.run.drop_path, job.run.whiten) == ("none", "native", 0.0, False)
    assert job.run.multiple == job.config.patch
