"""Test evaluation on a run's own held-out images and on others, with classes matched by name."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitral
from running import TINY
from vitral.cli.main import main
from vitral.data.options import OWN_DATA, DataOptions
from vitral.errors import DataError, UsageError
from vitral.inference.engines import packed
from vitral.inference.options import InferenceOptions
from vitral.inference.tta import COUNTS
from vitral.workflows.evaluate import evaluate_images
from vitral.workflows.tables.features import evaluate_features

OPTIONS = InferenceOptions("cpu", "fp32")


def image(level: int) -> Image.Image:
    return Image.fromarray(np.full((8, 10), level, np.uint8))


@pytest.fixture
def sky(tmp_path: Path) -> Path:
    """Other images of day and night, with a third class folder for the test to fill."""
    for name, level in (("day", 230), ("night", 30)):
        (tmp_path / "other" / name).mkdir(parents=True)
        for number in range(3):
            image(level + number).save(tmp_path / "other" / name / f"{number}.png")
    return tmp_path / "other"


def test_its_own_test_images_by_default(trained):
    found = vitral.evaluate(trained.folder)
    assert found.images == 12
    assert found.accuracy == trained.result["test_accuracy"]
    assert vitral.evaluate(trained.folder, split="val").images == 8
    assert vitral.evaluate(str(trained.folder), split="train").images == 24
    assert vitral.evaluate(vitral.load(trained.folder)).images == 12


def test_views_are_compared_with_the_single_image(trained, capsys):
    plain = evaluate_images(trained.folder, OWN_DATA, OPTIONS)
    assert plain.comparison is None
    for views in ("both", "shifts"):
        found = evaluate_images(trained.folder, OWN_DATA, dataclasses.replace(OPTIONS, tta=views))
        assert found.comparison.views == COUNTS[views]
        assert found.comparison.accuracy_without == plain.evaluation.accuracy
        assert found.comparison.accuracy == found.evaluation.accuracy
        assert found.comparison.agree == np.mean(found.probabilities.argmax(1) == plain.probabilities.argmax(1))
        assert not np.array_equal(found.probabilities, plain.probabilities)
    run = str(trained.folder)
    assert main(["evaluate", run, "--tta", "shifts"]) == 0
    reported = capsys.readouterr().out
    assert "averaged over 3 views of each image: " in reported
    assert main(["evaluate", run, "--tta", "shifts", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["beside"]["views"] == 3
    for words in (["--knn", "3", "--tta", "shifts"], ["--engine", "quick"]):
        assert main(["evaluate", run, *words]) == 2
    assert f"without {plain.evaluation.accuracy:.2%}" in reported


def test_other_images_with_the_same_classes(trained, sky):
    found = evaluate_images(trained.folder, DataOptions(sky), OPTIONS)
    assert (found.split, found.evaluation.images) == ("all", 6)
    assert found.evaluation.accuracy == 1.0
    predictor = vitral.load(trained.folder, device="cpu", precision="fp32")
    singles = [predictor(found.images.names[i]).probabilities for i in (0, 5)]
    assert np.allclose(found.probabilities[[0, 5]], singles, atol=1e-5)


def test_labels_are_matched_by_name_not_by_number(trained, sky, make_images, tmp_path):
    """Three classes, two of which are in the data with other indices."""
    photos = make_images({"a": 4, "b": 4, "c": 4})
    options = {"model": "mu/4", "dim": 8, "depth": 1, "heads": 1, "mlp_dim": 8, "image_size": 8, "epochs": 1}
    run = vitral.train(str(photos), out=str(tmp_path / "abc"), quiet=True, device="cpu", **options)
    shutil.rmtree(photos / "a")
    found = evaluate_images(run.folder, DataOptions(photos), OPTIONS)
    assert found.images.labels.tolist() == [1] * 4 + [2] * 4
    assert [score.images for score in found.evaluation.per_class] == [0, 4, 4]


def test_foreign_classes_are_refused(trained, sky):
    shutil.copytree(sky / "day", sky / "dusk")
    with pytest.raises(DataError, match="1 class that the model does not have: dusk") as caught:
        vitral.evaluate(trained.folder, sky)
    assert "the model has day, night" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 5


def test_images_of_one_class_alone_are_measured(trained, sky):
    """They are useless for training, but their recall can be measured."""
    shutil.rmtree(sky / "night")
    found = evaluate_images(trained.folder, DataOptions(sky), OPTIONS)
    assert [score.images for score in found.evaluation.per_class] == [3, 0]
    assert found.evaluation.accuracy == 1.0
    with pytest.raises(DataError, match="only one class: day"):
        vitral.train(str(sky), out="nowhere", quiet=True)
    with pytest.raises(DataError, match="only one class: day"):
        evaluate_features(trained.folder, DataOptions(sky), knn=1)


def test_bad_images(trained, sky):
    (sky / "day/1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"day/1\.png"):
        vitral.evaluate(trained.folder, sky)
    assert vitral.evaluate(trained.folder, sky, bad_images="skip").images == 5


def test_images_that_are_left_out_are_named(trained, sky, capsys, tmp_path):
    (sky / "day/1.png").write_bytes(b"no image")
    words = ["evaluate", str(trained.folder), str(sky), "--bad-images", "skip"]
    assert main([*words, "--report", str(tmp_path / "report.html")]) == 0
    message = capsys.readouterr().err
    assert "left out 1 unreadable image: " in message
    assert "day/1.png" in message
    assert "left out 1 unreadable image" in (tmp_path / "report.html").read_text("utf-8")
    assert main([*words, "--format", "json"]) == 0
    assert [Path(name).name for name in json.loads(capsys.readouterr().out)["unreadable"]] == ["1.png"]
    assert main(["evaluate", str(trained.folder), "--format", "json"]) == 0
    assert "unreadable" not in json.loads(capsys.readouterr().out)


def test_evaluation_leaves_out_what_the_run_left_out(sky, tmp_path):
    for kind in ("day", "night"):
        (sky / kind / "none.png").write_bytes(b"no image")
    run = vitral.train(str(sky), out=str(tmp_path / "run"), bad_images="skip", quiet=True, val_fraction=0.5, **TINY)
    assert vitral.evaluate(run.folder).accuracy == run.result["val_accuracy"]
    assert evaluate_features(run.folder, knn=1).support == run.result["images"]["train"]
    with pytest.raises(DataError, match="unreadable"):
        vitral.evaluate(run.folder, sky)


def test_a_report_is_a_file(trained, sky, capsys):
    assert main(["evaluate", str(trained.folder), str(sky), "--report", str(sky)]) == 2
    assert "--report must be a file, not a folder" in capsys.readouterr().err


def test_weights_without_a_run_need_data(trained, sky):
    weights = trained.folder / "model.safetensors"
    with pytest.raises(UsageError, match=r"vitral evaluate .*model.safetensors DATA"):
        vitral.evaluate(weights)
    assert vitral.evaluate(weights, sky).images == 6


def test_choices_are_checked(trained, sky):
    with pytest.raises(DataError, match="no 'dev' split"):
        vitral.evaluate(trained.folder, sky, split="dev")
    with pytest.raises(UsageError, match="unknown choice for bad images: 'ignore'"):
        vitral.evaluate(trained.folder, sky, bad_images="ignore")


@pytest.mark.parametrize(("precision", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_the_requested_engine_computes(trained, precision, kind):
    if not packed.self_test(kind):
        pytest.skip(f"{precision} cannot be packed here")
    plain = evaluate_images(trained.folder, OWN_DATA, dataclasses.replace(OPTIONS, precision=precision))
    found = evaluate_images(trained.folder, OWN_DATA, InferenceOptions("cpu", precision, "packed"))
    assert (plain.predictor.engine, found.predictor.engine) == ("plain", "packed")
    assert np.abs(found.probabilities - plain.probabilities).max() < 0.03


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("device", ["/dev/full", "/dev/null"])
def test_a_report_never_replaces_a_device(device, trained, capsys):
    """As root, too: a full device is an error, and stays a device."""
    code = main(["evaluate", str(trained.folder), "--report", device])
    err = capsys.readouterr().err
    assert stat.S_ISCHR(os.stat(device).st_mode)
    assert code in ((1, 2) if device == "/dev/full" else (0,)), err
    assert "Traceback" not in err
    assert ("/dev/full" in err) == (device == "/dev/full")


def test_the_page_contains_its_command(trained, sky, tmp_path, capsys):
    page = tmp_path / "page.html"
    shutil.copy(sky / "day/0.png", sky / "night/wrong.png")  # a mistake to be looked at
    words = [str(trained.folder), str(sky), "--tta", "shifts", "--precision", "fp32"]
    assert main(["evaluate", *words, "--report", str(page)]) == 0
    command = f"vitral evaluate {trained.folder} {sky} --precision fp32 --tta shifts --report {page}"
    written = page.read_text("utf-8")
    assert command in written
    assert "Heat maps explain each image itself" in written
    page.unlink()
    capsys.readouterr()
    assert main(command.split()[1:]) == 0
    assert page.read_text("utf-8") == written


def test_the_page(trained, sky, tmp_path):
    found = evaluate_images(trained.folder, DataOptions(sky), OPTIONS)
    found.write_report(tmp_path / "deep/page.html", "vitral evaluate")
    assert "vitral evaluate" in (tmp_path / "deep/page.html").read_text("utf-8")
