"""Test a second run on a folder that has one: it keeps the held-out images, and the command compares both."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import vitral
from images import MakeImages
from running import TINY, as_words, printed, same_bits, weights_of
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning import plan as planning
from vitral.workflows.planning.run_data import load_run_data
from vitral.workflows.planning.throughput import Fit


@pytest.fixture
def photos(make_images: MakeImages) -> Path:
    return make_images({"cat": 40, "dog": 30})


def train(photos: Path, name: str, **options: Any) -> Path:
    out = photos.parent / "runs" / name
    return vitral.train(str(photos), out=str(out), quiet=True, **{**TINY, "epochs": 1, **options}).folder


def contents(folder: Path, split: str) -> set[bytes]:
    images = load_run_data(RunFolder(folder).read_plan()).dataset[split]
    return {bytes(images.raw(i)) for i in range(len(images))}


def mend(photos: Path, first: Path) -> None:
    """Remove one held-out image, move one, rename one, and add ten images."""
    names = [Path(name) for name in load_run_data(RunFolder(first).read_plan()).dataset["val"].names]
    names[0].unlink()
    names[1].rename(photos / "dog/moved.png")
    names[2].rename(names[2].with_name("renamed.png"))
    for number in range(10):
        (photos / f"dog/new{number}.png").write_bytes((photos / "dog/0.png").read_bytes() + b"%d" % number)


def test_held_out_images_stay_held_out(photos):
    first = train(photos, "first")
    before = contents(first, "val")
    mend(photos, first)
    second = train(photos, "second", augment="affine")
    val, everything = contents(second, "val"), {path.read_bytes() for path in photos.glob("*/*.png")}
    assert len(before & everything) == 6
    assert before & everything <= val
    assert not contents(second, "train") & before
    assert len(val) == round(0.1 * len(everything)) == 8, "new ones are drawn in the same share"
    (choice,) = (one for one in RunFolder(second).read_plan().choices if one.name == "held out before")
    assert choice.value == "6 images"
    assert choice.reason.startswith(f"{first} held them out, too")


def test_other_images_in_the_same_folder_are_no_earlier_run(photos, make_images):
    first = train(photos, "first")
    shutil.rmtree(photos)
    make_images({"cat": 40, "dog": 30}, name="other", size=(9, 10)).rename(photos)
    plan = planning.plan_run({**TINY, "data": str(photos), "out": str(first.parent / "second")}).plan
    assert not plan.kept
    assert "held out before" not in {one.name for one in plan.choices}


def test_the_split_does_not_need_the_earlier_run(photos):
    first = train(photos, "first")
    mend(photos, first)
    second = train(photos, "second", epochs=2)
    weights, result = weights_of(second), json.loads((second / "result.json").read_text("utf-8"))
    shutil.rmtree(first)
    assert vitral.evaluate(second).accuracy == result["val_accuracy"]
    val = contents(second, "val")
    for name in ("result.json", "metrics.jsonl", "checkpoints/last.safetensors"):
        (second / name).unlink()
    again = vitral.train(out=str(second), resume=True, quiet=True)
    assert same_bits(weights_of(again.folder), weights)
    mend(photos, second)
    assert contents(second, "val") < val


@pytest.mark.parametrize("options", [{"split_seed": 0}, {"val_fraction": 0.2}, {"seed": 1}])
def test_options_of_the_split_draw_others(photos, options):
    first = train(photos, "first")
    mend(photos, first)
    assert not RunFolder(train(photos, "second", **options)).read_plan().kept


@pytest.mark.parametrize("options", [{"split_seed": 0}, {"val_fraction": 0.2}, {"seed": 1}])
def test_the_same_options_of_the_split_keep_its_images(photos, options):
    first = train(photos, "first", **options)
    before = contents(first, "val")
    train(photos, "between", split_seed=7)
    mend(photos, first)
    kept = before & {path.read_bytes() for path in photos.glob("*/*.png")}
    assert kept <= contents(train(photos, "second", **options), "val")


def test_a_table_of_the_same_images_keeps_them(photos):
    """As `vitral label` writes it: a label is corrected, an image is excluded."""
    first = train(photos, "first")
    table = photos / "labels.csv"
    rows = [f"{one.parent.name}/{one.name},{one.parent.name},{one.parent.name},yes" for one in photos.glob("*/*.png")]
    (corrected,) = (number for number, row in enumerate(rows) if row.startswith("cat/3.png"))
    rows[corrected] = "cat/3.png,dog,cat,yes"
    table.write_text("\n".join(["file,label,given,checked", *rows]) + "\n")
    second = vitral.train(
        str(table), out=str(photos.parent / "runs/second"), quiet=True, **{**TINY, "epochs": 1}
    ).folder
    assert contents(first, "val") == contents(second, "val")
    (choice,) = (one for one in RunFolder(second).read_plan().choices if one.name == "held out before")
    assert str(first) in choice.reason
    folder = planning.plan_run({**TINY, "data": str(photos), "out": str(photos.parent / "runs/third")})
    (note,) = (one.reason for one in folder.plan.choices if one.name == "data")
    assert f"vitral train {table}" in note


def test_a_table_of_other_images_of_the_same_names_keeps_nothing(photos, make_images):
    train(photos, "first")
    other = make_images({"cat": 40, "dog": 30}, name="other", size=(9, 10))
    table = other / "mine.csv"
    rows = [f"{one.parent.name}/{one.name},{one.parent.name}" for one in other.glob("*/*.png")]
    table.write_text("\n".join(["file,label", *rows]) + "\n")
    job = planning.plan_run({**TINY, "data": str(table), "out": str(photos.parent / "runs/second")})
    assert not job.plan.kept


def test_other_data_and_other_tasks_are_not_earlier_runs(photos, make_images):
    train(photos, "first")
    other = make_images({"cat": 40, "dog": 30}, name="other")
    assert not RunFolder(train(other, "second")).read_plan().kept


def test_the_same_data_are_split_as_before(photos):
    first, second = train(photos, "first"), train(photos, "second")
    assert same_bits(weights_of(first), weights_of(second))
    records = [RunFolder(one).read_plan().fingerprint for one in (first, second)]
    assert records[0] == records[1]


def test_epochs_do_not_depend_on_how_busy_the_machine_is(photos, monkeypatch):
    """They decide the augmentation, so that two runs would differ in more than their data."""
    options = {name: value for name, value in TINY.items() if name != "epochs"} | {"log": ()}
    fits = itertools.chain([3], itertools.repeat(2))
    monkeypatch.setattr(planning, "epochs_within", lambda job, began: Fit(next(fits), "measured here", 10.0))
    first = vitral.train(str(photos), out=str(photos.parent / "runs/first"), quiet=True, minutes=5.0, **options).folder

    def planned(minutes: float) -> tuple[int | None, bool]:
        again = {"data": str(photos), "out": str(photos.parent / "runs/b"), "minutes": minutes}
        job = planning.plan_run({**options, **again})
        (choice,) = (one for one in job.plan.choices if one.name == "epochs")
        return job.run.epochs, f"the same number as in {first}" in choice.reason

    assert planned(5.0) == (3, True)
    assert planned(6.0) == (2, False)
    result = RunFolder(first).read_result() | {"device": "another"}
    RunFolder(first).write(first / "result.json", json.dumps(result))
    assert planned(5.0) == (2, False)


@pytest.mark.report
def test_the_command_compares_both_runs(photos, monkeypatch, capsys):
    monkeypatch.chdir(photos.parent)
    words = as_words({**TINY, "epochs": 2})
    _, err = printed(capsys, "train", "photos", *words)
    expected = next(line for line in err.splitlines() if line.startswith("Of 10 new "))
    assert expected in Path("runs/photos/report.html").read_text("utf-8")
    assert "On the same" not in err
    mend(photos, Path("runs/photos"))
    _, err = printed(capsys, "train", "photos", *words, "--out", "runs/again")
    (line,) = (line for line in err.splitlines() if line.startswith("On the same "))
    assert line.startswith("On the same 6 images (1 relabeled since), runs/photos reaches ")
    assert ". The difference is " in line
    assert line.endswith(", which may be chance: vitral compare runs/photos runs/again")
    printed(capsys, *line.partition(": vitral ")[2].split(), "--device", "cpu")
