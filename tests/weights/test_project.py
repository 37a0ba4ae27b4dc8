"""Project files, taught in a browser: they load as a built-in model with their head, or are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import projects
import vitral
from images import noise
from running import TINY, as_json, printed
from vitral.errors import UsageError, WeightsError
from vitral.weights import project
from vitral.weights.load import read


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return projects.write(tmp_path / "sky.safetensors", *projects.parts())


def softmax(logits: np.ndarray) -> np.ndarray:
    values = np.exp(logits - logits.max(1, keepdims=True))
    return values / values.sum(1, keepdims=True)


def test_it_predicts_by_its_head_on_the_features_of_the_built_in_model(file):
    predictor = vitral.load(file, device="cpu", precision="fp32")
    images = [noise(seed, (90, 120)) for seed in range(5)]
    features = vitral.load("backbone", device="cpu", precision="fp32").embed(images)
    header, tensors = projects.parts()
    logits = features @ tensors["head.weight"].T + tensors["head.bias"]
    assert predictor.classes == ("day", "night")
    np.testing.assert_allclose(predictor.probabilities(images), softmax(logits / header["temperature"]), atol=1e-5)
    np.testing.assert_allclose(predictor.embed(images), features, atol=1e-5)


def test_the_report_lists_what_is_for_the_page(file):
    account = read(file).account
    left = {line.source for line in account.lines if line.fate == "left out"}
    assert left == {"features", "labels", "groups"}
    assert "a head for the built-in model 'backbone', taught in a browser" in account.notes


def test_the_commands_take_it(file, make_images, tmp_path, capsys):
    photos = make_images({"all": 3}, size=(40, 30))
    rows = as_json(capsys, "predict", str(file), str(photos), "--device", "cpu")["predictions"]
    wanted = vitral.load(file, device="cpu", precision="fp32").probabilities(sorted(photos.rglob("*.png")))
    found = [{one["class"]: one["probability"] for one in row["top"]} for row in rows]
    np.testing.assert_allclose([[row["day"], row["night"]] for row in found], wanted, atol=1e-4)
    printed(capsys, "convert", str(file), str(tmp_path / "whole.safetensors"))
    whole = vitral.load(tmp_path / "whole.safetensors", device="cpu", precision="fp32")
    np.testing.assert_allclose(whole.probabilities(sorted(photos.rglob("*.png"))), wanted, atol=1e-6)


@pytest.mark.slow
def test_training_starts_from_its_head_or_from_its_body(file, make_images, tmp_path):
    options = {"image_size": 128, "batch_size": 4, "epochs": 1, "lr": 0.0, "device": "cpu", "precision": "fp32"}
    options |= {name: TINY[name] for name in ("crop", "augment", "flip", "optimizer", "ema", "drop_path")}
    _, tensors = projects.parts()
    photos = make_images({"day": 5, "night": 5}, size=(40, 30))
    run = vitral.train(
        str(photos), init=str(file), out=str(tmp_path / "run"), quiet=True, probe=False, val_fraction=0.2, **options
    )
    assert torch.equal(read(run.folder).weights.state["head.weight"], torch.from_numpy(tensors["head.weight"]))
    others = make_images({"cat": 5, "dog": 5, "hen": 5}, name="others", size=(40, 30))
    run = vitral.train(
        str(others), init=str(file), out=str(tmp_path / "new"), quiet=True, probe=False, val_fraction=0.2, **options
    )
    state = read(run.folder).weights.state
    assert state["head.weight"].shape == (3, 128)
    assert torch.equal(state["pos_embed"].float(), project.built_in_weights("backbone").state["pos_embed"].float())


Change = Callable[[Any, Any], Any]


def _set(key: str, value: Any) -> Change:
    return lambda header, tensors: header.update({key: value})


def _tensor(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Change:
    return lambda header, tensors: tensors.update({name: change(tensors[name])})


def _thumbnails(ends: list[int], count: int = 10, looks: int = 6 * 1026) -> Change:
    more = {"thumbnails": np.zeros(count, np.uint8), "thumbnail_ends": np.array(ends, np.int32)}
    more["looks"] = np.zeros(looks, np.uint8)
    return lambda header, tensors: tensors.update(more)


def _zeros(count: int) -> np.ndarray:
    return np.zeros(count, np.int32 if count else np.uint8)


def _nan(values: np.ndarray) -> np.ndarray:
    values.flat[3] = np.nan
    return values


REFUSED: dict[str, Change] = {
    "version 2 of the form; this vitral reads 1": _set("format", 2),
    "version [1] of the form": _set("format", [1]),
    "it names the model 'hf:someone/else'; built in are backbone, demo": _set("model", "hf:someone/else"),
    "it names the model '../secret'": _set("model", "../secret"),
    "its 'model' is not a short text": _set("model", 3),
    "its 'vitral' is not a short text": _set("vitral", "1\n2"),
    "its 'weights' is not a short text": _set("weights", "s" * 1000),
    "this vitral has other weights": _set("weights", "sha256:" + "0" * 64),
    "its classes are not a list of names": _set("classes", ["a", 1]),
    "1,001 classes; at most 1,000 are read": _set("classes", [str(n) for n in range(1001)]),
    "two classes have the name 'a'": _set("classes", ["a", "a"]),
    "'' cannot be the name of a class": _set("classes", ["a", ""]),
    "cannot be the name of a class": _set("classes", ["a", "b\x1b[31m"]),
    "a temperature of 0": _set("temperature", 0),
    "a temperature of 'warm'": _set("temperature", "warm"),
    "its head has shapes (2, 128) and (2,), for 3 classes": _set("classes", ["a", "b", "c"]),
    "a head for 1 classes": lambda header, tensors: (
        header.update(classes=["a"]),
        tensors.update(labels=0 * tensors["labels"]),
    ),
    "its head has shapes (128,) and (2,)": _tensor("head.weight", lambda one: one[0]),
    "its head is float64 and float32, not fp32": _tensor("head.weight", lambda one: one.astype(np.float64)),
    "it lacks head.bias": lambda header, tensors: tensors.pop("head.bias"),
    "in head.weight": _tensor("head.weight", _nan),
    "features that are not finite": _tensor("features", _nan),
    "its features are float32 (768,)": _tensor("features", lambda one: one.reshape(-1)),
    "5 labels for 6 images": _tensor("labels", lambda one: one[:5]),
    "7 groups for 6 images": _tensor("groups", lambda one: np.append(one, 0).astype(np.int32)),
    "its labels are int64 (6,)": _tensor("labels", lambda one: one.astype(np.int64)),
    "labels from 0 to 2, for 2 classes": _tensor("labels", lambda one: one * 2),
    "labels from -1 to 0, for 2 classes": _tensor("labels", lambda one: one - 1),
    "it lacks labels": lambda header, tensors: tensors.pop("labels"),
    "2 names for 6 images": _set("names", ["a", "b"]),
    "its names of images are not a list of texts": _set("names", [1] * 6),
    "the lengths of its thumbnails are wrong": _thumbnails([2, 4, 6, 8, 10, 12]),
    "it lacks looks": lambda header, tensors: tensors.update(thumbnails=_zeros(0), thumbnail_ends=_zeros(6)),
    "6,155 bytes of looks for 6 images": _thumbnails([2, 4, 6, 8, 9, 10], looks=6155),
    "5 thumbnail_ends for 6 images": _thumbnails([2, 4, 6, 8, 10]),
    "it has a tensor 'more', which no project has": lambda header, tensors: tensors.update(more=np.zeros(3)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_does_not_hold_together_is_refused(reason, tmp_path):
    header, tensors = projects.parts()
    REFUSED[reason](header, tensors)
    file = projects.write(tmp_path / "p.safetensors", header, tensors)
    with pytest.raises(WeightsError) as caught:
        vitral.load(file)
    assert reason in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_head_of_another_width_is_refused(tmp_path):
    header, tensors = projects.parts(width=64)
    with pytest.raises(WeightsError, match="its head reads 64 features, and the model has 128"):
        vitral.load(projects.write(tmp_path / "p.safetensors", header, tensors))


@pytest.mark.parametrize("ends", [[10, 9, 8, 7, 6, 10], [-2, 4, 6, 8, 9, 10]])
def test_thumbnails_whose_ends_fall_are_refused(ends, tmp_path):
    header, tensors = projects.parts()
    _thumbnails(ends)(header, tensors)
    with pytest.raises(WeightsError, match="the lengths of its thumbnails are wrong"):
        vitral.load(projects.write(tmp_path / "p.safetensors", header, tensors))


@pytest.mark.parametrize("text", ["[]", "{", '{"format": NaN}', "[" * 5000])
def test_a_description_that_is_no_json_object_is_refused(text, tmp_path):
    _, tensors = projects.parts()
    with pytest.raises(WeightsError, match="damaged project file"):
        vitral.load(projects.write(tmp_path / "p.safetensors", text, tensors))


def test_a_project_that_was_not_taught_yet_says_what_to_do(tmp_path):
    header, tensors = projects.parts()
    del tensors["head.weight"], tensors["head.bias"]
    with pytest.raises(WeightsError, match="this project has no head yet") as caught:
        vitral.load(projects.write(tmp_path / "p.safetensors", header, tensors))
    assert "give two classes three images each" in str(caught.value)


def test_another_version_of_the_model_names_the_version_to_install(tmp_path):
    header, tensors = projects.parts()
    header["weights"] = "sha256:" + "0" * 64
    with pytest.raises(WeightsError, match=r"pip install vitral==0\.0\.1"):
        vitral.load(projects.write(tmp_path / "p.safetensors", header, tensors))


def test_a_file_that_is_cut_short_is_refused(file):
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(WeightsError, match="damaged safetensors file"):
        vitral.load(file)


def test_options_that_state_another_network_are_refused(file):
    with pytest.raises(WeightsError, match="vitral's own"):
        vitral.load(file, format="timm")
    with pytest.raises(UsageError, match="the file contains one network"):
        vitral.load(file, weights_key="x")
