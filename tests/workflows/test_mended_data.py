"""Test that a run survives the mending of its data: it knows its held-out images again, whatever happened to others."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import vitral
from images import MakeImages
from running import as_json, printed, same_bits, train, weights_of
from vitral.data import held_out, load
from vitral.data.options import OWN_DATA
from vitral.data.shards.writing import write_shards
from vitral.errors import DataError, RunError
from vitral.export.exporting import export_model
from vitral.inference.engines import int8, openvino
from vitral.inference.options import InferenceOptions
from vitral.training.run_folder import RunFolder
from vitral.workflows.evaluate import Evaluated, evaluate_images
from vitral.workflows.planning.run_data import load_run_data
from vitral.workflows.quantize import quantize
from vitral.workflows.replay import replay

OPTIONS = InferenceOptions("cpu", "fp32")


def evaluated(folder: Path) -> Evaluated:
    return evaluate_images(folder, OWN_DATA, OPTIONS)


def by_content(found: Evaluated) -> dict[bytes, np.ndarray]:
    """The bytes of each evaluated image → its probabilities."""
    return {bytes(found.images.raw(i)): row for i, row in enumerate(found.probabilities)}


def split_of(folder: Path, split: str, label: str = "cat") -> list[Path]:
    """Files of a split and a class."""
    names = load_run_data(RunFolder(folder).read_plan()).dataset[split].names
    return [Path(name) for name in names if f"/{label}/" in name]


def rename(path: Path) -> None:
    path.rename(path.with_name("renamed.png"))


def move(path: Path) -> None:
    path.rename(path.parent.with_name("dog") / "moved.png")


MENDED: dict[str, tuple[str, Callable[[Path], object], int, str]] = {
    "a training image removed": ("train", Path.unlink, 4, ""),
    "a training image moved": ("train", move, 4, ""),
    "a training image renamed": ("train", rename, 4, ""),
    "an image added": ("train", lambda path: path.with_name("new.png").write_bytes(path.read_bytes() + b"0"), 4, ""),
    "a held-out image removed": ("val", Path.unlink, 3, "1 was removed or edited (cat/{name})"),
    "a held-out image moved": ("val", move, 4, "1 has another label, and labels count as they are now"),
    "a held-out image renamed": ("val", rename, 4, ""),
    "a held-out image overwritten and one added": (
        "val",
        lambda path: (path.with_name("new.png").write_bytes(b""), path.write_bytes(b"")),
        3,
        "1 was removed or edited (cat/{name})",
    ),
}
"""Change → an image of which split it is done to, the held-out images that are there afterwards, and their note."""


@pytest.mark.parametrize("name", MENDED)
def test_the_held_out_images_are_measured_that_are_still_there(photos, tmp_path, name):
    split, change, there, note = MENDED[name]
    run = train(photos, tmp_path / "run")
    before = by_content(evaluated(run.folder))
    image = split_of(run.folder, split)[0]
    change(image)
    found = evaluated(run.folder)
    after = by_content(found)
    assert len(after) == found.evaluation.images == there
    assert all(np.array_equal(row, before[raw]) for raw, row in after.items())
    expected = note.format(name=image.name)
    assert found.changed == (f"{there} of the 4 val images that the run held out: {expected}." if note else "")
    if not note:
        assert found.evaluation.accuracy == run.result["val_accuracy"]


def test_labels_count_as_they_are_now(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    image, found = split_of(run.folder, "val")[0], evaluated(run.folder)
    predicted = found.predictor.classes[by_content(found)[image.read_bytes()].argmax()]
    other = "dog" if predicted == "cat" else "cat"
    shutil.move(image, photos / predicted / "moved.png")
    right = evaluated(run.folder).evaluation.accuracy
    shutil.move(photos / predicted / "moved.png", photos / other / "moved.png")
    assert right - evaluated(run.folder).evaluation.accuracy == pytest.approx(1 / 4)


def test_an_image_of_a_new_class_is_left_out_and_a_renamed_class_is_an_error(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    (photos / "bird").mkdir()
    for split in ("val", "train"):
        split_of(run.folder, split)[0].rename(photos / "bird" / f"{split}.png")
    found = evaluated(run.folder)
    assert found.evaluation.images == 3
    assert "3 of the 4 val images that the run held out: 1 is now of a class that the network does not" in found.changed
    (photos / "dog").rename(photos / "wolf")
    with pytest.raises(DataError, match="classes that the model does not have: bird, wolf"):
        evaluated(run.folder)


def test_a_class_with_one_image_left_is_no_hindrance(photos, tmp_path):
    """Validation images can no longer be cut from it."""
    run = train(photos, tmp_path / "run")
    kept = {path.name for path in split_of(run.folder, "val", "dog")}
    for path in (photos / "cat").iterdir():
        path.unlink()
    for path in (photos / "dog").iterdir():
        if path.name not in kept:
            path.unlink()
    assert evaluated(run.folder).evaluation.images == len(kept)


def test_nothing_is_measured_if_no_held_out_image_is_left(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    for label in ("cat", "dog"):
        for path in split_of(run.folder, "val", label):
            path.unlink()
    with pytest.raises(DataError, match="may have been trained on the current val images"):
        evaluated(run.folder)


def test_without_its_record_a_run_refuses_as_before(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    split_of(run.folder, "train")[0].unlink()
    (run.folder / "held-out.jsonl").unlink()
    with pytest.raises(DataError, match="may have been trained on the current val images"):
        evaluated(run.folder)


def test_images_that_may_come_from_train_are_left_out(make_images: MakeImages, tmp_path):
    photos = make_images({"train/cat": 8, "train/dog": 8, "test/cat": 3, "test/dog": 3})
    run = train(photos, tmp_path / "run")
    (photos / "train/cat/0.png").rename(photos / "test/cat/new.png")
    found = evaluated(run.folder)
    assert found.evaluation.images == 6
    assert found.evaluation.accuracy == run.result["test_accuracy"]
    assert "1 more left out, because the network may have been trained on it" in found.changed


@pytest.mark.parametrize("left_out", ["train", "val"])
def test_a_file_that_was_skipped_may_go(photos, tmp_path, left_out):
    """The run is measured, resumed and replayed as if nothing had happened."""
    probe = train(photos, tmp_path / "probe")
    bad = split_of(probe.folder, left_out)[0]
    bad.write_bytes(b"")
    run = train(photos, tmp_path / "run", bad_images="skip")
    before, lines = weights_of(run.folder), (run.folder / "metrics.jsonl").read_text("utf-8").splitlines()
    image = f"cat/{split_of(run.folder, 'train')[1].name}"
    shown = replay(run.folder, epoch=2, image=image).names
    bad.unlink()
    found = evaluated(run.folder)
    assert (found.changed, found.evaluation.accuracy) == ("", run.result["val_accuracy"])
    assert replay(run.folder, epoch=2, image=image).names == shown
    (run.folder / "result.json").unlink()
    (run.folder / "checkpoints/last.safetensors").unlink()
    (run.folder / "metrics.jsonl").write_text(lines[0] + "\n", "utf-8")
    RunFolder(run.folder).accept()
    again = vitral.train(out=str(run.folder), resume=True, quiet=True)
    assert same_bits(weights_of(again.folder), before)
    assert again.result["val"] == run.result["val"]
    photos.joinpath("cat/new.png").write_bytes((photos / "dog/0.png").read_bytes() + b"0")
    with pytest.raises(DataError, match="have changed"):
        replay(run.folder, step=1)


def test_a_batch_is_replayed_without_held_out_images(photos, tmp_path, capsys):
    run = train(photos, tmp_path / "run")
    before = replay(run.folder, step=2)
    split_of(run.folder, "val")[0].unlink()
    _, err = printed(capsys, "replay", str(run.folder), "--step", "2", "--out", str(tmp_path / "sheet.png"))
    assert "note: 3 of the 4 val images" in err
    after = replay(run.folder, step=2)
    assert after.names == before.names
    assert torch.equal(after.images, before.images)
    move(split_of(run.folder, "train")[0])
    with pytest.raises(DataError, match="have changed") as caught:
        replay(run.folder, step=2)
    assert "every training image has to be there" in str(caught.value.hint)


def test_missing_training_images_are_named(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    gone = split_of(run.folder, "train")[:5]
    for path in gone[:2]:
        path.unlink()
    names = ", ".join(f"{path.parent.name}/{path.name}" for path in gone[:2])
    with pytest.raises(DataError) as caught:
        replay(run.folder, step=1)
    assert str(caught.value.why).endswith(f"missing: {names}")
    for path in gone[2:]:
        path.unlink()
    with pytest.raises(DataError, match=r"missing: \S+, \S+, \S+ and 2 more"):
        replay(run.folder, step=1)


def test_unknown_images_and_exports_use_the_same_images(photos, tmp_path, capsys, make_images):
    run = train(photos, tmp_path / "run")
    split_of(run.folder, "val")[0].unlink()
    split_of(run.folder, "train")[0].unlink()
    strange = make_images({"x": 4}, name="strange", size=(9, 11))
    found = as_json(capsys, "evaluate", str(run.folder), "--unknown", str(strange), "--device", "cpu")
    assert found["unknown"]["known"] == 3
    assert any("3 of the 4 val images" in note for note in found["unknown"]["notes"])
    proof = export_model(run.folder, "torch", out=tmp_path / "export").proof
    assert (proof.labeled, proof.held_out) == (3, True)
    out, _ = printed(capsys, "verify", str(run.folder), "--format", "json")
    assert "held-out.jsonl" in out


@pytest.mark.skipif(bool(int8.unavailable_reason()), reason=int8.unavailable_reason())
def test_int8_is_judged_on_the_same_images(photos, tmp_path, monkeypatch):
    monkeypatch.setattr(openvino, "installed", lambda: False)
    run = train(photos, tmp_path / "run")
    split_of(run.folder, "val")[0].unlink()
    result = quantize(run.folder, images=4, judged=20)
    assert (result.judged, result.images) == (3, 4)
    assert "3 of the 4 val images" in result.changed


def test_resuming_says_what_has_changed_and_both_ways_out(photos, tmp_path):
    run = train(photos, tmp_path / "run")
    (run.folder / "result.json").unlink()
    split_of(run.folder, "val")[0].unlink()
    with pytest.raises(DataError, match="1 image of 'cat' fewer") as caught:
        vitral.train(out=str(run.folder), resume=True, quiet=True)
    assert str(caught.value.hint).startswith("restore them, or begin again: vitral train ")


# ---------------------------------------------------------------- the record


def test_the_record_has_a_line_for_each_held_out_image(photos, tmp_path):
    (photos / "cat/odd.png").write_bytes(b"")
    run = train(photos, tmp_path / "run", bad_images="skip")
    head, *lines = map(json.loads, (run.folder / "held-out.jsonl").read_text("utf-8").splitlines())
    assert head["skipped"] == ["cat/odd.png"]
    assert len(lines) == run.result["images"]["val"]
    for line in lines:
        assert (photos / line["name"]).stat().st_size == line["size"]
        assert line["name"].startswith(line["label"])
    record = RunFolder(run.folder).read_held_out()
    assert record is not None
    assert held_out.HeldOut.from_lines(record.to_lines().encode()) == record


def test_a_damaged_record_is_an_error_that_verify_names(photos, tmp_path, capsys):
    run = train(photos, tmp_path / "run")
    file = run.folder / "held-out.jsonl"
    file.write_text(file.read_text("utf-8").replace('"cat"', '"dog"'), "utf-8")
    assert evaluated(run.folder).changed == "", "it is not needed as long as the data are the same"
    split_of(run.folder, "train")[0].unlink()
    with pytest.raises(RunError, match="cannot read the record of held-out images"):
        evaluated(run.folder)
    out, _ = printed(capsys, "verify", str(run.folder), "--format", "json", code=1)
    assert "held-out.jsonl" in out


@pytest.mark.parametrize("case", ["too many", "shards", "by name"])
def test_runs_without_a_record(photos, tmp_path, monkeypatch, case):
    data: object = photos
    if case == "shards":
        write_shards(load(photos), tmp_path / "shards")
        data = tmp_path / "shards"
    elif case == "too many":
        monkeypatch.setattr(held_out, "MOST", 3)
    else:
        data = "digits"
    options = {"train_share": 0.1, "batch_size": 64, "epochs": 1} if case == "by name" else {}
    assert not (train(data, tmp_path / "run", **options).folder / "held-out.jsonl").exists()
