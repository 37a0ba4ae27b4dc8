"""Test changes to the data of a run: it does not resume with other data, and is not evaluated on images that it may
have been trained on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import vitral
from images import MakeImages, noise
from running import mostly_slow, same_bits, train, weights_of
from vitral.cli.main import main
from vitral.data import load
from vitral.data.options import OWN_DATA, DataOptions
from vitral.data.shards.writing import write_shards
from vitral.errors import DataError, RunError, UsageError
from vitral.inference.options import InferenceOptions
from vitral.training.run_folder import RunFolder
from vitral.workflows.evaluate import evaluate_images
from vitral.workflows.inspection import inspect
from vitral.workflows.running import execute
from vitral.workflows.tables.features import evaluate_features

OPTIONS = InferenceOptions("cpu", "fp32")
PARTED = {"train/cat": 8, "train/dog": 8, "test/cat": 3, "test/dog": 3}


def stop(run: vitral.TrainedRun) -> Path:
    """Remove the files that a run writes at its end, so that it can be resumed."""
    (run.folder / "result.json").unlink()
    return run.folder


def resume(folder: Path, **options: Any) -> vitral.TrainedRun:
    return vitral.train(out=str(folder), resume=True, quiet=True, **options)


def forget(folder: Path) -> None:
    """Make it a run from before data were recorded."""
    record = json.loads((folder / "config.json").read_text("utf-8"))
    del record["data"]
    RunFolder(folder).write(folder / "config.json", json.dumps(record))


def without_record(run: vitral.TrainedRun) -> vitral.TrainedRun:
    """Make it a run from before held-out images were recorded."""
    (run.folder / "held-out.jsonl").unlink()
    return run


def rename_class(photos: Path) -> None:
    (photos / "dog").rename(photos / "wolf")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "an image fewer": (lambda photos: (photos / "cat/3.png").unlink(), "1 image of 'cat' fewer"),
    "an image more": (
        lambda photos: shutil.copy(photos / "cat/3.png", photos / "dog/new.png"),
        "1 image of 'dog' more",
    ),
    "a renamed class": (rename_class, "class 'dog' is now 'wolf'"),
    "a class more": (lambda photos: shutil.copytree(photos / "cat", photos / "bird"), "class 'bird' is new"),
    "a class fewer": (lambda photos: shutil.rmtree(photos / "dog"), "class 'dog' is gone"),
    "a renamed image": (lambda photos: (photos / "cat/3.png").rename(photos / "cat/x.png"), "under other names"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_resume_with_other_data(photos, tmp_path, name):
    change, expected = CHANGES[name]
    folder = stop(train(photos, tmp_path / "run"))
    change(photos)
    with pytest.raises(DataError, match="the run's data have changed") as caught:
        resume(folder)
    reported = str(caught.value)
    assert len(reported.splitlines()) == 4
    assert expected in reported
    assert f"where: {photos}" in reported
    assert "try: restore them" in reported


def test_the_suggested_command_starts_again(photos, tmp_path, capsys):
    folder = stop(train(photos, tmp_path / "run"))
    (photos / "cat/3.png").unlink()
    with pytest.raises(DataError, match=r"begin again: (.*) --overwrite") as caught:
        resume(folder)
    command = str(caught.value).partition("begin again: vitral ")[2].removesuffix(" (or another --out)")
    assert main([*command.split(), "--quiet"]) == 0
    assert sum(json.loads((folder / "result.json").read_text("utf-8"))["images"].values()) == 19


def test_another_cut_of_the_same_images_is_other_data(photos, tmp_path):
    folder = stop(without_record(train(photos, tmp_path / "run")))
    config = folder / "config.json"
    record = json.loads(config.read_text("utf-8"))
    record["run"]["val_fraction"] = 0.3
    RunFolder(folder).write(config, json.dumps(record))
    with pytest.raises(DataError, match="split otherwise"):
        resume(folder)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"val_fraction": 0.0},
        {"train_share": 0.6},
        {"train_share": 0.5, "val_share": 0.3},
        {"seed": 5},
        {"residency": "stream", "workers": 0},
        {"recipe": "mnist-7562", "model": "mu/4"},
    ],
)
def test_unchanged_data_resume(photos, tmp_path, options):
    whole = train(photos, tmp_path / "run", **options)
    before, config = weights_of(whole.folder), (whole.folder / "config.json").read_text("utf-8")
    again = resume(stop(whole))
    assert same_bits(weights_of(again.folder), before)
    assert (whole.folder / "config.json").read_text("utf-8") == config
    if not options.get("val_fraction", 1):
        return
    assert evaluate_images(again.folder, OWN_DATA, OPTIONS).changed == ""


@pytest.mark.parametrize("data", mostly_slow(["digits", "planted"], 2))
def test_named_data_sets_resume(tmp_path, data):
    options = {"epochs": 1, "batch_size": 512, "train_share": 0.1, "val_fraction": 0.1}
    folder = stop(train(data, tmp_path / "run", **options))
    assert resume(folder).folder == folder


def test_a_folder_that_moved_is_the_same_data(photos, make_images, tmp_path):
    """Given at its new path, which the run then remembers."""
    whole = train(photos, tmp_path / "run")
    before, folder = weights_of(whole.folder), stop(whole)
    moved = tmp_path / "else/where"
    moved.parent.mkdir()
    photos.rename(moved)
    with pytest.raises(DataError, match=r"(?s)the run's own images are missing.*--resume") as reported:
        resume(folder)
    assert f"vitral train PATH --out {folder} " in str(reported.value)
    kept = (folder / "config.json").read_bytes()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="--data differs"):
        resume(folder, data=str(tmp_path / "empty"))
    with pytest.raises(DataError, match="have changed since it began") as caught:
        resume(folder, data=str(make_images({"cat": 12, "dog": 7}, name="others")))
    assert "1 image of 'dog' fewer" in str(caught.value)
    with pytest.raises(UsageError, match="--seed differs"):
        resume(folder, data=str(moved), seed=99)
    assert (folder / "config.json").read_bytes() == kept
    again = resume(folder, data=str(moved))
    assert same_bits(weights_of(folder), before)
    assert again.result["val_accuracy"] == whole.result["val_accuracy"]
    assert vitral.evaluate(folder).accuracy == whole.result["val_accuracy"]
    stop(again)
    (moved / "cat/3.png").unlink()
    with pytest.raises(DataError, match=f"begin again: vitral train {moved} "):
        resume(folder)


def test_run_and_data_that_moved_together_are_the_same(make_images, tmp_path):
    home = tmp_path / "home"
    run = train(make_images({"cat": 12, "dog": 8}, name="home/photos"), home / "run")
    before = weights_of(run.folder)
    stop(run)
    home.rename(tmp_path / "moved")
    assert same_bits(weights_of(resume(tmp_path / "moved/run").folder), before)


def test_images_that_were_left_out_are_part_of_the_data(photos, tmp_path):
    """The recorded contents do not depend on which images can be read."""
    (photos / "cat/3.png").write_bytes(b"no image")
    whole = train(photos, tmp_path / "run", bad_images="skip")
    before = weights_of(whole.folder)
    record = json.loads((whole.folder / "config.json").read_text("utf-8"))["data"]
    assert record["images"] == {"train": [12, 8]}
    assert sum(whole.result["images"].values()) == 19
    assert same_bits(weights_of(resume(stop(whole)).folder), before)
    assert vitral.evaluate(whole.folder).accuracy == whole.result["val_accuracy"]
    stop(whole)
    (photos / "cat/3.png").write_bytes((photos / "cat/2.png").read_bytes())
    with pytest.raises(RunError, match="training images have changed"):
        resume(whole.folder)
    (photos / "cat/3.png").unlink()
    assert same_bits(weights_of(resume(whole.folder).folder), before)
    (stop(whole) / "held-out.jsonl").unlink()
    with pytest.raises(DataError, match="1 image of 'cat' fewer"):
        resume(whole.folder)


def test_a_newly_unreadable_image_is_not_skipped_in_a_run(photos, tmp_path):
    """`--bad-images skip` would be another run, which --resume refuses, so it is not suggested."""
    folder = stop(train(photos, tmp_path / "run"))
    whole = (photos / "cat/3.png").read_bytes()
    (photos / "cat/3.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"cat/3\.png") as reported:
        resume(folder)
    assert reported.value.hint is not None
    assert reported.value.hint.startswith("restore them, or begin again: ")
    assert reported.value.hint.endswith("--overwrite (or another --out) with --bad-images skip")
    (photos / "cat/3.png").write_bytes(whole)
    assert resume(folder).result["epochs"] == 3


def test_an_older_run_resumes(photos, tmp_path):
    folder = stop(train(photos, tmp_path / "run"))
    forget(folder)
    before = weights_of(folder)
    assert same_bits(weights_of(resume(folder).folder), before)
    stop(vitral.TrainedRun(folder, {}))
    (photos / "dog/3.png").unlink()
    assert sum(resume(folder).result["images"].values()) == 19
    found = evaluate_images(folder, OWN_DATA, OPTIONS)
    assert (found.split, found.changed) == ("val", "")


def test_the_data_are_checked_before_the_teacher(photos, tmp_path):
    """The error of the teacher about classes would be misleading."""
    teacher = train(photos, tmp_path / "teacher")
    folder = stop(train(photos, tmp_path / "run", teacher=str(teacher.folder)))
    rename_class(photos)
    with pytest.raises(DataError, match="class 'dog' is now 'wolf'"):
        resume(folder)


# ---------------------------------------------------------------- measuring


@pytest.mark.parametrize("name", CHANGES)
def test_validation_images_cut_again_are_not_evaluated_on(photos, tmp_path, name):
    """It may contain training images of the run."""
    change, expected = CHANGES[name]
    run = without_record(train(photos, tmp_path / "run"))
    change(photos)
    for measure in (vitral.evaluate, lambda folder: evaluate_features(folder, knn=1)):
        with pytest.raises(DataError) as caught:
            measure(run.folder)
        reported = str(caught.value)
        assert expected in reported
        assert len(reported.splitlines()) == 4
        if name != "a class fewer":  # one alone cannot be split
            assert "the network may have been trained on the current val images" in reported
            assert "the val images were split off from the training images" in reported
    others = {"a renamed class": "wolf", "a class more": "bird"}
    if name in others:
        with pytest.raises(DataError, match=f"does not have: {others[name]}"):
            vitral.evaluate(run.folder, photos)
    else:
        assert vitral.evaluate(run.folder, photos).images == sum(1 for _ in photos.rglob("*.png"))


def test_other_test_images_are_reported(make_images: MakeImages, tmp_path, capsys):
    photos = make_images(PARTED)
    run = train(photos, tmp_path / "run")
    before = evaluate_images(run.folder, OWN_DATA, OPTIONS)
    (photos / "test/cat/0.png").unlink()
    found = evaluate_images(run.folder, OWN_DATA, OPTIONS)
    assert (before.changed, found.evaluation.images) == ("", 5)
    expected = "The test images have changed since the run began: 1 test image of 'cat' fewer."
    assert found.notes == (expected,)
    assert main(["evaluate", str(run.folder)]) == 0
    assert f"note: {expected}" in capsys.readouterr().err
    assert main(["evaluate", str(run.folder), "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["changed"] == expected
    assert f"note: {expected}" in printed.err
    assert expected in evaluate_features(run.folder, knn=1).notes
    assert vitral.evaluate(run.folder, split="val").images == run.result["images"]["val"], "cut from train as before"


def test_unchanged_test_images_need_no_note(make_images: MakeImages, tmp_path):
    """Also with a new class that sorts first: the metrics are the same, without a note."""
    photos = make_images(PARTED)
    run = without_record(train(photos, tmp_path / "run"))
    (photos / "train/dog/0.png").unlink()
    shutil.copytree(photos / "train/cat", photos / "train/bird")
    found = evaluate_images(run.folder, OWN_DATA, OPTIONS)
    assert (found.split, found.notes) == ("test", ())
    assert found.evaluation.accuracy == run.result["test_accuracy"]
    with pytest.raises(
        DataError, match=r"split off from the training images.*class 'bird' is new.*1 training image of 'dog' fewer"
    ):
        vitral.evaluate(run.folder, split="val")
    with pytest.raises(DataError, match="does not have: bird"):
        vitral.evaluate(run.folder, split="train")


def test_a_changed_validation_folder_is_reported(make_images: MakeImages, tmp_path):
    photos = make_images({"train/cat": 6, "train/dog": 6, "val/cat": 3, "val/dog": 3})
    run = train(photos, tmp_path / "run")
    shutil.copy(photos / "val/cat/0.png", photos / "val/cat/new.png")
    (photos / "train/dog/0.png").unlink()
    found = evaluate_images(run.folder, OWN_DATA, OPTIONS)
    assert found.evaluation.images == 7
    assert "1 training image of 'dog' fewer; 1 validation image of 'cat' more" in found.notes[0]
    for renamed in photos.glob("*/dog"):
        renamed.rename(renamed.with_name("wolf"))
    with pytest.raises(DataError, match="1 class that the model does not have: wolf"):
        vitral.evaluate(run.folder)


def test_new_splits_may_contain_training_images(make_images: MakeImages, tmp_path):
    """New test and validation splits may contain training images of the run."""
    photos = make_images({"train/cat": 8, "train/dog": 8})
    run = without_record(train(photos, tmp_path / "run"))
    for kind in ("cat", "dog"):
        (photos / "test" / kind).mkdir(parents=True)
        shutil.copy(photos / "train" / kind / "0.png", photos / "test" / kind / "new.png")
    found = evaluate_images(run.folder, OWN_DATA, OPTIONS)
    assert found.split == "test"
    assert "there are separate test images now" in found.notes[0], "train has all that it had: these are others"
    (photos / "train/cat/0.png").unlink()
    with pytest.raises(DataError, match=r"the network may have been trained on the current test images") as caught:
        vitral.evaluate(run.folder)
    assert "the data had no test images when the run began" in str(caught.value)
    (photos / "test").rename(photos / "val")
    with pytest.raises(DataError, match=r"the network may have been trained on the current val images"):
        vitral.evaluate(run.folder)


def test_moved_training_images_are_not_evaluated_on(make_images: MakeImages, tmp_path):
    photos = make_images(PARTED)
    run = without_record(train(photos, tmp_path / "run"))
    (photos / "train/cat/0.png").rename(photos / "test/cat/new.png")
    with pytest.raises(DataError, match=r"may have been trained on the current test images") as caught:
        vitral.evaluate(run.folder)
    assert "some may have been moved there from train" in str(caught.value)


def test_missing_test_images_are_reported(make_images: MakeImages, tmp_path):
    photos = make_images({**PARTED, "val/cat": 2, "val/dog": 2})
    run = train(photos, tmp_path / "run")
    assert not evaluate_images(run.folder, OWN_DATA, OPTIONS).notes
    shutil.rmtree(photos / "test")
    found = evaluate_images(run.folder, OWN_DATA, OPTIONS)
    assert found.split == "val"
    assert found.notes[0].startswith("The run's test images are missing: evaluated on val.")


def test_a_copy_of_the_training_data_is_recognized(make_images: MakeImages, photos, tmp_path):
    run = train(photos, tmp_path / "run")
    shutil.copytree(photos, tmp_path / "copy")
    for data, known in (
        (tmp_path / "copy", True),
        (make_images({"cat": 3, "dog": 3}, name="other", size=(9, 10)), False),
    ):
        notes = evaluate_images(run.folder, DataOptions(data), OPTIONS).notes
        assert any(note.startswith("The network was trained on these images") for note in notes) == known


def test_training_images_in_another_container_are_recognized(make_images: MakeImages, photos, tmp_path):
    """Shards of a folder, the folder of shards, a part of it, and other images of the same names."""
    write_shards(load(photos), tmp_path / "shards")
    part = tmp_path / "part"
    shutil.copytree(photos, part)
    for path in list(part.glob("*/*"))[::2]:
        path.unlink()
    of_folder, of_shards = train(photos, tmp_path / "run"), train(tmp_path / "shards", tmp_path / "sharded")
    namesakes = tmp_path / "namesakes"
    shutil.copytree(photos, namesakes)
    (namesakes / "cat/0.png").unlink()  # else it counts as the run's data, whose pixels are not compared
    for number, path in enumerate(namesakes.glob("*/*")):
        Image.fromarray(noise(1000 + number, (8, 10))).save(path)
    for run, data, known in (
        (of_folder, tmp_path / "shards", True),
        (of_shards, photos, True),
        (of_folder, part, True),
        (of_folder, namesakes, False),
        (of_shards, namesakes, False),
    ):
        notes = evaluate_images(run.folder, DataOptions(data), OPTIONS).notes
        assert any(note.startswith("The network was trained on these images") for note in notes) == known, data


def test_swapped_test_and_validation_images_are_reported(make_images: MakeImages, tmp_path):
    photos = make_images({**PARTED, "val/cat": 2, "val/dog": 2})
    run = train(photos, tmp_path / "run")
    for before, after in (("test", "x"), ("val", "test"), ("x", "val")):
        (photos / before).rename(photos / after)
    found = evaluate_images(run.folder, OWN_DATA, OPTIONS)
    assert "The test images have changed since the run began" in found.notes[0]


def test_test_images_used_for_validation_are_remembered(make_images: MakeImages, tmp_path):
    """Without a val split the run validates on test; later a val split appears, moved from train."""
    photos = make_images(PARTED)
    run = train(photos, tmp_path / "run", val_fraction=0.0)
    for kind in ("cat", "dog"):
        (photos / "val" / kind).mkdir(parents=True)
        (photos / "train" / kind / "0.png").rename(photos / "val" / kind / "new.png")
    found = evaluate_images(run.folder, OWN_DATA, OPTIONS)
    assert (found.split, found.notes) == ("test", ())
    assert found.evaluation.accuracy == run.result["val_accuracy"]
    with pytest.raises(DataError, match=r"may have been trained on the current val images"):
        vitral.evaluate(run.folder, split="val")


def test_changed_training_images_are_reported(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    shutil.copy(photos / "cat/3.png", photos / "dog/new.png")
    notes = evaluate_images(run.folder, DataOptions(split="train"), OPTIONS).notes
    assert notes[0] == "The train images have changed since the run began: 1 image of 'dog' more."
    assert notes[1].startswith("The network was trained on these images")


def test_evaluation_does_not_need_the_initial_weights(photos, tmp_path):
    first = train(photos, tmp_path / "first")
    options = {"init": str(first.folder), "epochs": 1, "device": "cpu", "quiet": True}
    run = vitral.train(str(photos), out=str(tmp_path / "second"), **options)
    shutil.rmtree(first.folder)
    assert vitral.evaluate(run.folder).accuracy == run.result["val_accuracy"]


def test_inspecting_needs_no_particular_images(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    (photos / "cat/3.png").unlink()
    assert "val images" in inspect(run.folder).source


def test_every_run_records_its_data(photos, tmp_path):
    record = json.loads((train(photos, tmp_path / "run").folder / "config.json").read_text("utf-8"))["data"]
    assert set(record) == {"classes", "images", "digests"}
    assert list(record["digests"]) == ["train", "val"]
    assert execute.RunFolder(tmp_path / "run").read_plan().fingerprint.to_json() == record
