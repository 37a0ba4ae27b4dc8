"""Blurred images, images of one color and of unusual sizes, judged by the set that they are in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from faults import drawn, stranger
from images import scene
from vitral.data import load
from vitral.data.checks.findings import Found
from vitral.data.checks.looks import ONE_COLOR, look
from vitral.data.checks.validate import check


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for number in range(24):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn(number % 5, number, (150, 200)).save(path, quality=90)
    return tmp_path / "photos"


def unusual(photos: Path, kind: str) -> dict[str, Found]:
    return {Path(one.place.name).name: one for one in check(load(photos)).unusual if one.kind == kind}


def test_nothing_is_unusual_in_an_ordinary_set(photos: Path) -> None:
    assert check(load(photos)).unusual == ()


def test_blurred_images_are_listed_with_the_value(photos: Path) -> None:
    for number in (3, 4):
        path = photos / "ab"[number % 2] / f"{number}.jpg"
        Image.open(path).filter(ImageFilter.GaussianBlur(12)).save(path, quality=90)
    found = unusual(photos, "blurred")
    assert set(found) == {"3.jpg", "4.jpg"}
    assert "pixels wide" in found["3.jpg"].why


def test_a_soft_set_is_not_blurred_as_a_whole(photos: Path) -> None:
    for path in photos.rglob("*.jpg"):
        Image.open(path).filter(ImageFilter.GaussianBlur(12)).save(path, quality=90)
    assert unusual(photos, "blurred") == {}


def test_blur_does_not_depend_on_the_resolution() -> None:
    sharp, soft = (drawn(1, 1, (300, 400)), drawn(1, 1, (300, 400)).filter(ImageFilter.GaussianBlur(20)))
    for image in (sharp, soft):
        large = image.resize((1200, 900), Image.Resampling.BICUBIC)
        edges = [look(np.asarray(one)).edge for one in (image, large)]
        assert edges[1] == pytest.approx(edges[0], rel=0.35)
    assert look(np.asarray(soft)).edge > 4 * look(np.asarray(sharp)).edge


def test_images_of_one_color_are_listed_as_such_only(photos: Path) -> None:
    noisy = np.array([200, 30, 90]) + np.random.default_rng(0).normal(0, 1, (100, 100, 3))
    Image.fromarray(noisy.astype(np.uint8)).save(photos / "a/red.jpg", quality=60)
    Image.new("RGBA", (100, 100)).save(photos / "b/empty.png")
    Image.new("L", (100, 100), 255).save(photos / "b/white.png")
    assert set(unusual(photos, "one-color")) == {"red.jpg", "empty.png", "white.png"}
    assert unusual(photos, "blurred") == {}
    assert look(np.full((10, 10, 1), 7, np.uint8)).spread == 0 < ONE_COLOR


def test_sizes_far_from_the_others_are_listed(photos: Path) -> None:
    scene(50, (16, 24)).save(photos / "a/icon.png")
    scene(51, (900, 1200)).save(photos / "b/scan.jpg")
    found = unusual(photos, "size")
    assert set(found) == {"icon.png", "scan.jpg"}
    assert "16 × 24" in found["icon.png"].why
    assert "smaller" in found["icon.png"].why
    assert "6 times larger" in found["scan.jpg"].why


def test_a_set_of_many_sizes_has_no_unusual_one(tmp_path: Path) -> None:
    for number in range(30):
        path = tmp_path / "photos" / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        side = int(16 * 2 ** (number % 6))
        scene(number, (side, side)).save(path)
    assert unusual(tmp_path / "photos", "size") == {}


def screen(number: int) -> Image.Image:
    """Draw a dark window with a bar, a button and lines of text."""
    image = Image.new("RGB", (400, 640), (24, 26, 33))
    pen = ImageDraw.Draw(image)
    pen.rectangle((0, 0, 400, 50), fill=(60, 90, 200))
    pen.rectangle((250, 560, 380, 610), fill=(230, 230, 230))
    for line in range(14):
        pen.text((16, 70 + 34 * line), f"{number} of {line} messages", "white", ImageFont.load_default(18))
    return image


def test_text_and_screenshots_among_photographs_are_listed(photos: Path) -> None:
    stranger(1).save(photos / "a/page.png")
    screen(1).save(photos / "b/screen.jpg", quality=80)
    found = unusual(photos, "graphic")
    assert set(found) == {"page.png", "screen.jpg"}
    assert "one color" in found["page.png"].why


def test_text_is_not_listed_where_it_belongs(photos: Path) -> None:
    (photos / "pages").mkdir()
    for number in range(2):
        stranger(number).save(photos / f"pages/{number}.png")
    assert unusual(photos, "graphic") == {}
    screen(1).save(photos / "a/screen.png")
    for number in range(6):
        stranger(number).save(photos / f"b/page{number}.png")
    assert unusual(photos, "graphic") == {}


def test_objects_on_white_are_photographs(photos: Path) -> None:
    for number in range(2):
        white = Image.new("RGB", (400, 400), "white")
        white.paste(drawn(number, 40 + number, (150, 200)).filter(ImageFilter.GaussianBlur(1)), (100, 120))
        white.save(photos / "a" / f"product{number}.jpg", quality=90)
    assert unusual(photos, "graphic") == {}
