"""The linear probe before the training (`Run.probe`): the first answer, kept if no epoch is better."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vitral
from running import call_at_batch, same_bits, weights_of
from vitral.errors import Interrupted, UsageError
from vitral.workflows.planning.plan import plan_run

OPTIONS: dict[str, Any] = {
    "image_size": 32,
    "epochs": 2,
    "batch_size": 8,
    "threads": 1,
    "device": "cpu",
    "precision": "fp32",
    "augment": "none",
    "crop": "none",
    "flip": False,
    "keep": "best",
}


@pytest.fixture
def colors(tmp_path: Path) -> Path:
    """Noise on red and on blue: a probe of any weights knows them apart."""
    for split, count in (("train", 12), ("val", 50)):
        for label, channel in (("red", 0), ("blue", 2)):
            folder = tmp_path / "colors" / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = np.random.default_rng([number, channel, count]).integers(0, 120, (32, 32, 3), dtype=np.uint8)
                pixels[:, :, channel] += 120
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "colors"


def train(data: Path, out: Path, **options: Any) -> vitral.TrainedRun:
    return vitral.train(str(data), out=str(out), quiet=True, **{**OPTIONS, **options})


def test_the_probe_is_kept_if_no_epoch_is_better(colors: Path, tmp_path: Path) -> None:
    run = train(colors, tmp_path / "run", lr=1e-9)
    assert run.result["best_epoch"] == 0
    assert run.result["val_accuracy"] == 1.0
    probe = {name: value for name, value in OPTIONS.items() if name in ("image_size", "threads", "device", "precision")}
    alone = vitral.train(str(colors), recipe="linear-probe", out=str(tmp_path / "probe"), quiet=True, **probe)
    assert same_bits(weights_of(run.folder), weights_of(alone.folder))


def test_an_epoch_that_is_better_replaces_it(colors: Path, tmp_path: Path) -> None:
    run = train(colors, tmp_path / "run", epochs=8, lr=1e-2, label_smoothing=0.0)
    assert run.result["val_accuracy"] == 1.0
    assert run.result["best_epoch"] > 0


def test_few_validation_images_do_not_keep_it(colors: Path, tmp_path: Path) -> None:
    for file in (colors / "val").glob("*/[1-4]?.png"):
        file.unlink()
    run = train(colors, tmp_path / "run", lr=1e-9)
    assert run.result["images"]["val"] == 20
    assert run.result["best_epoch"] > 0


def test_it_is_there_before_the_first_epoch(colors: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    call_at_batch(monkeypatch, 1, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted):
        vitral.train(str(colors), out=str(tmp_path / "run"), **OPTIONS)
    assert (
        "a linear probe of the initial weights classifies 100.0% of 100 held-out images correctly"
        in capsys.readouterr().err
    )
    predictor = vitral.load(str(tmp_path / "run"), device="cpu")
    image = np.zeros((32, 32, 3), np.uint8)
    image[:, :, 2] = 180
    assert predictor(image).label == "blue"


def test_a_stopped_run_goes_on_with_the_same_best_weights(colors: Path, tmp_path: Path, monkeypatch) -> None:
    whole = train(colors, tmp_path / "whole", lr=1e-9)
    with monkeypatch.context() as patched:
        call_at_batch(patched, 4, lambda: os.kill(os.getpid(), signal.SIGINT))
        with pytest.raises(Interrupted):
            train(colors, tmp_path / "cut", lr=1e-9)
    again = vitral.train(out=str(tmp_path / "cut"), resume=True, quiet=True)
    assert again.result["best_epoch"] == 0
    assert same_bits(weights_of(whole.folder), weights_of(again.folder))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"init": "none"}, "random weights"),
        ({"val_fraction": 0.0}, "validation images"),
        ({"patch_sizes": (8, 16), "init": "none"}, "random weights"),
    ],
)
def test_it_is_left_out_where_there_can_be_none(make_images, options: dict[str, Any], why: str) -> None:
    data = str(make_images({"cat": 8, "dog": 8}, size=(40, 40)))
    assert not plan_run({"data": data, **OPTIONS, **options}).run.probe
    with pytest.raises(UsageError, match="a linear probe does not fit this run") as found:
        plan_run({"data": data, **OPTIONS, **options, "probe": True})
    assert why in str(found.value.why)


def test_the_plan_says_so_and_an_option_turns_it_off(colors: Path, tmp_path: Path) -> None:
    job = plan_run({"data": str(colors), **OPTIONS})
    assert job.run.probe
    assert "linear classifier" in {choice.name: choice.reason for choice in job.plan.choices}["probe"]
    run = train(colors, tmp_path / "run", probe=False, lr=1e-9)
    assert run.result["best_epoch"] > 0
    about = json.loads((run.folder / "config.json").read_text())
    assert about["run"]["probe"] is False
