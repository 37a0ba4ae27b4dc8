"""A run is data: it comes back from JSON, and refuses what makes no sense."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from vitral.errors import RunError, UsageError
from vitral.training.run import MODEL_OPTIONS, Run, RunFolder, checked_options


def test_round_trip_through_json():
    run = Run(image_size=(8, 12), mean=(0.1, 0.2, 0.3), freeze=("head",), layer_decay=0.75, ema=None, val_fraction=0.0)
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run
    assert Run.from_json(json.loads(json.dumps(Run().to_json()))) == Run()


def test_every_option_tells_what_it_is():
    for field in dataclasses.fields(Run):
        assert field.metadata["help"].strip(), field.name
        assert not field.metadata["help"].endswith(".")
    assert set(MODEL_OPTIONS) <= {field.name for field in dataclasses.fields(Run)}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": "adamm"}, "nearest: adam"),
        ({"schedule": "cosin"}, "cosine"),
        ({"sampling": "balnced"}, "nearest: balanced"),
        ({"class_weights": "yes"}, "--class-weights"),
        ({"crop": "centre"}, "--crop"),
        ({"augment": "auto"}, "--augment"),
        ({"residency": "gpu"}, "--residency"),
        ({"bad_images": "ignore"}, "--bad-images"),
        ({"resize": "fit"}, "--resize"),
        ({"epochs": 0}, "--epochs must be at least 1"),
        ({"epochs": "three"}, "--epochs cannot be three"),
        ({"epochs": 1.5}, "--epochs cannot be 1.5"),
        ({"batch_size": -1}, "--batch-size must be at least 1"),
        ({"accumulate": 0}, "--accumulate"),
        ({"image_size": 0}, "--image-size"),
        ({"image_size": (8, 8, 8)}, "--image-size"),
        ({"lr": -1.0}, "--lr must be 0 or more"),
        ({"lr": float("nan")}, "--lr"),
        ({"lr": float("inf")}, "--lr"),
        ({"lr_batch": 0}, "--lr-batch"),
        ({"momentum": 1.0}, "--momentum"),
        ({"beta2": 1.0}, "--beta2"),
        ({"clip": -1.0}, "--clip"),
        ({"layer_decay": 2.0}, "--layer-decay"),
        ({"early_stop": -3}, "--early-stop"),
        ({"ema": 1.0}, "--ema must be from 0 to below 1"),
        ({"erase": 2.0}, "--erase"),
        ({"label_smoothing": 1.5}, "--label-smoothing"),
        ({"crop_area": 0.0}, "--crop-area"),
        ({"val_fraction": 1.0}, "--val-fraction"),
        ({"train_share": 0.0}, "--train-share"),
        ({"randaugment": (2, 31)}, "--randaugment"),
        ({"workers": -1}, "--workers"),
        ({"flip": "yes"}, "--flip"),
        ({"freeze": "head"}, "--freeze"),
    ],
)
def test_what_makes_no_sense_is_refused(wrong, said):
    with pytest.raises(UsageError) as caught:
        Run(**wrong)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_an_unknown_option_shows_the_nearest():
    with pytest.raises(UsageError, match="nearest: batch_size"):
        checked_options({"batchsize": 3})
    with pytest.raises(UsageError, match="unknown option 'colour'"):
        Run.from_json({"colour": 1})


def test_options_may_be_lists_and_paths():
    assert checked_options({"freeze": ["head"], "out": Path("runs/x")}) == {"freeze": ("head",), "out": "runs/x"}


def test_the_rate_scales_with_the_batch():
    assert Run(lr=0.1).peak_lr == 0.1
    run = Run(lr=0.1, lr_batch=512, batch_size=32, accumulate=4)
    assert run.step_batch == 128
    assert run.peak_lr == pytest.approx(0.025)


def test_mean_and_std_spread_over_channels():
    assert Run(channels=1, mean=0.3, std=0.2).preprocessing.mean == (0.3,)
    assert Run(mean=(0.1, 0.2, 0.3)).preprocessing.std == (0.5, 0.5, 0.5)


def test_run_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    assert not folder.exists()
    with pytest.raises(RunError, match="no such folder"):
        folder.read_plan()
    folder.path.mkdir()
    assert not folder.exists()
    with pytest.raises(RunError, match=r"no config\.json"):
        folder.read_plan()
    plan = [{"name": "epochs", "value": "3", "reason": "few"}]
    folder.config.write_text(json.dumps({"run": Run(epochs=3).to_json(), "plan": plan}))
    assert folder.exists()
    assert folder.read_plan().run == Run(epochs=3)
    assert folder.read_plan().choices[0].reason == "few"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": {}}', '{"run": {"colour": 1}, "plan": []}', "\x00"])
def test_a_damaged_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunError, match="cannot read the run's configuration") as caught:
        RunFolder(tmp_path).read_plan()
    assert len(str(caught.value).splitlines()) <= 5
