"""The data of a run that change behind its back: it does not go on with others, and is not measured on what it may have
learned from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vitral
from pictures import MakePictures
from running import same_bits, train, weights_of
from vitral.cli import main
from vitral.errors import DataError, RunError, UsageError
from vitral.recipes import execute
from vitral.recipes.evaluation import evaluate_pictures
from vitral.recipes.features import evaluate_features
from vitral.recipes.inspection import inspect

pytestmark = pytest.mark.usefixtures("no_report")

OPTIONS = {"split": None, "data_root": "data", "bad_images": "error", "device": "cpu", "precision": "fp32",
           "progress": None}  # fmt: skip
PARTED = {"train/cat": 8, "train/dog": 8, "test/cat": 3, "test/dog": 3}


def stop(run: vitral.TrainedRun) -> Path:
    """Take back what a run wrote at its end, so that it has something to go on with."""
    (run.folder / "result.json").unlink()
    return run.folder


def resume(folder: Path, **options: Any) -> vitral.TrainedRun:
    return vitral.train(out=str(folder), resume=True, quiet=True, **options)


def forget(folder: Path) -> None:
    """Make it a run from before its data were remembered."""
    record = json.loads((folder / "config.json").read_text("utf-8"))
    del record["data"]
    (folder / "config.json").write_text(json.dumps(record))


def rename_class(photos: Path) -> None:
    (photos / "dog").rename(photos / "wolf")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a picture fewer": (lambda photos: (photos / "cat/3.png").unlink(), "1 picture of 'cat' fewer"),
    "a picture more": (lambda photos: shutil.copy(photos / "cat/3.png", photos / "dog/new.png"),
                       "1 picture of 'dog' more"),
    "a renamed class": (rename_class, "class 'dog' is now 'wolf'"),
    "a class more": (lambda photos: shutil.copytree(photos / "cat", photos / "bird"), "class 'bird' is new"),
    "a class fewer": (lambda photos: shutil.rmtree(photos / "dog"), "class 'dog' is gone"),
    "a renamed picture": (lambda photos: (photos / "cat/3.png").rename(photos / "cat/x.png"), "under other names"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_run_does_not_go_on_with_other_data(photos, tmp_path, name):
    change, said = CHANGES[name]
    folder = stop(train(photos, tmp_path / "run"))
    change(photos)
    with pytest.raises(DataError, match="the run's data are not what they were") as caught:
        resume(folder)
    told = str(caught.value)
    assert len(told.splitlines()) == 4
    assert said in told
    assert f"where: {photos}" in told
    assert "try: put them back" in told


def test_what_is_told_to_type_begins_again(photos, tmp_path, capsys):
    folder = stop(train(photos, tmp_path / "run"))
    (photos / "cat/3.png").unlink()
    with pytest.raises(DataError, match=r"begin again: (.*) --overwrite") as caught:
        resume(folder)
    command = str(caught.value).partition("begin again: vitral ")[2].removesuffix(" (or another --out)")
    assert main([*command.split(), "--quiet"]) == 0
    assert sum(json.loads((folder / "result.json").read_text("utf-8"))["images"].values()) == 19


def test_another_cut_of_the_same_pictures_is_other_data(photos, tmp_path):
    folder = stop(train(photos, tmp_path / "run"))
    config = folder / "config.json"
    record = json.loads(config.read_text("utf-8"))
    record["run"]["val_fraction"] = 0.3
    config.write_text(json.dumps(record))
    with pytest.raises(DataError, match="split otherwise"):
        resume(folder)


@pytest.mark.parametrize(
    "options",
    [
        {}, {"val_fraction": 0.0}, {"train_share": 0.6}, {"train_share": 0.5, "val_share": 0.3}, {"seed": 5},
        {"residency": "stream", "workers": 0}, {"recipe": "mnist-7562", "model": "mu/4"},
    ],
)  # fmt: skip
def test_what_has_not_changed_goes_on(photos, tmp_path, options):
    whole = train(photos, tmp_path / "run", **options)
    before, config = weights_of(whole.folder), (whole.folder / "config.json").read_text("utf-8")
    again = resume(stop(whole))
    assert same_bits(weights_of(again.folder), before)
    assert (whole.folder / "config.json").read_text("utf-8") == config
    if not options.get("val_fraction", 1):
        return
    assert evaluate_pictures(again.folder, None, **OPTIONS).changed == ""


@pytest.mark.parametrize("data", ["digits", "planted"])
def test_sets_by_name_go_on(tmp_path, data):
    options = {"epochs": 1, "batch_size": 512, "train_share": 0.1, "val_fraction": 0.1}
    folder = stop(train(data, tmp_path / "run", **options))
    assert resume(folder).folder == folder


def test_a_folder_that_moved_is_the_same_data(photos, make_pictures, tmp_path):
    """Typed at its new place; the run finds it there from then on."""
    whole = train(photos, tmp_path / "run")
    before, folder = weights_of(whole.folder), stop(whole)
    moved = tmp_path / "else/where"
    moved.parent.mkdir()
    photos.rename(moved)
    with pytest.raises(DataError, match=r"(?s)the run's own pictures are gone.*--resume tells it where") as told:
        resume(folder)
    assert f"vitral train PLACE --out {folder} " in str(told.value)
    kept = (folder / "config.json").read_bytes()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="--data differs"):
        resume(folder, data=str(tmp_path / "empty"))
    with pytest.raises(DataError, match="not what they were") as caught:
        resume(folder, data=str(make_pictures({"cat": 12, "dog": 7}, name="others")))
    assert "1 picture of 'dog' fewer" in str(caught.value)
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


def test_run_and_data_that_moved_together_are_the_same(make_pictures, tmp_path):
    home = tmp_path / "home"
    run = train(make_pictures({"cat": 12, "dog": 8}, name="home/photos"), home / "run")
    before = weights_of(run.folder)
    stop(run)
    home.rename(tmp_path / "moved")
    assert same_bits(weights_of(resume(tmp_path / "moved/run").folder), before)


def test_pictures_that_were_left_out_are_part_of_the_data(photos, tmp_path):
    """What the run remembers does not hang on which of them can be read."""
    (photos / "cat/3.png").write_bytes(b"no picture")
    whole = train(photos, tmp_path / "run", bad_images="skip")
    before = weights_of(whole.folder)
    record = json.loads((whole.folder / "config.json").read_text("utf-8"))["data"]
    assert record["pictures"] == {"train": [12, 8]}
    assert sum(whole.result["images"].values()) == 19
    assert same_bits(weights_of(resume(stop(whole)).folder), before)
    assert vitral.evaluate(whole.folder).accuracy == whole.result["val_accuracy"]
    stop(whole)
    (photos / "cat/3.png").write_bytes((photos / "cat/2.png").read_bytes())
    with pytest.raises(RunError, match="not those that it learned from"):
        resume(whole.folder)
    (photos / "cat/3.png").unlink()
    with pytest.raises(DataError, match="1 picture of 'cat' fewer"):
        resume(whole.folder)


def test_a_picture_that_broke_since_is_not_skipped_in_the_middle_of_a_run(photos, tmp_path):
    """`--bad-images skip` would be another run, which --resume refuses: it is not what to type."""
    folder = stop(train(photos, tmp_path / "run"))
    whole = (photos / "cat/3.png").read_bytes()
    (photos / "cat/3.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"cat/3\.png") as told:
        resume(folder)
    assert told.value.hint is not None
    assert told.value.hint.startswith("put them back as they were, or begin again: ")
    assert told.value.hint.endswith("--overwrite (or another --out) with --bad-images skip")
    (photos / "cat/3.png").write_bytes(whole)
    assert resume(folder).result["epochs"] == 3


def test_a_run_from_before_goes_on_as_it_did(photos, tmp_path):
    folder = stop(train(photos, tmp_path / "run"))
    forget(folder)
    before = weights_of(folder)
    assert same_bits(weights_of(resume(folder).folder), before)
    stop(vitral.TrainedRun(folder, {}))
    (photos / "dog/3.png").unlink()
    assert sum(resume(folder).result["images"].values()) == 19
    found = evaluate_pictures(folder, None, **OPTIONS)
    assert (found.split, found.changed) == ("val", "")


def test_the_data_are_looked_at_before_the_teacher(photos, tmp_path):
    """Whose complaint about classes would tell half of it."""
    teacher = train(photos, tmp_path / "teacher")
    folder = stop(train(photos, tmp_path / "run", teacher=str(teacher.folder)))
    rename_class(photos)
    with pytest.raises(DataError, match="class 'dog' is now 'wolf'"):
        resume(folder)


# ---------------------------------------------------------------- measuring


@pytest.mark.parametrize("name", CHANGES)
def test_validation_that_is_cut_anew_is_not_measured_on(photos, tmp_path, name):
    """Pictures that the run learned from may be in it."""
    change, said = CHANGES[name]
    run = train(photos, tmp_path / "run")
    change(photos)
    for measure in (vitral.evaluate, lambda folder: evaluate_features(folder, knn=1)):
        with pytest.raises(DataError) as caught:
            measure(run.folder)
        told = str(caught.value)
        assert said in told
        assert len(told.splitlines()) == 4
        if name != "a class fewer":  # one alone cannot be split
            assert "the run may have learned from the val pictures" in told
            assert "they are cut from train" in told
    others = {"a renamed class": "wolf", "a class more": "bird"}
    if name in others:
        with pytest.raises(DataError, match=f"does not know: {others[name]}"):
            vitral.evaluate(run.folder, photos)
    else:
        assert vitral.evaluate(run.folder, photos).images == sum(1 for _ in photos.rglob("*.png"))


def test_other_test_pictures_are_told(make_pictures: MakePictures, tmp_path, capsys):
    photos = make_pictures(PARTED)
    run = train(photos, tmp_path / "run")
    before = evaluate_pictures(run.folder, None, **OPTIONS)
    (photos / "test/cat/0.png").unlink()
    found = evaluate_pictures(run.folder, None, **OPTIONS)
    assert (before.changed, found.evaluation.images) == ("", 5)
    said = "The test pictures are not those that the run began with: 1 test picture of 'cat' fewer."
    assert found.notes == (said,)
    assert main(["evaluate", str(run.folder)]) == 0
    assert f"note: {said}" in capsys.readouterr().err
    assert main(["evaluate", str(run.folder), "--format", "json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["changed"] == said
    assert f"note: {said}" in printed.err
    assert said in evaluate_features(run.folder, knn=1).notes
    assert vitral.evaluate(run.folder, split="val").images == run.result["images"]["val"], "cut from train as before"


def test_test_pictures_stay_what_they_were_where_others_change(make_pictures: MakePictures, tmp_path):
    """Also where a class is new that comes before theirs: the figures are the same, and nothing is to be said."""
    photos = make_pictures(PARTED)
    run = train(photos, tmp_path / "run")
    (photos / "train/dog/0.png").unlink()
    shutil.copytree(photos / "train/cat", photos / "train/bird")
    found = evaluate_pictures(run.folder, None, **OPTIONS)
    assert (found.split, found.notes) == ("test", ())
    assert found.evaluation.accuracy == run.result["test_accuracy"]
    with pytest.raises(DataError, match=r"cut from train.*class 'bird' is new.*1 training picture of 'dog' fewer"):
        vitral.evaluate(run.folder, split="val")
    with pytest.raises(DataError, match="does not know: bird"):
        vitral.evaluate(run.folder, split="train")


def test_a_validation_folder_that_changed_is_told(make_pictures: MakePictures, tmp_path):
    photos = make_pictures({"train/cat": 6, "train/dog": 6, "val/cat": 3, "val/dog": 3})
    run = train(photos, tmp_path / "run")
    shutil.copy(photos / "val/cat/0.png", photos / "val/cat/new.png")
    (photos / "train/dog/0.png").unlink()
    found = evaluate_pictures(run.folder, None, **OPTIONS)
    assert found.evaluation.images == 7
    assert "1 training picture of 'dog' fewer; 1 validation picture of 'cat' more" in found.notes[0]
    for renamed in photos.glob("*/dog"):
        renamed.rename(renamed.with_name("wolf"))
    with pytest.raises(DataError, match="classes that the model does not know: wolf"):
        vitral.evaluate(run.folder)


def test_what_was_train_may_be_test_now(make_pictures: MakePictures, tmp_path):
    """Test and validation pictures that there were not when the run began may have come from its training pictures."""
    photos = make_pictures({"train/cat": 8, "train/dog": 8})
    run = train(photos, tmp_path / "run")
    for kind in ("cat", "dog"):
        (photos / "test" / kind).mkdir(parents=True)
        shutil.copy(photos / "train" / kind / "0.png", photos / "test" / kind / "new.png")
    found = evaluate_pictures(run.folder, None, **OPTIONS)
    assert found.split == "test"
    assert "there are test pictures of their own now" in found.notes[0], "train has all that it had: these are others"
    (photos / "train/cat/0.png").unlink()
    with pytest.raises(DataError, match=r"the run may have learned from the test pictures") as caught:
        vitral.evaluate(run.folder)
    assert "there were none when it began" in str(caught.value)
    (photos / "test").rename(photos / "val")
    with pytest.raises(DataError, match=r"the run may have learned from the val pictures"):
        vitral.evaluate(run.folder)


def test_training_pictures_that_were_moved_are_not_measured_on(make_pictures: MakePictures, tmp_path):
    photos = make_pictures(PARTED)
    run = train(photos, tmp_path / "run")
    (photos / "train/cat/0.png").rename(photos / "test/cat/new.png")
    with pytest.raises(DataError, match=r"may have learned from the test pictures") as caught:
        vitral.evaluate(run.folder)
    assert "some may have been moved there from train" in str(caught.value)


def test_test_pictures_that_are_gone_are_missed(make_pictures: MakePictures, tmp_path):
    photos = make_pictures({**PARTED, "val/cat": 2, "val/dog": 2})
    run = train(photos, tmp_path / "run")
    assert not evaluate_pictures(run.folder, None, **OPTIONS).notes
    shutil.rmtree(photos / "test")
    found = evaluate_pictures(run.folder, None, **OPTIONS)
    assert found.split == "val"
    assert found.notes[0].startswith("The run's test pictures are gone: measured on val.")


def test_a_copy_of_what_it_learned_from_is_known(make_pictures: MakePictures, photos, tmp_path):
    run = train(photos, tmp_path / "run")
    shutil.copytree(photos, tmp_path / "copy")
    for data, known in ((tmp_path / "copy", True), (make_pictures({"cat": 3, "dog": 3}, name="other"), False)):
        notes = evaluate_pictures(run.folder, data, **OPTIONS).notes
        assert any(note.startswith("The network learned from these pictures") for note in notes) == known


def test_test_and_validation_pictures_that_changed_places_are_told(make_pictures: MakePictures, tmp_path):
    photos = make_pictures({**PARTED, "val/cat": 2, "val/dog": 2})
    run = train(photos, tmp_path / "run")
    for before, after in (("test", "x"), ("val", "test"), ("x", "val")):
        (photos / before).rename(photos / after)
    found = evaluate_pictures(run.folder, None, **OPTIONS)
    assert "The test pictures are not those that the run began with" in found.notes[0]


def test_test_pictures_that_were_validated_on_stay_known(make_pictures: MakePictures, tmp_path):
    """Without validation pictures the run's are those of test; later there are some, moved from train."""
    photos = make_pictures(PARTED)
    run = train(photos, tmp_path / "run", val_fraction=0.0)
    for kind in ("cat", "dog"):
        (photos / "val" / kind).mkdir(parents=True)
        (photos / "train" / kind / "0.png").rename(photos / "val" / kind / "new.png")
    found = evaluate_pictures(run.folder, None, **OPTIONS)
    assert (found.split, found.notes) == ("test", ())
    assert found.evaluation.accuracy == run.result["val_accuracy"]
    with pytest.raises(DataError, match=r"may have learned from the val pictures"):
        vitral.evaluate(run.folder, split="val")


def test_training_pictures_that_changed_are_told(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    shutil.copy(photos / "cat/3.png", photos / "dog/new.png")
    notes = evaluate_pictures(run.folder, None, **{**OPTIONS, "split": "train"}).notes
    assert notes[0] == "The train pictures are not those that the run began with: 1 picture of 'dog' more."
    assert notes[1].startswith("The network learned from these pictures")


def test_its_data_are_measured_on_without_the_weights_that_it_began_from(photos, tmp_path):
    first = train(photos, tmp_path / "first")
    options = {"init": str(first.folder), "epochs": 1, "device": "cpu", "quiet": True}
    run = vitral.train(str(photos), out=str(tmp_path / "second"), **options)
    shutil.rmtree(first.folder)
    assert vitral.evaluate(run.folder).accuracy == run.result["val_accuracy"]


def test_looking_inside_needs_no_particular_pictures(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    (photos / "cat/3.png").unlink()
    assert "val pictures" in inspect(run.folder).source


def test_every_run_remembers(photos, tmp_path):
    record = json.loads((train(photos, tmp_path / "run").folder / "config.json").read_text("utf-8"))["data"]
    assert set(record) == {"classes", "pictures", "digests"}
    assert list(record["digests"]) == ["train", "val"]
    assert execute.RunFolder(tmp_path / "run").read_plan().contents.to_json() == record
