"""`Run`: JSON round trip, and refusal of invalid values."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import pytest

from vitral.data.images.augmentation import Augmentation
from vitral.data.images.preprocessing import Preprocessing
from vitral.errors import RunError, UsageError
from vitral.training import options as run_module
from vitral.training.options import MODEL_OPTIONS, Run, checked_options
from vitral.training.run_folder import RunFolder
from vitral.wording import flag


def test_round_trip_through_json():
    run = Run(image_size=(8, 12), mean=(0.1, 0.2, 0.3), freeze=("head",), layer_decay=0.75, ema=None, val_fraction=0.0)
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run
    assert Run.from_json(json.loads(json.dumps(Run().to_json()))) == Run()


def test_every_option_has_a_help_line():
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
        ({"crop": "center"}, "--crop"),
        ({"augment": "auto"}, "--augment"),
        ({"residency": "gpu"}, "--residency"),
        ({"bad_images": "ignore"}, "--bad-images"),
        ({"resize": "fit"}, "--resize"),
        ({"epochs": 0}, "--epochs must be from 1 to 1,000,000"),
        ({"epochs": "three"}, "--epochs cannot be 'three', a str"),
        ({"epochs": 1.5}, "--epochs cannot be 1.5"),
        ({"batch_size": -1}, "--batch-size must be from 1 to 1,000,000"),
        ({"accumulate": 0}, "--accumulate"),
        ({"image_size": 0}, "--image-size"),
        ({"image_size": (8, 8, 8)}, "--image-size"),
        ({"lr": -1.0}, "--lr must be from 0 to 1,000"),
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
def test_invalid_values_are_refused(wrong, said):
    with pytest.raises(UsageError) as caught:
        Run(**wrong)
    assert said in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


NUMBERS = {
    name: kind
    for name, kind in get_type_hints(Run).items()
    if {int, float} & {kind, *get_args(kind)} and get_origin(kind) is not tuple
}
"""Fields that are, or may be, a single number."""


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [10**22, -(10**22), 1e300, float("nan"), float("inf")])
def test_every_number_has_a_range(name, value):
    if isinstance(value, float) and float not in (NUMBERS[name], *get_args(NUMBERS[name])):
        value = int(1e300)
    with pytest.raises(UsageError) as caught:
        Run(**{name: value})
    assert str(caught.value).startswith(f"{flag(name)} must be ")
    assert caught.value.hint.startswith(flag(name))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"image_size": 1_000_000}, "--image-size must be from 1 to 16,384, not 1000000"),
        ({"lr": 1e300}, "--lr must be from 0 to 1,000, not 1e+300"),
        ({"mean": 5.0}, "--mean must be from 0 to 1, not 5.0"),
        ({"mean": (0.5, float("nan"), 0.5)}, "--mean must be from 0 to 1"),
        ({"std": 0.0}, "--std must be above 0 and at most 1, not 0.0"),
        ({"early_stop": 0}, "--early-stop must be from 1 to 1,000,000, not 0"),
        ({"channels": 2}, "--channels must be 1 or 3, not 2"),
        ({"randaugment": (31, 10)}, "--randaugment must be from 0 to 30, not 31 10"),
        ({"seed": 12345678901234567890123}, "--seed must be from 0 to 9,223,372,036,854,775,807"),
    ],
)
def test_a_range_is_shown_with_an_example(wrong, said):
    with pytest.raises(UsageError) as caught:
        Run(**wrong)
    assert said in str(caught.value)
    option = flag(next(iter(wrong)))
    assert caught.value.hint.startswith(option)


def test_an_unknown_option_shows_the_nearest():
    with pytest.raises(UsageError, match="nearest: batch_size"):
        checked_options({"batchsize": 3})
    with pytest.raises(UsageError, match="unknown option 'color'"):
        Run.from_json({"color": 1})


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


@pytest.mark.parametrize("text", ["", "{", "[]", '{"run": {}}', '{"run": {"color": 1}, "plan": []}', "\x00"])
def test_a_damaged_configuration(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunError, match="cannot read the run's configuration") as caught:
        RunFolder(tmp_path).read_plan()
    assert len(str(caught.value).splitlines()) <= 5


@pytest.mark.parametrize("name", [name for names in run_module.LIMITS.values() for name in names])
def test_a_number_out_of_range_gets_a_valid_example(name):
    pairs = {
        "resize_size": (0, 8),
        "randaugment": (-1, 3),
        "multiple": (0, 8),
        "pack_drop": (-1.0, 0.0),
        "patch_sizes": (0, 8),
    }
    bad = {"image_size": 0, **pairs}.get(name, -1_000_000)
    kind = typing.get_type_hints(Run)[name]
    bad = float(bad) if isinstance(bad, int) and "float" in str(kind) else bad
    with pytest.raises(UsageError) as caught:
        Run(**{name: bad})
    flag, *values = caught.value.hint.split()
    assert flag == "--" + name.replace("_", "-")
    numbers = tuple(float(value) if "." in value or "float" in str(kind) else int(value) for value in values)
    assert Run(**{name: numbers if name in pairs else numbers[0]})


def test_defaults_are_those_of_preprocessing_and_augmentation():
    assert Run().preprocessing == Preprocessing((224, 224))
    assert Run().augmentation == Augmentation()
