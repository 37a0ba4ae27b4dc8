"""Near-duplicates are found among images of equal statistics, and stay on one side of a cut."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from images import MakeImages, scene
from running import as_json, printed, train
from vitral.data import load
from vitral.data.checks.groups import FEW, joined, near_sets, whole_groups
from vitral.data.checks.near import near_pairs, thumbnail, unsearchable
from vitral.data.checks.validate import check
from vitral.data.splits import subset, with_validation
from vitral.training.run_folder import RunFolder
from vitral.workflows.planning.plan import plan_run
from vitral.workflows.planning.run_data import load_run_data


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=40)
    return Image.open(file)


def cropped(image: Image.Image) -> Image.Image:
    return image.crop((2, 5, 2 + round(image.width * 0.9), 5 + round(image.height * 0.9)))


CHANGES = {
    "resized": lambda image: image.resize((40, 32), Image.Resampling.BICUBIC),
    "compressed": compressed,
    "mirrored": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    "cropped": cropped,
    "gray": lambda image: image.convert("L"),
}


def thumbnails(images: list[Image.Image]) -> np.ndarray:
    return np.stack([thumbnail(np.atleast_3d(np.asarray(image))) for image in images])


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_copy_is_found_and_no_other_pair(change: str) -> None:
    images = [scene(seed) for seed in range(60)]
    copies = [CHANGES[change](image) for image in images[:12]]
    calls: list[tuple[int, int]] = []
    found = near_pairs(thumbnails(images + copies), lambda done, total: calls.append((done, total)))
    assert {(pair.first, pair.second) for pair in found} == {(i, 60 + i) for i in range(12)}
    assert {pair.mirrored for pair in found} == {change == "mirrored"}
    assert all(0.92 <= pair.similarity <= 1.0001 for pair in found)
    assert calls[-1] == (72, 72)


def test_flat_images_and_small_or_many_ones_are_not_compared() -> None:
    flat = [
        Image.fromarray(np.clip(128 + np.random.default_rng(i).normal(0, 1, (64, 64)), 0, 255).astype(np.uint8))
        for i in range(4)
    ]
    assert near_pairs(thumbnails(flat)) == []
    assert near_pairs(thumbnails([scene(0)])) == []
    assert "32 pixels" in unsearchable(10, 28)
    assert "300,001" in unsearchable(300_001, 224)
    assert unsearchable(300_000, 32) == ""


@pytest.fixture
def repeated(tmp_path: Path) -> Path:
    """A folder with 40 scenes in two classes, every fifth one in a changed copy too."""
    root, changes = tmp_path / "photos", list(CHANGES.values())
    for number in range(40):
        folder = root / f"{'cat' if number % 2 else 'dog'}"
        folder.mkdir(parents=True, exist_ok=True)
        scene(number).save(folder / f"{number}.png")
        if number % 5 == 0:
            changes[number // 5 % len(changes)](scene(number)).save(folder / f"{number}-again.png")
    return root


def test_pairs_are_reported_and_drawn(repeated: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sheet = repeated.parent / "near.png"
    out, err = printed(capsys, "data", "check", str(repeated), "--sheet", str(sheet))
    assert "8 pairs" in out
    assert "mirrored" in out
    assert "near-duplicates (8)" in out
    assert "8 of 8 pairs" in err
    with Image.open(sheet) as drawn:
        assert drawn.height > 600
    found = as_json(capsys, "data", "check", str(repeated))
    assert len(found["near_duplicates"]) == 8
    assert found["duplicates"] == []
    pair = found["near_duplicates"][-1]
    assert Path(pair["first"]["name"]).stem.split("-")[0] == Path(pair["second"]["name"]).stem.split("-")[0]


def test_copies_between_splits_are_reported_first(make_images: MakeImages) -> None:
    folder = make_images({"train/a": 3, "train/b": 3, "val/a": 1, "val/b": 1}, size=(40, 40))
    Image.open(folder / "train/a/1.png").resize((60, 60), Image.Resampling.BICUBIC).save(folder / "val/a/copy.png")
    found = check(load(folder))
    assert [heading for heading, _ in found.findings()] == ["near-duplicates between splits", "small classes"]
    assert not found.invalidates


def test_digits_are_too_small_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert "too little detail" in printed(capsys, "data", "check", "digits")[0]


def test_a_plan_keeps_near_duplicates_on_one_side_and_says_so(repeated: Path, tmp_path: Path) -> None:
    job = plan_run({"data": str(repeated), "out": str(tmp_path / "run"), "val_fraction": 0.3})
    assert len(job.plan.near) == 8
    reason = next(choice.reason for choice in job.plan.choices if choice.name == "validation")
    assert "near-duplicates, and other images that belong together, are in the same split (8 groups)" in reason
    sides = [{Path(name).stem.split("-")[0] for name in job.dataset[split].names} for split in ("train", "val")]
    assert sides[0] & sides[1] == set()
    assert 9 <= len(job.dataset["val"]) <= 20


def test_a_run_finds_its_cut_again(repeated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(repeated, tmp_path / "run", epochs=1)
    plan = RunFolder(run.folder).read_plan()
    assert len(plan.near) == 8
    monkeypatch.setattr("vitral.data.checks.groups.near_pairs", lambda *given: pytest.fail("searched again"))
    own = load_run_data(plan)
    assert own.changes == ()
    assert near_sets(load(repeated)["train"]) == plan.near, "from the cache"


def test_groups_of_a_table_stay_on_one_side(make_images: MakeImages) -> None:
    folder = make_images({"images": 60})
    rows = [f"images/{i}.png,{'cat' if i % 2 else 'dog'},{f'patient {i // 6}' if i < 54 else ''}" for i in range(60)]
    (folder / "table.csv").write_text("\n".join(["file,label,group", *rows]))
    dataset = load(folder / "table.csv")
    for cut in (with_validation(dataset, 0.25), subset(dataset, 0.6, 0.3, seed=1)):
        train, val = cut["train"].groups, cut["val"].groups
        assert train is not None
        assert val is not None
        assert set(train) & set(val) == set()
        assert len(val)
    cut = with_validation(dataset, 0.25)
    assert np.bincount(cut["val"].labels).tolist() in ([7, 7], [8, 8], [6, 6], [9, 9], [7, 8], [8, 7])
    job = plan_run({"data": str(folder / "table.csv"), "out": "never written"})
    reason = next(choice.reason for choice in job.plan.choices if choice.name == "validation")
    assert "(9 groups)" in reason


def test_a_group_in_two_splits_is_noted(make_images: MakeImages) -> None:
    folder = make_images({"images": 3})
    (folder / "table.csv").write_text(
        "file,label,group,split\nimages/0.png,a,patient 0,train\nimages/1.png,b,x,train\nimages/2.png,a,patient 0,test"
    )
    assert load(folder / "table.csv").notes == ("1 group is in more than one split: patient 0",)


def test_groups_of_one_are_cut_like_images_without_groups() -> None:
    for seed in range(5):
        rng = np.random.default_rng(seed)
        labels = rng.integers(0, 4, 200)
        taken, order = np.array([3, 9, 0, 20]), rng.permutation(200)
        chosen = whole_groups(np.arange(200), labels, taken, order)
        assert np.bincount(labels[chosen], minlength=4).tolist() == taken.tolist()
        first = [order[labels[order] == label][: taken[label]] for label in range(4)]
        assert sorted(np.concatenate(first)) == np.flatnonzero(chosen).tolist()


def test_a_class_in_one_group_stays_in_train() -> None:
    labels = np.array([0] * 10 + [1] * 10)
    groups = np.array([0] * 10 + list(range(1, 11)))
    chosen = whole_groups(groups, labels, np.array([5, 5]), np.arange(20))
    assert np.bincount(labels[chosen], minlength=2).tolist() == [0, 5]


def test_sets_are_joined_with_groups(make_images: MakeImages) -> None:
    split = load(make_images({"a": 4, "b": 4}))["train"]
    assert near_sets(split) == (), "small images that differ"
    assert joined(split, ()) is split
    both = joined(joined(split, [(0, 1), (4, 5)]), [(1, 4)]).groups
    assert both is not None
    assert len({*both[[0, 1, 4, 5]]}) == 1
    assert len({*both}) == 5
    assert FEW < 10_000
