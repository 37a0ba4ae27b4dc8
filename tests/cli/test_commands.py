"""Test every command: results on standard output, optionally as JSON, everything else on standard error."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import vitral
from running import TINY, as_json, as_words, printed
from vitral.cli.main import main
from vitral.cli.train import _print_result
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning.run_data import load_run_data

WORDS = as_words({**TINY, "epochs": 1})


def test_train(capsys, photos):
    out, err = printed(capsys, "train", photos, *WORDS)
    assert out == ""
    for part in (
        "Plan",
        "more settings: --plan-only",
        "epoch 1/1",
        "Accuracy",
        "Report   runs/photos/report.html",
        "vitral predict",
    ):
        assert part in err
    result = as_json(capsys, "train", photos, *WORDS, "--overwrite", "--quiet")
    assert result == json.loads(Path("runs/photos/result.json").read_text("utf-8"))
    assert result["command"].startswith("vitral train photos ")


def test_suggested_commands_work(capsys, photos):
    Path("photos/.hidden").mkdir()
    Path("photos/.hidden/0.png").write_bytes(b"no image")
    _, err = printed(capsys, "train", photos, *WORDS)
    commands = [line.split()[1:] for line in err.partition("Next:\n")[2].splitlines()]
    assert [words[0] for words in commands] == ["predict", "explain", "evaluate", "data", "serve"]
    held_out = load_run_data(RunFolder("runs/photos").read_plan()).dataset["val"].names
    assert commands[0] == ["predict", "runs/photos", "YOUR_IMAGES/", "--out", "answers.csv"]
    assert commands[1][2] in list(held_out), "an image that was not trained on"
    commands[0][2] = photos
    for words in commands[:4]:
        printed(capsys, *words)


def test_images_in_shards_suggest_to_predict(capsys, photos):
    printed(capsys, "data", "shard", photos, "--out", "shards")
    _, err = printed(capsys, "train", "shards", *WORDS)
    commands = [line.split()[1:] for line in err.partition("Next:\n")[2].splitlines()]
    predict = ["predict", "runs/photos", "YOUR_IMAGES/", "--out", "answers.csv"]
    assert commands[:2] == [predict, ["explain", "runs/photos", "IMAGE"]]


@pytest.mark.parametrize(
    ("best", "epochs", "images", "expected"),
    [(12, 200, 30, True), (12, 200, 29, False), (12, 31, 30, False), (60, 100, 30, False), (None, None, 30, False)],
)
def test_a_run_with_wasted_epochs_suggests_early_stop(capsys, tmp_path, best, epochs, images, expected):
    """A few validation images choose an epoch by chance."""
    result = {"best_epoch": best, "epochs": epochs, "data": "photos", "images": {"val": images}}
    _print_result(tmp_path, result)
    assert (f"Epoch {best} of {epochs} was the best; --early-stop 20" in capsys.readouterr().err) == expected


def test_quiet_prints_only_the_result(capsys, photos):
    _, err = printed(capsys, "train", photos, *WORDS, "--quiet")
    assert err.strip().startswith("Accuracy")
    assert "Next:" not in err


def test_options_reach_the_run(capsys, photos):
    options = ["--mean", "0.1", "0.2", "0.3", "--freeze", "patch_embed", "blocks.0.*", "--image-size", "8", "12"]
    printed(capsys, "train", photos, *WORDS, *options, "--flip", "--no-cls-token", "--pool", "mean", "--ema", "0.5")
    run = json.loads(Path("runs/photos/config.json").read_text("utf-8"))["run"]
    assert (run["mean"], run["freeze"]) == ([0.1, 0.2, 0.3], ["patch_embed", "blocks.0.*"])
    assert (run["image_size"], run["flip"], run["cls_token"], run["ema"]) == ([8, 12], True, False, 0.5)


@pytest.mark.slow
def test_evaluating_on_training_images_is_reported(capsys, trained):
    data = str(Path(trained.folder).parents[1] / "sky")
    learned, chosen = (
        "note: The network was trained on these images",
        "note: The weights were selected on these images",
    )
    for words, expected in (
        ([data], None),
        (["--split", "train"], learned),
        ([data, "--split", "train"], learned),
        (["--split", "val"], chosen),
        ([], None),
    ):
        assert main(["evaluate", str(trained.folder), *words, "--report", "page.html"]) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
        assert [line.startswith(str(expected)) for line in notes] == [True] * bool(expected)
        page = Path("page.html").read_text("utf-8")
        assert all(line.removeprefix("note: ").split(" To measure on held-out images")[0] in page for line in notes)


def test_data_without_splits_are_not_training_images(capsys, trained):
    sky = Path(trained.folder).parents[1] / "sky"
    out, err = printed(capsys, "evaluate", str(trained.folder), str(sky / "test"), "--report", "page.html")
    assert f"on all images of {sky / 'test'}" in out
    assert "note" not in err
    result = Path("page.html").read_text("utf-8").split('id="result"')[1].split("</section>")[0]
    assert ">Accuracy</h2>" in result
    assert "12 of 12 images correct" in result
    assert f"vitral predict {trained.folder} IMAGE" in Path("page.html").read_text("utf-8")
    for split in ("all", "train"):
        found = as_json(capsys, "evaluate", str(trained.folder), str(sky / "test"), "--split", split)
        assert (found["split"], found["images"]) == ("all", 12)
    with pytest.raises(vitral.errors.DataError, match="no 'all' split"):
        vitral.evaluate(trained.folder, sky, split="all")


def test_evaluate(capsys, trained):
    found = as_json(capsys, "evaluate", str(trained.folder))
    assert (found["split"], found["images"], found["accuracy"]) == ("test", 12, trained.result["test_accuracy"])
    out, _ = printed(capsys, "evaluate", str(trained.folder), "--split", "val", "--report", "page.html")
    assert "day" in out
    assert "unreliable with only" in out
    assert Path("page.html").stat().st_size > 1000


def test_predict(capsys, trained, photos):
    found = as_json(capsys, "predict", str(trained.folder), photos, "--top", "1")
    assert found["errors"] == []
    assert [one["image"] for one in found["predictions"]][:2] == ["photos/cat/0.png", "photos/cat/1.png"]
    assert all(len(one["top"]) == 1 for one in found["predictions"])
    out, err = printed(capsys, "predict", str(trained.folder), "photos/cat/0.png", "--batch-size", "1")
    assert re.fullmatch(r"photos/cat/0\.png\t(day|night) \d+\.\d%\t(day|night) \d+\.\d%\n", out)
    assert err == ""


def test_predict_with_some_bad_images(capsys, trained, photos):
    Path("photos/cat/2.png").write_bytes(b"no image")
    Path("photos/dog/2.png").write_bytes(b"")
    out, err = printed(capsys, "predict", str(trained.folder), photos, code=1)
    assert len(out.splitlines()) == 10
    assert "photos/cat/2.png" in err
    assert "photos/dog/2.png" in err
    assert "2 of 12 could not be read" in err
    found = as_json(capsys, "predict", str(trained.folder), photos, code=1)
    assert [one["image"] for one in found["errors"]] == ["photos/cat/2.png", "photos/dog/2.png"]
    assert all(one["why"] for one in found["errors"])


def test_predict_an_undecodable_name(capsys, trained, photos):
    Path("odd").mkdir()
    shutil.copy("photos/cat/0.png", b"odd/\xff\n.png")
    out, _ = printed(capsys, "predict", str(trained.folder), "odd")
    assert out.startswith("odd/\\xff\\n.png\t")
    assert len(as_json(capsys, "predict", str(trained.folder), "odd")["predictions"]) == 1


def test_summary(capsys, trained):
    found = as_json(capsys, "summary", "mnist-7562")
    assert found["parameters"] == 7850
    assert as_json(capsys, "summary", str(trained.folder))["parameters"] == trained.result["parameters"]
    weights = str(trained.folder / "model.safetensors")
    assert as_json(capsys, "summary", weights)["parameters"] == trained.result["parameters"]
    out, _ = printed(capsys, "summary", "S/16", "--image-size", "64", "32", "--classes", "3", "--full")
    assert "S/16" in out


def test_models(capsys):
    names = [entry["name"] for entry in as_json(capsys, "models")]
    assert {"S/16", "mnist-7562"} <= set(names)
    out, err = printed(capsys, "models")
    assert all(name in out for name in names)
    assert "vitral summary" in err


def test_data_check(capsys, photos):
    found = as_json(capsys, "data", "check", photos)
    assert (found["images"], found["found"]) == (12, {})
    shutil.copy("photos/cat/0.png", "photos/dog/copy.png")
    found = as_json(capsys, "data", "check", photos, code=1)
    assert len(found["conflicts"]) == 1
    out, _ = printed(capsys, "data", "check", photos, code=1)
    assert "photos/cat/0.png" in out.replace("\n", "")


@pytest.mark.report
def test_bad_images_are_left_out_if_requested(capsys, photos):
    bad = [f"{photos}/cat/0.png", f"{photos}/cat/1.png", f"{photos}/dog/3.png"]
    for path in bad:
        Path(path).write_bytes(b"no image")
    _, err = printed(capsys, "train", photos, *WORDS, "--bad-images", "skip")
    named = f"left out 3 unreadable images: {', '.join(bad)}"
    assert err.index(named) < err.index("Plan")
    assert err.count(named) == 1
    proposed = re.search(r"explain runs/photos (\S+)", err)
    assert proposed
    assert proposed[1] not in bad, "an image that can be read is proposed"
    images = json.loads(Path("runs/photos/result.json").read_text("utf-8"))["images"]
    assert sum(images.values()) == 9
    assert f"left out 3 unreadable images: {', '.join(bad)}" in Path("runs/photos/report.html").read_text("utf-8")


def test_numbers_of_predict_are_those_of_python(capsys, trained, photos):
    found = as_json(capsys, "predict", str(trained.folder), photos)["predictions"]
    mine = vitral.load(trained.folder)([one["image"] for one in found])
    assert np.allclose([one["confidence"] for one in found], [one.confidence for one in mine], atol=0.02)
