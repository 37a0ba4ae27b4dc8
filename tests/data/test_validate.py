from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from images import MakeImages, noise
from vitral.data import load
from vitral.data.checks.validate import DataCheck, Unreadable, check, readable
from vitral.data.images.decode import read_image
from vitral.errors import DataError, ImageError, UsageError
from vitral.inference.sources import find, notes


def printed(found: DataCheck) -> str:
    file = io.StringIO()
    found.print_table(Console(file=file, width=200))
    return file.getvalue()


def test_a_set_without_defects_says_what_was_checked(make_images: MakeImages) -> None:
    folder = make_images({"train/a": 12, "train/b": 11, "val/a": 2, "val/b": 3}, size=(8, 10))
    found = check(load(folder))
    assert not found.invalidates
    assert found.images == 28
    assert found.counts == {"train": (12, 11), "val": (2, 3)}
    assert found.sizes is not None
    assert found.sizes.height == (8, 8, 8)
    assert found.sizes.most_common == ((8, 10, 28),)
    assert (found.modes, found.formats) == ({"RGB": 28}, {"PNG": 28})
    assert found.findings() == []
    assert found.found() == []
    lines = [" ".join(line.split()) for line in printed(found).splitlines()]
    assert "found nothing" in lines
    assert "checked readable files, copies, single colors, sizes, classes" in lines, "neither blur nor near-duplicates"


@pytest.fixture
def defective(make_images: MakeImages) -> Path:
    """A folder with one of every defect."""
    folder = make_images({"train/a": 25, "train/b": 2, "train/c": 12, "val/a": 1, "val/b": 1})
    (folder / "train/a/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 not an image")
    (folder / "train/c/empty.png").touch()
    shutil.copy(folder / "train/a/0.png", folder / "val/a/leak.png")
    Image.open(folder / "train/a/1.png").save(folder / "train/c/torn.bmp")  # other file, same pixels
    shutil.copy(folder / "train/a/2.png", folder / "train/a/again.png")
    Image.fromarray(noise(99, (30, 20), 1)).save(folder / "train/b/gray.gif")
    (folder / "train/list.txt").write_text("x")
    return folder


def test_every_defect_is_reported(defective: Path) -> None:
    found = check(load(defective))
    assert found.invalidates
    bad = {Path(one.name).name: one.reason for one in found.unreadable}
    assert set(bad) == {"broken.jpg", "empty.png"}
    assert bad["empty.png"] == "empty file"

    def groups(duplicates: object) -> list[list[str]]:
        return [[Path(place.name).name for place in group] for group in duplicates]  # type: ignore[attr-defined]

    assert groups(found.leaks) == [["0.png", "leak.png"]]
    assert groups(found.conflicts) == [["1.png", "torn.bmp"]]
    assert sorted(groups(found.duplicates)) == [["0.png", "leak.png"], ["1.png", "torn.bmp"], ["2.png", "again.png"]]
    assert found.absent() == {"val": ("c",)}
    assert found.small() == {"b": 3}
    assert found.imbalance == pytest.approx(27 / 3)
    assert found.formats["GIF"] == 1
    assert found.sizes is not None
    assert (found.sizes.height, found.sizes.width) == ((8, 8, 30), (10, 10, 20))
    text = printed(found)
    said = "unreadable", "broken.jpg", "--bad-images skip", "leak between splits", "contradicting labels", "val has no"
    for word in (*said, "again.png"):
        assert word in text
    assert "1 other file is not used: train/list.txt" in text
    assert "found unreadable (2), leak between splits (1), contradicting labels (2), copies (1)" in " ".join(
        text.split()
    )


def test_the_findings_are_json(defective: Path) -> None:
    found = json.loads(json.dumps(check(load(defective)).to_json()))
    assert found["counts"]["train"] == {"a": 27, "b": 3, "c": 14}
    assert found["invalidates_results"] is True
    assert found["found"] == {"unreadable": 2, "leak": 1, "contradiction": 2, "copy": 1}
    assert {bad["split"] for bad in found["unreadable"]} == {"train"}
    assert found["leaks"][0][1]["label"] == "a"
    assert found["small_classes"] == {"b": 3}


def test_names_cannot_inject_terminal_codes(make_images: MakeImages) -> None:
    folder = make_images({"[red]a": 1, "b": 1})
    (folder / "b/[blink]x.png").touch()
    text = printed(check(load(folder)))
    assert "[red]a" in text
    assert "[blink]x.png" in text


def test_many_classes_are_summarized(make_images: MakeImages) -> None:
    text = printed(check(load(make_images({str(i): 1 for i in range(30)}))))
    assert "10 more" in text
    rows = [line.split()[0] for line in text.splitlines()[1:] if line.strip()]  # the first line names a folder
    assert "19" in rows
    assert "20" not in rows
    assert "29" not in rows


def test_progress_is_reported_up_to_the_end(make_images: MakeImages) -> None:
    calls: list[tuple[int, int]] = []
    check(load(make_images({"a": 100, "b": 50})), lambda done, total: calls.append((done, total)))
    assert calls[-1] == (150, 150)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


def test_no_progress_bar_without_a_terminal(make_images: MakeImages, capsys: pytest.CaptureFixture[str]) -> None:
    check(load(make_images({"a": 2, "b": 2})))
    assert capsys.readouterr() == ("", "")


def test_arrays_are_checked_like_files() -> None:
    found = check(load("digits"))
    assert found.images == 1797
    assert found.formats == {"pixels": 1797}
    assert not found.unreadable


def test_a_set_without_any_readable_image(make_images: MakeImages) -> None:
    folder = make_images({"a": 1, "b": 1})
    for path in folder.rglob("*.png"):
        path.write_bytes(b"x")
    dataset = load(folder)
    found = check(dataset)
    assert found.sizes is None
    assert len(found.unreadable) == 2
    printed(found)
    for bad in ("error", "skip"):
        with pytest.raises(DataError, match="readable image"):
            readable(dataset, found.unreadable, bad)  # type: ignore[arg-type]


def test_unreadable_images_are_refused_in_one_error(defective: Path) -> None:
    dataset = load(defective)
    with pytest.raises(DataError, match="2 unreadable images") as caught:
        readable(dataset, check(dataset).unreadable)
    message = str(caught.value)
    assert "broken.jpg" in message
    assert "--bad-images skip" in message
    assert f"vitral data check {defective}" in message
    assert len(message.splitlines()) <= 5


def test_unreadable_images_are_skipped_on_request(defective: Path) -> None:
    dataset = load(defective)
    kept = readable(dataset, check(dataset).unreadable, "skip")
    assert {name: len(split) for name, split in kept.splits.items()} == {"train": 42, "val": 3}
    assert kept.classes == dataset.classes
    assert not check(kept).unreadable
    assert readable(dataset, [], "error") is dataset


def test_a_class_without_a_readable_image_is_refused(make_images: MakeImages) -> None:
    folder = make_images({"train/a": 2, "train/b": 2, "val/a": 1, "val/b": 1})
    (folder / "val/b/0.png").write_bytes(b"x")
    dataset = load(folder)
    assert len(readable(dataset, check(dataset).unreadable, "skip")["val"]) == 1
    for path in folder.glob("train/b/*"):
        path.write_bytes(b"x")
    with pytest.raises(DataError, match="no readable training image of 'b'"):
        readable(dataset, check(load(folder)).unreadable, "skip")


def test_an_unknown_choice_for_bad_images_is_refused(make_images: MakeImages) -> None:
    dataset = load(make_images({"a": 1, "b": 1}))
    with pytest.raises(UsageError, match="known: error, skip"):
        readable(dataset, [Unreadable("train", 0, "x", "y")], "ignore")  # type: ignore[arg-type]


def test_an_unbalanced_set_is_reported(make_images: MakeImages) -> None:
    found = check(load(make_images({"many": 40, "few": 2})))
    assert ("imbalance", "the largest class has 20 times the images of the smallest") in found.findings()


def test_real_photographs_have_no_defects(shared_data: Path) -> None:
    found = check(load(shared_data / "hymenoptera.tar"))
    assert not found.invalidates
    assert [one.why for one in found.unusual] == ["1944 × 2592: 5 times larger than the median side"]
    assert found.formats == {"JPEG": 397, "GIF": 1}
    assert np.prod([high for _, _, high in (found.sizes.height, found.sizes.width)]) > 10**6  # type: ignore[union-attr]


def test_a_single_class_is_reported(make_images: MakeImages) -> None:
    found = check(load(make_images({"cat": 12})))
    assert found.findings() == [("one class", "every image is cat: a classifier needs at least two classes")]


def test_animations_pages_and_videos_are_named(make_images: MakeImages) -> None:
    folder = make_images({"a": 4, "b": 4})
    frames = [Image.open(folder / f"a/{i}.png").copy() for i in range(3)]
    for name, options in (("a/moving.gif", {}), ("b/moving.webp", {"lossless": True}), ("b/pages.tif", {})):
        frames[0].save(folder / name, save_all=True, append_images=frames[1:], **options)
    frames[0].save(folder / "a/still.gif")
    (folder / "a/live.MOV").write_bytes(b"\0\0\0\x14ftypqt  ")
    (folder / "b/clip.mp4").write_bytes(b"\0\0\0\x14ftypisom")
    found = check(load(folder))
    assert "3 images with several frames or pages, of which the first one is read: GIF (1), WEBP (1), TIFF (1)" in (
        found.notes
    )
    for said in (found.notes, notes(find([folder]))):
        assert re.search(r"2 videos are not used: \S*a/live.MOV, \S*b/clip.mp4; extract their frames", "\n".join(said))
    assert found.images == 12
    for name in ("a/live.MOV", "b/clip.mp4"):
        with pytest.raises(ImageError, match=r"it is a video .*: extract its frames"):
            read_image(folder / name)
